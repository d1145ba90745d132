"""What ``SafeFileSystemWriter`` may write: all that ``SafeFileSystemReader`` would read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.checkpoint.entries import read_value
from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.checkpoint.metadata import check_paths, copies


def check_savable(state_dict: Mapping[str, Any], paths: Mapping[str, Any]) -> None:
    """Check what is about to be saved: values by name, and where these are in the state dict.

    Raises:
        CheckpointError: the reader would refuse something of it.
    """
    try:
        check_paths(paths, state_dict)
    except ValueError as error:
        raise CheckpointError(
            f"SafeFileSystemReader would refuse the keys of this state dict: {error}"
        ) from None
    for fqn, value in state_dict.items():
        if isinstance(value, torch.Tensor) and not copies(value.dtype, value.dtype):
            raise CheckpointError(
                f"SafeFileSystemReader would refuse {fqn!r}: torch cannot copy {value.dtype}. "
                "Save a view of it in another dtype"
            )
        if not _is_simple(value):
            _check_value(fqn, value)


def _is_simple(value: Any) -> bool:
    """Return whether ``value`` is surely read."""
    if isinstance(value, DTensor):
        return True
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided
        return is_plain and not (value.is_conj() or value.is_neg() or value.is_quantized)
    if hasattr(value, "__create_write_items__") or hasattr(value, "local_shards"):
        return True  # its parts are saved, which are tensors
    return all(map(_is_number, value if type(value) in (tuple, list) else (value,)))


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return value.bit_length() <= 64
    return type(value) in (bool, float, str, type(None))


def _check_value(fqn: str, value: Any) -> None:
    """Save ``value`` in memory, and read it."""
    if isinstance(value, torch.Tensor):
        value = value.detach()  # as the writer does
    data = io.BytesIO()
    try:
        torch.save(value, data)
        read_value(io.BufferedReader(cast(io.RawIOBase, data)), 0, data.tell())
    except Exception as error:
        raise CheckpointError(
            f"SafeFileSystemReader would refuse {fqn!r}, of type {type(value).__name__}: {error}. "
            "Save what it is made of, or use torch's FileSystemWriter"
        ) from None
