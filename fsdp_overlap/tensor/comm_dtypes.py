"""Dtypes that the backends of ``torch.distributed`` carry, and views of the others as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# The dtypes that gloo and NCCL both have. Newer releases of NCCL have 8-bit floats too.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
COMM_DTYPES = frozenset((*_FLOATS, *_INTEGERS))

REDUCE_DTYPES = frozenset((*_FLOATS, torch.complex32, torch.complex64, torch.complex128))
"""The dtypes that gradients can be reduced in. Complex numbers are reduced as pairs."""


def as_comm_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous ``tensor`` in a form that backends carry unchanged: the tensor itself, or
    a view of its bytes."""
    return tensor if tensor.dtype in COMM_DTYPES else tensor.view(-1).view(torch.uint8)


def comm_dtype_ranges(full: torch.Tensor, numels: Sequence[int]) -> Sequence[torch.Tensor]:
    """Split ``full``, which is flat, into ranges of ``numels`` elements, each
    :func:`as_comm_dtype`."""
    ranges = full.split(list(numels))
    if full.dtype in COMM_DTYPES:
        return ranges
    return [as_comm_dtype(held) for held in ranges]
