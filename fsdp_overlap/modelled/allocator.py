"""A caching allocator like torch's for CUDA: freed memory belongs to the stream that it was taken
on, and that stream may use it again at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fsdp_overlap.modelled.memory import Access
from fsdp_overlap.modelled.queues import Queue

KIB, MIB = 1024, 1024 * 1024

# As in torch's c10/cuda/CUDACachingAllocator.
ROUND = 512
SMALL = MIB
"""The largest request that is served from segments for small ones."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
"""The smallest request that gets a segment of its own size, rounded up."""
ROUND_SEGMENT = 2 * MIB


class MemPool:
    """Works like ``torch.cuda.MemPool``: memory of segments that serve nothing else. With
    ``no_split`` a segment is one block."""

    def __init__(self, allocator: object = None, no_split: bool = False) -> None:
        self.allocator = allocator
        self.no_split = no_split
        self.segments: list[range] = []
        """The addresses of each segment."""


@dataclass(eq=False)
class Block:
    """A piece of a segment, with its neighbours in the segment."""

    nbytes: int
    stream: int
    is_small: bool
    address: int
    pool: MemPool | None
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None
    last: dict[int, Access] = field(default_factory=dict)
    """While the block is free: the last access of each queue by its former owners."""


class Allocator:
    """Counts bytes: ``allocated`` are in use, ``reserved`` were taken from the device."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.allocated_most = self.reserved_most = 0
        self._free: dict[tuple[MemPool | None, int, bool], list[Block]] = {}
        self._held_back: list[tuple[Block, list[Access], Callable[[], bool]]] = []
        self._end = 0
        """The first address that no segment has had."""

    def take(
        self, nbytes: int, stream: Queue, pool: MemPool | None = None
    ) -> tuple[Block, list[Access]]:
        """Memory for what is enqueued on ``stream`` from now on, from ``pool`` or from segments
        that belong to none. Also returns the accesses that the new owner must come after: the last
        ones to every free block that is large enough, because which of these is taken depends on
        sizes that another model does not have."""
        self._put_back_what_is_done()
        nbytes = -(-max(nbytes, 1) // ROUND) * ROUND
        is_small = nbytes <= SMALL
        free = self._free.setdefault((pool, stream.index, is_small), [])
        fitting = [block for block in free if block.nbytes >= nbytes]
        last: dict[int, Access] = {}
        for block in fitting:
            _merge(last, block.last)
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            free.remove(block)
            block.is_free = False
        else:
            block = self._reserve(nbytes, stream.index, is_small, pool)
        self._split(block, nbytes, free)
        block.last = {}
        self.allocated += block.nbytes
        self.allocated_most = max(self.allocated_most, self.allocated)
        return block, list(last.values())

    def give_back(
        self,
        block: Block,
        accesses: Iterable[Access],
        is_done: Callable[[], bool] | None = None,
    ) -> None:
        """Frees ``block``. ``accesses`` to its memory may not be done yet. If another stream has
        used it, nobody gets it before ``is_done`` says that this stream is done with it."""
        self.allocated -= block.nbytes
        if is_done is None:
            self._put_back(block, accesses)
        else:
            self._held_back.append((block, list(accesses), is_done))

    def _put_back_what_is_done(self) -> None:
        waiting, self._held_back = self._held_back, []
        for block, accesses, is_done in waiting:
            if is_done():
                self._put_back(block, accesses)
            else:
                self._held_back.append((block, accesses, is_done))

    def _put_back(self, block: Block, accesses: Iterable[Access]) -> None:
        free = self._free[block.pool, block.stream, block.is_small]
        block.is_free = True
        for access in accesses:
            _merge(block.last, {access.stamp.queue: access})
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                free.remove(other)
                block = (
                    self._join(block, other) if other is block.after else self._join(other, block)
                )
        free.append(block)

    def release_free(self) -> None:
        """Gives the segments of which nothing is in use back to the device."""
        for (pool, _, _), free in self._free.items():
            for block in list(free):
                if pool is None and block.before is None and block.after is None:
                    free.remove(block)
                    self.reserved -= block.nbytes

    def forget_accesses(self, pool: MemPool) -> None:
        """Forgets what its former owners did to the free memory of ``pool``."""
        for (owner, _, _), free in self._free.items():
            for block in free if owner is pool else ():
                block.last.clear()

    def count_peaks_anew(self) -> None:
        """From now on peaks are those of what follows."""
        self.allocated_most, self.reserved_most = self.allocated, self.reserved

    def _reserve(self, nbytes: int, stream: int, is_small: bool, pool: MemPool | None) -> Block:
        if is_small:
            size = SMALL_SEGMENT
        elif nbytes < OWN_SEGMENT:
            size = LARGE_SEGMENT
        else:
            size = -(-nbytes // ROUND_SEGMENT) * ROUND_SEGMENT
        address = self._end
        self._end += size
        self.reserved += size
        self.reserved_most = max(self.reserved_most, self.reserved)
        if pool is not None:
            pool.segments.append(range(address, address + size))
        return Block(size, stream, is_small, address, pool)

    def _split(self, block: Block, nbytes: int, free: list[Block]) -> None:
        """Frees what ``block`` has beyond ``nbytes``, if that is large enough to be of use."""
        if block.pool is not None and block.pool.no_split:
            return
        left = block.nbytes - nbytes
        if left < ROUND or (not block.is_small and left <= SMALL):
            return
        rest = Block(
            left,
            block.stream,
            block.is_small,
            block.address + nbytes,
            block.pool,
            True,
            block,
            block.after,
            dict(block.last),
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, nbytes
        free.append(rest)

    def _join(self, first: Block, second: Block) -> Block:
        first.nbytes += second.nbytes
        _merge(first.last, second.last)
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first


def _merge(last: dict[int, Access], others: dict[int, Access]) -> None:
    """Adds ``others`` to ``last``. Of each queue the last access is enough: what comes after it
    comes after all earlier ones."""
    for queue, access in others.items():
        if queue not in last or last[queue].stamp.tick < access.stamp.tick:
            last[queue] = access
