"""Pinned memory of exact sizes."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import torch

from fsdp_overlap.comm.comm_streams import streams_of

_PORTABLE = 1
"""Pinned for all devices: ``cudaHostRegisterPortable``."""


def empty_pinned(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory on the host that ``device`` copies to and from by itself.

    torch's allocator of pinned memory rounds up to powers of two, and ``pinned_max_round_threshold_
    mb`` alone, by which torch 2.13 and later round nothing above a size, may give a large tensor
    the memory of a smaller one (https://github.com/pytorch/pytorch/pull/192722). So where CUDA's
    runtime can be called, memory of the system is registered there, until its storage is freed.

    Raises:
        RuntimeError: the system has not so much memory that may be pinned.
    """
    runtime = getattr(streams_of(device), "cudart", None)
    if runtime is None or not numel:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    nbytes = numel * dtype.itemsize
    # Shared, so that the memory stays where the device reads it when the process forks.
    memory = mmap.mmap(-1, nbytes)
    view = memoryview(memory)
    pinned = torch.frombuffer(view, dtype=dtype)
    if error := int(runtime().cudaHostRegister(pinned.data_ptr(), nbytes, _PORTABLE)):
        raise RuntimeError(
            f"{nbytes} bytes of the host cannot be pinned (cudaHostRegister: error {error}): free "
            "memory, raise the limit of locked memory (ulimit -l), or give "
            "CPUOffloadPolicy(pin_memory=False)"
        )
    # The storage holds the view.
    weakref.finalize(view, _unpin, runtime, pinned.data_ptr(), memory, os.getpid()).atexit = False
    return pinned


def _unpin(runtime: Any, address: int, memory: mmap.mmap, process: int) -> None:
    """Give ``memory`` back, in the process that pinned it. CUDA waits for copies under way."""
    if os.getpid() == process:
        runtime().cudaHostUnregister(address)
