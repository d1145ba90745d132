"""Read strided parts of tensors in files into memory, on several threads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, prod
from pathlib import Path
from threading import local
from typing import Any

import torch

from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.comm.comm_streams import has_streams, mark_enqueued, streams_of
from fsdp_overlap.comm.threads import thread_pool
from fsdp_overlap.weights.chunks import slab, slab_count
from fsdp_overlap.weights.safetensors_format import FileTensor, SafetensorsFile, identity_of

_STAGED_BYTES = 4 << 20
"""The memory of a thread for what it casts, permutes or copies to a device."""
_DIRECT_BYTES = 16 << 20
"""How much a thread reads at once into the memory of a weight."""
_SAMPLES = 64
"""The tensors whose last bytes ranks compare."""
_GAP_BYTES = 4096
"""Gaps of at most a page are read along: the file system reads whole pages, and a call takes as
long."""


@dataclass(frozen=True)
class Read:
    """A box of a file's tensor, and the memory that gets its elements. ``sizes`` and ``strides``,
    in elements, are in the order of the file: strides descend."""

    file_tensor: FileTensor
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    values: torch.Tensor

    @classmethod
    def of(cls, file_tensor: FileTensor, view: torch.Tensor, values: torch.Tensor) -> Read:
        """Return what reads ``view``, a view on the meta device of ``file_tensor``, into
        ``values``, of the same shape."""
        strides = view.stride()
        order = [dim for dim, size in enumerate(view.shape) if size > 1]
        # Elements that are repeated have a stride of zero.
        order.sort(key=lambda dim: -strides[dim] if strides[dim] else -inf)
        return cls(
            file_tensor,
            int(view.storage_offset()),
            tuple(view.shape[dim] for dim in order),
            tuple(strides[dim] for dim in order),
            values.as_strided(
                [values.shape[dim] for dim in order], [values.stride(dim) for dim in order]
            ),
        )

    @cached_property
    def _run(self) -> tuple[int, int, int]:
        """The number of innermost dimensions that one call reads, how many elements of the file
        that are, and how many of them are wanted."""
        dims, numel = 0, 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if stride != numel:
                break
            dims, numel = dims + 1, numel * size
        if dims < len(self.sizes):
            size, stride = self.sizes[-dims - 1], self.strides[-dims - 1]
            if 0 < (stride - numel) * self.file_tensor.dtype.itemsize <= _GAP_BYTES:
                return dims + 1, (size - 1) * stride + numel, size * numel
        return dims, numel, numel

    @property
    def _is_direct(self) -> bool:
        """Whether it is read into its values: adjacent elements, of the same dtype, on the host."""
        dims, numel, wanted = self._run
        is_whole = dims == len(self.sizes) and numel == wanted
        is_same = self.values.dtype == self.file_tensor.dtype and self.values.is_contiguous()
        return is_whole and is_same and self.values.device.type == "cpu"

    def split(self) -> Iterator[Read]:
        """Yield what reads parts of it that a thread reads at once."""
        _, numel, wanted = self._run
        nbytes = _DIRECT_BYTES if self._is_direct else _STAGED_BYTES
        most = max(1, nbytes * wanted // (numel * self.file_tensor.dtype.itemsize))
        for number in range(slab_count(self.sizes, most)):
            part = slab(self.sizes, most, number)
            starts = zip(part.offsets, self.strides, strict=True)
            offset = self.offset + sum(at * stride for at, stride in starts)
            values = self.values
            for dim, (at, size) in enumerate(zip(*part, strict=True)):
                values = values.narrow(dim, at, size)
            yield Read(self.file_tensor, offset, part.sizes, self.strides, values)

    def into(self, descriptor: int, staging: Callable[[int], torch.Tensor]) -> int:
        """Read it from the file of ``descriptor``, where need be by way of ``staging``, which
        gives as many bytes as it is asked for. Return how many bytes were read."""
        dims, numel, _ = self._run
        dtype, values = self.file_tensor.dtype, self.values
        nbytes = numel * dtype.itemsize
        outer = len(self.sizes) - dims
        is_direct = self._is_direct
        count = prod(self.sizes[:outer])
        raw = values.view(-1).view(torch.uint8) if is_direct else staging(nbytes * count)
        for number, at in enumerate(product(*map(range, self.sizes[:outer]))):
            steps = zip(at, self.strides, strict=False)
            start = self.offset + sum(index * stride for index, stride in steps)
            position = self.file_tensor.start + start * dtype.itemsize
            memory = raw[number * nbytes : (number + 1) * nbytes]
            _read(descriptor, memory, position, self.file_tensor)
        if not is_direct:
            strides = [numel * prod(self.sizes[dim + 1 : outer]) for dim in range(outer)]
            strides += self.strides[outer:]
            read = raw.view(dtype).as_strided(self.sizes, strides)
            values.copy_(read, non_blocking=has_streams(values.device))
        return nbytes * count


def _read(descriptor: int, memory: torch.Tensor, position: int, what: FileTensor) -> None:
    """Fill ``memory``, bytes on the host, from ``position`` of a file on."""
    address, nbytes = memory.data_ptr(), memory.numel()
    rest = memoryview((ctypes.c_char * nbytes).from_address(address))
    while rest:
        count = os.preadv(descriptor, [rest], position)
        if not count:
            raise CheckpointError(f"{what.path} was cut off while {what.name!r} was read")
        rest, position = rest[count:], position + count


def same_bytes(one: FileTensor, other: FileTensor) -> bool:
    """Return whether two tensors in files are equal, bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for at in range(0, one.nbytes, _STAGED_BYTES):
            size = min(_STAGED_BYTES, one.nbytes - at)
            if first.read(size) != second.read(size):
                return False
    return True


