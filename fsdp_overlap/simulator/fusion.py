"""Which kernels ``torch.compile`` fuses, and what memory they then read and write.

Operations between two matrix products (or attention, lookups, collectives and the library's own
copies) become one kernel. It reads what was there before, once, and writes what others read later.
What backward reads of it is computed again, if that reads less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp_overlap.emulator import Operation
from fsdp_overlap.emulator.queues import Queue

# Operations that stay kernels of their own, beside matrix products, convolutions and attention.
APART = (
    "aten::_foreach",
    "aten::_fused",
    "aten::embedding",
    "aten::index",
    "aten::_index_put",
    "aten::scatter",
    "aten::sort",
    "aten::topk",
    "aten::histc",
    "fsdp::",
)


@dataclass(eq=False)
class FusedKernel:
    """What one kernel has read so far: bytes, and the storages."""

    nbytes: int
    read: set[int]


class Fusion:
    """The kernels of a program, whose operations are given in the order in which they run."""

    def __init__(self) -> None:
        self._current: dict[Queue, FusedKernel] = {}
        self._made_by: dict[int, FusedKernel] = {}
        """The kernel that has computed a storage's tensor, while nobody has read it from memory."""

    def fuses(self, operation: Operation) -> bool:
        """Return whether an operation that is no product becomes a part of a kernel."""
        return not operation.name.startswith(APART)

    def bytes_of(self, operation: Operation, stream: Queue) -> tuple[int, bool]:
        """Return the bytes that a fused operation moves, and whether it begins a kernel."""
        begins = stream not in self._current
        kernel = self._current.setdefault(stream, FusedKernel(0, set()))
        moved = 0
        for tensor in operation.reads:
            key = _key(tensor)
            if self._made_by.get(key) is not kernel and key not in kernel.read:
                kernel.read.add(key)
                moved += self._load(tensor)
        kernel.nbytes += moved
        for tensor in operation.writes:
            self._made_by[_key(tensor)] = kernel
        return moved, begins

    def end_kernel(self, operation: Operation, stream: Queue) -> int:
        """Return the bytes that kernels have written because ``operation``, which is not fused,
        reads them."""
        self._current.pop(stream, None)
        moved = sum(self._store(tensor) for tensor in operation.reads)
        for tensor in operation.writes:
            self._made_by.pop(_key(tensor), None)
        return moved

    def _store(self, tensor: torch.Tensor) -> int:
        return 0 if self._made_by.pop(_key(tensor), None) is None else tensor.nbytes

    def _load(self, tensor: torch.Tensor) -> int:
        """Return the bytes of reading a tensor, which somebody must have written, or of computing
        it again."""
        maker = self._made_by.get(_key(tensor))
        return tensor.nbytes if maker is None else min(2 * tensor.nbytes, maker.nbytes)


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
