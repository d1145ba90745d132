"""Which kernels ``torch.compile`` fuses, and what memory they then read and write.

Operations between two matrix products (or attention, sorts, collectives and the library's own
copies) become one kernel. It reads what was there before, once, and writes what others read later.
Of a table it reads the rows that it looks up; where it adds to rows, or puts them elsewhere, it
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary, WeakSet

import torch

from fsdp_overlap.emulator import Operation
from fsdp_overlap.emulator.dispatch import tensors_in
from fsdp_overlap.emulator.queues import Queue
from fsdp_overlap.simulator.compute_time import OVERWRITES, PICKED_FROM

# Operations that stay kernels of their own, beside matrix products, convolutions and attention.
APART = ("aten::_foreach", "aten::_fused", "aten::sort", "aten::topk", "aten::histc", "fsdp::")

# Operations that put rows where an index says: the last ones of a kernel.
SCATTERS = (
    "aten::_index_put",
    "aten::embedding_dense_backward",
    "aten::index_add",
    "aten::index_put",
    "aten::scatter",
)

RECOMPUTE = "recompute"
"""What a kernel does that computes a tensor again for backward."""


def is_fused(operation: Operation) -> bool:
    """Return whether an operation without matrix products becomes a part of a kernel."""
    return operation.name == RECOMPUTE or not (
        operation.call is None or _name(operation).startswith(APART)
    )


def moves_rows(operation: Operation) -> bool:
    """Return whether it looks rows up, or puts them elsewhere: backward does not run it again."""
    return _name(operation) in PICKED_FROM or _name(operation).startswith(SCATTERS)


Storages = WeakSet[torch.UntypedStorage]  # an address may have another one later


class Fusion:
    """The kernels of a program, whose operations are given in the order in which they run."""

    def __init__(self) -> None:
        self._current: dict[Queue, Storages] = {}
        """The storages that each stream's kernel has read so far."""
        self._made_by: WeakKeyDictionary[torch.UntypedStorage, Storages] = WeakKeyDictionary()
        """The kernel that has computed a storage's tensor, while nobody has read it from memory."""

    def bytes_of(self, operation: Operation, stream: Queue) -> tuple[int, bool]:
        """Return the bytes that a fused operation moves, and whether it begins a kernel."""
        begins = stream not in self._current
        kernel = self._current.setdefault(stream, WeakSet())
        moved = 0
        for tensor, nbytes in _reads(operation):
            storage = tensor.untyped_storage()
            if self._made_by.get(storage) is not kernel and storage not in kernel:
                kernel.add(storage)
                moved += self._store(tensor) + nbytes
        ends = _name(operation).startswith(SCATTERS)
        for tensor in operation.writes:
            if ends:
                moved += tensor.nbytes
                self._made_by.pop(tensor.untyped_storage(), None)
            else:
                self._made_by[tensor.untyped_storage()] = kernel
        if ends:
            del self._current[stream]
        return moved, begins

    def end_kernel(self, operation: Operation, stream: Queue) -> int:
        """Return the bytes that kernels have written because ``operation``, which is not fused,
        reads them."""
        self._current.pop(stream, None)
        moved = sum(self._store(tensor) for tensor, _ in _reads(operation))
        for tensor in operation.writes:
            self._made_by.pop(tensor.untyped_storage(), None)
        return moved

    def _store(self, tensor: torch.Tensor) -> int:
        return 0 if self._made_by.pop(tensor.untyped_storage(), None) is None else tensor.nbytes


def _reads(operation: Operation) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield what an operation reads, and the bytes that it reads of it."""
    call, name = operation.call, _name(operation)
    table: torch.Tensor | None = None
    if call is not None and name in PICKED_FROM:
        table = tensors_in(call.args[PICKED_FROM[name]])[0]
    picked = sum(tensor.nbytes for tensor in operation.writes)
    for tensor in operation.reads:
        yield tensor, min(picked, tensor.nbytes) if tensor is table else tensor.nbytes
    is_edit = call is not None and call.func._schema.is_mutable and name not in OVERWRITES
    if is_edit or operation.group is not None:
        for tensor in operation.writes:
            yield tensor, tensor.nbytes


def _name(operation: Operation) -> str:
    call = operation.call
    return operation.name if call is None else str(call.func._schema.name)