def sample_of(tensors: Sequence[FileTensor]) -> list[bytes]:
    """Return the last bytes of some of ``tensors``, which tell copies of files of another time."""
    some = [tensor for tensor in tensors if tensor.nbytes]
    found = []
    for tensor in some[:: max(1, len(some) // _SAMPLES)]:
        size = min(64, tensor.nbytes)
        with tensor.path.open("rb") as file:
            file.seek(tensor.start + tensor.nbytes - size)
            found.append(file.read(size))
    return found


class _Staging(local):
    """The memory of a thread that what it reads passes through, and on a device with streams the
    stream of its copies."""

    def __init__(self, device: torch.device, ready: Any) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._device, self.stream = device, None
        if has_streams(device):
            self.stream = streams_of(device).Stream(device)
            self.stream.wait_event(ready)

    def get(self, nbytes: int) -> torch.Tensor:
        if self._memory.numel() < nbytes:
            is_pinned = self.stream is not None
            size = max(nbytes, _STAGED_BYTES)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._memory[:nbytes]


def read_all(
    reads: Sequence[Read],
    files: Iterable[SafetensorsFile],
    device: torch.device,
    num_threads: int,
    progress: Callable[[int, int], object] | None,
) -> int:
    """Run ``reads`` of ``files``, for tensors on ``device`` or on the host, on ``num_threads``
    threads, and return how many bytes were read. ``progress`` is called with the bytes of tensors
    that have been read and those of all.

    Raises:
        CheckpointError: a file was cut off, written or replaced since its header was read.
        OSError: a file cannot be read.
    """
    total = sum(prod(one.sizes) * one.file_tensor.dtype.itemsize for one in reads)
    done = 0
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        needed = {one.file_tensor.path for one in reads}
        opened = [file for file in files if file.path in needed]
        for file in opened:
            descriptors[file.path] = os.open(file.path, os.O_RDONLY)
            stack.callback(os.close, descriptors[file.path])
            if hasattr(os, "posix_fadvise"):
                # What lies behind a range is another rank's.
                os.posix_fadvise(descriptors[file.path], 0, 0, os.POSIX_FADV_RANDOM)
        _check_unchanged(opened, descriptors)
        staging = _Staging(device, mark_enqueued(device))

        def run(one: Read) -> tuple[int, int]:
            descriptor = descriptors[one.file_tensor.path]
            with torch.no_grad():
                if staging.stream is None or one.values.device.type == "cpu":
                    nbytes = one.into(descriptor, staging.get)
                else:
                    with streams_of(device).stream(staging.stream):
                        nbytes = one.into(descriptor, staging.get)
                    staging.stream.synchronize()
            return nbytes, prod(one.sizes) * one.file_tensor.dtype.itemsize

        parts = [part for one in reads for part in one.split()]
        parts.sort(key=lambda one: (one.file_tensor.path, one.file_tensor.start, one.offset))
        nbytes = 0
        with thread_pool(num_threads, device) as pool:
            futures = [pool.submit(run, part) for part in parts]
            try:
                for future in as_completed(futures):
                    count, wanted = future.result()
                    nbytes, done = nbytes + count, done + wanted
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        _check_unchanged(opened, descriptors)
    return nbytes


def _check_unchanged(files: Iterable[SafetensorsFile], descriptors: dict[Path, int]) -> None:
    for file in files:
        if identity_of(descriptors[file.path]) != file.identity:
            raise CheckpointError(f"{file.path} was changed while it was read: load it again")
