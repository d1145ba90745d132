"""Finds backwards that read parameters although the user said that they need none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.unit import Unit
from fsdp_overlap.tensor.extension import inner_tensors
from fsdp_overlap.torch_internals import top_saved_tensors_default_hooks


@dataclass(frozen=True)
class SavedParameter:
    """A tensor that autograd saved and that lies in a full buffer."""

    tensor: torch.Tensor
    bucket: Bucket


def note_saved(unit: Unit) -> None:
    """Notes which parameters of ``unit`` autograd saves for backward, until :func:`end_note`. The
    user said that backward reads none of them, so their memory is freed by then, and reading it
    must raise. Does nothing if somebody else handles saved tensors, as checkpointing does."""
    buckets = unit.buckets
    handled = top_saved_tensors_default_hooks(True)
    if handled is not None:
        pack = handled[0]
        if not isinstance(pack, partial) or pack.func is not _pack:
            return
        buckets = [*pack.args[0], *buckets]  # with those of a unit around this one
    noting = saved_tensors_hooks(partial(_pack, buckets), _unpack)
    noting.__enter__()
    unit.saved_hooks.append(noting)


def end_note(unit: Unit) -> None:
    unit.saved_hooks.pop().__exit__()


def _pack(buckets: list[Bucket], tensor: torch.Tensor) -> Any:
    for inner in inner_tensors(tensor):
        for bucket in buckets:
            if bucket.full.holds(inner):
                return SavedParameter(tensor, bucket)
    return tensor


def _unpack(saved: Any) -> Any:
    if not isinstance(saved, SavedParameter):
        return saved
    saved.bucket.wait()
    if not saved.bucket.is_gathered:
        raise RuntimeError(
            f"backward of unit {saved.bucket.label!r} reads a parameter of shape "
            f"{tuple(saved.tensor.shape)}, and set_unshard_in_backward(False) said that it needs "
            "none: call set_unshard_in_backward(True) before forward, and ctx.reset() on every "
            "rank now"
        )
    return saved.tensor
