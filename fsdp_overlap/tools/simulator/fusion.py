"""A model of kernel fusion by ``torch.compile``, and of the memory that kernels read and write.

Operations become one kernel until a matrix product (or attention, a sort, a collective, one of the
library's own copies) reads what it has computed; others run beside it. It reads what was there
before, once, and writes what others read later. Of a table it reads the rows that it looks up;
where it adds to rows, or puts them elsewhere, it ends. What the program has dropped by the end of
the kernel that computed it takes no memory; the rest may take that of inputs that are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch

from fsdp_overlap.tools.emulator import Operation
from fsdp_overlap.tools.emulator.dispatch import tensors_in
from fsdp_overlap.tools.emulator.memory import ByteRange
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.simulator.compute_time import OVERWRITES, PICKED_FROM, size_of

# Operations that stay kernels of their own, beside matrix products, convolutions and attention.
APART = ("aten::_foreach", "aten::_fused", "aten::sort", "aten::topk", "aten::histc", "fsdp::")

# Operations that put rows where an index says: the last ones of a kernel.
ENDS_KERNEL = (
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
        operation.call is None or operation.crosses or _name(operation).startswith(APART)
    )


def moves_rows(operation: Operation) -> bool:
    """Return whether it looks rows up, or puts them elsewhere: backward does not run it again."""
    return _name(operation) in PICKED_FROM or _name(operation).startswith(ENDS_KERNEL)


class Kernel:
    """What one kernel has read and computed so far. An address may have another storage later."""

    def __init__(self) -> None:
        self._read: WeakKeyDictionary[torch.UntypedStorage, list[ByteRange]] = WeakKeyDictionary()
        self.made: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        """The bytes that it writes if somebody reads them from memory."""

    def reads(self, tensor: torch.Tensor) -> bool:
        """Return whether the kernel reads memory for ``tensor`` that it has not read before."""
        seen, here = self._read.setdefault(tensor.untyped_storage(), []), ByteRange.of(tensor)
        is_new = not any(earlier.covers(here) for earlier in seen)
        if is_new:
            seen.append(here)
        return is_new


class Fusion:
    """The kernels of a program, whose operations are given in the order in which they run.

    Args:
        allocate: is called with each storage that takes memory, once or more often.
    """

    def __init__(self, allocate: Callable[[torch.UntypedStorage], None]) -> None:
        self._allocate = allocate
        self._current: dict[Queue, Kernel] = {}
        self._made: WeakKeyDictionary[torch.UntypedStorage, Kernel] = WeakKeyDictionary()
        """Which kernel computes what nobody has read from memory yet."""

    def is_open(self, stream: Queue) -> bool:
        """Return whether the next fused operation on ``stream`` adds to a kernel."""
        return stream in self._current

    def bytes_of(self, operation: Operation, stream: Queue) -> tuple[int, bool]:
        """Return the bytes that a fused operation moves, and whether it begins a kernel."""
        begins = not self.is_open(stream)
        kernel = self._current.setdefault(stream, Kernel())
        moved = 0
        for tensor, nbytes in _reads(operation):
            is_inside = self._made.get(tensor.untyped_storage()) is kernel
            if not is_inside and kernel.reads(tensor):
                moved += self._store(tensor) + nbytes
        if _name(operation).startswith(ENDS_KERNEL):
            self._end(stream)
            return moved + self._scattered(operation), begins
        for tensor in operation.writes:
            self._overwrite(tensor)
            self._made[tensor.untyped_storage()] = kernel
            kernel.made[tensor.untyped_storage()] = size_of(tensor)
        return moved, begins

    def end_kernel(self, operation: Operation, stream: Queue) -> int:
        """Return the bytes that kernels have written because ``operation``, which is not fused,
        reads them. What has computed them ends."""
        read = [tensor for tensor, _ in _reads(operation)]
        kernel = self._current.get(stream)
        if kernel is not None and any(each.untyped_storage() in kernel.made for each in read):
            self._end(stream)
        moved = sum(map(self._store, read))
        self._write(operation)
        return moved

    def end(self) -> None:
        """End all kernels."""
        for stream in list(self._current):
            self._end(stream)

    def _end(self, stream: Queue) -> None:
        for storage in self._current.pop(stream).made:
            self._allocate(storage)

    def _scattered(self, operation: Operation) -> int:
        """Return the bytes that an operation writes that puts rows somewhere: the rows, which are
        read there, too, or all of a new tensor."""
        self._write(operation)
        if _is_edit(operation):
            return 2 * max(map(size_of, operation.reads), default=0)
        return sum(map(size_of, operation.writes))

    def _write(self, operation: Operation) -> None:
        for tensor in operation.writes:
            self._overwrite(tensor)
            self._allocate(tensor.untyped_storage())

    def _store(self, tensor: torch.Tensor) -> int:
        """Let ``tensor`` be in memory, and return the bytes that its kernel writes there for it."""
        self._allocate(tensor.untyped_storage())
        return self._overwrite(tensor)

    def _overwrite(self, tensor: torch.Tensor) -> int:
        """Forget that a kernel computes ``tensor``, and return the bytes that it would write."""
        storage = tensor.untyped_storage()
        kernel = self._made.pop(storage, None)
        return 0 if kernel is None else kernel.made.pop(storage)


def _reads(operation: Operation) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield what an operation reads, and the bytes that it reads of it."""
    call, name = operation.call, _name(operation)
    table: torch.Tensor | None = None
    if call is not None and name in PICKED_FROM:
        table = tensors_in(call.args[PICKED_FROM[name]])[0]
    picked = sum(map(size_of, operation.writes))
    for tensor in operation.reads:
        nbytes = size_of(tensor)
        yield tensor, min(picked, nbytes) if tensor is table else nbytes
    is_row = name.startswith(ENDS_KERNEL)
    if operation.group is not None or (_is_edit(operation) and not is_row):
        for tensor in operation.writes:
            yield tensor, size_of(tensor)


def _is_edit(operation: Operation) -> bool:
    call = operation.call
    return call is not None and call.func._schema.is_mutable and _name(operation) not in OVERWRITES


def _name(operation: Operation) -> str:
    call = operation.call
    return operation.name if call is None else str(call.func._schema.name)
