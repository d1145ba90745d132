"""Moves and casts of what forwards are given, and casts of what they return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.tensor.pytree import CopiedArguments, map_arguments, map_tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any], CopiedArguments | None]
"""The arguments of a forward, and what is to be finished after it."""


def cast_of_inputs(
    policy: MixedPrecisionPolicy, device: torch.device | None
) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments] | None:
    """Return what casts the arguments of a forward and moves them to ``device``, if that is given.
    ``None`` if they stay as they are."""
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    if device is None and dtype is None:
        return None
    return partial(map_arguments, partial(_move_and_cast, device, dtype))


def cast_of_output(policy: MixedPrecisionPolicy) -> Callable[[Any], Any] | None:
    """Return what casts the output of a forward. ``None`` if it stays as it is."""
    if policy.output_dtype is None:
        return None
    return partial(map_tensors, partial(_move_and_cast, None, policy.output_dtype))


def _move_and_cast(
    device: torch.device | None, dtype: torch.dtype | None, tensor: torch.Tensor
) -> torch.Tensor:
    if not tensor.is_floating_point():
        dtype = None
    # The host does not wait for a copy from pinned memory.
    return tensor.to(device=device, dtype=dtype, non_blocking=True)
