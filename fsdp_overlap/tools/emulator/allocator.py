"""A caching allocator like torch's for CUDA: freed memory belongs to the stream that it was taken
on, and that stream may use it again at once."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_overlap.tools.emulator.memory import Access
from fsdp_overlap.tools.emulator.queues import Queue

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
ADDRESSES = 1 << 50
"""What an expandable segment keeps for itself, to grow into."""


class MemPool:
    """Works like ``torch.cuda.MemPool``: memory of segments that serve nothing else, and go back to
    the device with it. With ``no_split`` a segment is one block."""

    def __init__(self, allocator: object = None, no_split: bool = False) -> None:
        self.allocator = allocator
        self.no_split = no_split
        self.segments: list[range] = []
        """The addresses of each segment."""


Owner = weakref.ref[MemPool] | None
"""The pool of a segment; None for segments that belong to none."""


@dataclass(eq=False)
class MemoryBlock:
    """A piece of a segment, with its neighbors in the segment."""

    nbytes: int
    stream: int
    is_small: bool
    address: int
    owner: Owner
    is_free: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    last: dict[int, Access] = field(default_factory=dict)
    """Since the block was freed: the last access of each queue by its former owners."""

    @property
    def pool(self) -> MemPool | None:
        return None if self.owner is None else self.owner()

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


class _HeldBlock(NamedTuple):
    """A block that other streams used when it was freed. ``is_done`` tells when they have."""

    block: MemoryBlock
    is_done: Callable[[], bool]


class Allocator:
    """Counts bytes: ``allocated`` are in use, ``reserved`` were taken from the device.

    Args:
        expandable: segments grow by pages, as with torch's ``expandable_segments``: each stream has
            one for small and one for large requests.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._free: dict[tuple[Owner, int, bool], list[MemoryBlock]] = {}
        self._first: dict[tuple[Owner, int, bool], MemoryBlock] = {}
        """The first block of each expandable segment."""
        self._waiting: dict[frozenset[Queue], deque[_HeldBlock]] = {}
        """By the streams that used the blocks, in the order in which these were freed."""
        self.may_ask = True
        """Whether blocks are asked for that other streams used. While a graph is captured none are.
        """
        self._unsafe: dict[tuple[Owner, int, bool], dict[MemoryBlock, None]] = {}
        """Those of them that streams may use when the recorded ones are done."""
        self._end = 0
        """The first address that no segment has had."""

    def malloc(
        self, nbytes: int, stream: Queue, pool: MemPool | None = None
    ) -> tuple[MemoryBlock, list[Access]]:
        """Return memory for what is enqueued on ``stream`` from now on, from ``pool`` or from
        segments that belong to none. Also returns the accesses that the new owner must come after:
        the last ones to every free block that is large enough, because which of these is taken
        depends on sizes that another model does not have, and when other streams are done with a
        block on how fast they are."""
        self.put_back_what_is_done()
        nbytes = -(-max(nbytes, 1) // ROUND) * ROUND
        key = self._owner(pool), stream.index, nbytes <= SMALL
        free = self._free.setdefault(key, [])
        fitting = [block for block in free if block.nbytes >= nbytes]
        last: dict[int, Access] = {}
        for block in fitting:
            _merge(last, block.last)
        for block in self._unsafe.get(key, ()):
            if block.nbytes >= nbytes:
                _merge(last, block.last)
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            free.remove(block)
        else:
            block = self._expand(nbytes, key) if self.expandable else self._reserve(nbytes, key)
            _merge(last, block.last)
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        block.is_free = False
        self._split(block, nbytes, free)
        block.last = {}
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block, list(last.values())

    def free(
        self,
        block: MemoryBlock,
        accesses: Iterable[Access],
        used: frozenset[Queue] = frozenset(),
        is_done: Callable[[], bool] = bool,
    ) -> None:
        """Free ``block``. ``accesses`` to its memory may not be done yet. If other streams have
        ``used`` it, nobody gets it before a later allocation finds that ``is_done``."""
        self.allocated -= block.nbytes
        for access in accesses:
            _merge(block.last, {access.stamp.queue: access})
        if not used:
            self._put_back(block)
            return
        self._waiting.setdefault(used, deque()).append(_HeldBlock(block, is_done))
        if any(queue != block.stream for queue in block.last):
            self._unsafe.setdefault(_key(block), {})[block] = None

    def put_back_what_is_done(self) -> None:
        """Ask of blocks that other streams used whether these are done with them."""
        if not self.may_ask:
            return
        for waiting in self._waiting.values():
            while waiting and waiting[0].is_done():
                self._put_back_held(waiting.popleft())

    def _put_back_held(self, held: _HeldBlock) -> None:
        self._unsafe.get(_key(held.block), {}).pop(held.block, None)
        self._put_back(held.block)

    def _owner(self, pool: MemPool | None) -> Owner:
        if pool is None:
            return None
        owner = weakref.ref(pool)
        if not pool.segments:
            weakref.finalize(pool, self._release, owner).atexit = False
        return owner

    def _put_back(self, block: MemoryBlock) -> None:
        free = self._free[_key(block)]
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                free.remove(other)
                block = (
                    self._join(block, other) if other is block.after else self._join(other, block)
                )
        free.append(block)
        if block.owner is not None and block.pool is None:
            self._release(block.owner)

    def release_free(self) -> None:
        """Give what is not in use back to the device: whole segments, or the pages at the end of
        expandable ones, also of blocks that other streams used. Memory of pools stays theirs."""
        for waiting in self._waiting.values():
            while waiting:
                self._put_back_held(waiting.popleft())
        self._release(None)

    def _release(self, owner: Owner) -> None:
        for key, free in self._free.items():
            mine = list(free) if key[0] is owner else []
            for block in mine:
                if block.is_segment:
                    free.remove(block)
                    self._first.pop(key, None)
                    self.reserved -= block.nbytes
                elif self.expandable and block.after is None:
                    pages = block.nbytes // _page(block.is_small) * _page(block.is_small)
                    self.reserved -= pages
                    block.nbytes -= pages
                    if not block.nbytes and block.before is not None:
                        free.remove(block)
                        block.before.after = None

    def forget_accesses(self, pool: MemPool) -> None:
        """Forget what its former owners did to the free memory of ``pool``."""
        for used, waiting in self._waiting.items():
            mine = [held for held in waiting if held.block.pool is pool]
            self._waiting[used] = deque(held for held in waiting if held.block.pool is not pool)
            for held in mine:
                self._put_back_held(held)
        for free in self._free.values():
            for block in free:
                if block.pool is pool:
                    block.last.clear()

    def count_peaks_anew(self) -> None:
        """Count peaks from now on."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _reserve(self, nbytes: int, key: tuple[Owner, int, bool]) -> MemoryBlock:
        owner, stream, is_small = key
        if is_small:
            size = SMALL_SEGMENT
        elif nbytes < OWN_SEGMENT:
            size = LARGE_SEGMENT
        else:
            size = -(-nbytes // ROUND_SEGMENT) * ROUND_SEGMENT
        address = self._end
        self._end += size
        return self._map(MemoryBlock(size, stream, is_small, address, owner))

    def _expand(self, nbytes: int, key: tuple[Owner, int, bool]) -> MemoryBlock:
        """Return a block at the end of the expandable segment, which grows by as many pages as are
        missing."""
        owner, stream, is_small = key
        last = self._first.get(key)
        while last is not None and last.after is not None:
            last = last.after
        missing = nbytes - (last.nbytes if last is not None and last.is_free else 0)
        size = -(-missing // _page(is_small)) * _page(is_small)
        if last is None:
            self._first[key] = block = MemoryBlock(size, stream, is_small, self._end, owner)
            self._end += ADDRESSES
            return self._map(block)
        more = MemoryBlock(size, stream, is_small, last.address + last.nbytes, owner, before=last)
        last.after = self._map(more)
        if not last.is_free:
            return more
        self._free[key].remove(last)
        return self._join(last, more)

    def _map(self, block: MemoryBlock) -> MemoryBlock:
        self.reserved += block.nbytes
        if block.pool is not None:
            block.pool.segments.append(range(block.address, block.address + block.nbytes))
        return block

    def _split(self, block: MemoryBlock, nbytes: int, free: list[MemoryBlock]) -> None:
        """Free what ``block`` has beyond ``nbytes``, if that is large enough to be of use."""
        if block.pool is not None and block.pool.no_split:
            return
        left = block.nbytes - nbytes
        if left < ROUND or (not block.is_small and not self.expandable and left <= SMALL):
            return
        rest = MemoryBlock(
            left,
            block.stream,
            block.is_small,
            block.address + nbytes,
            block.owner,
            True,
            block,
            block.after,
            dict(block.last),
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, nbytes
        free.append(rest)

    def _join(self, first: MemoryBlock, second: MemoryBlock) -> MemoryBlock:
        first.nbytes += second.nbytes
        _merge(first.last, second.last)
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first


def _key(block: MemoryBlock) -> tuple[Owner, int, bool]:
    return block.owner, block.stream, block.is_small


def _page(is_small: bool) -> int:
    return SMALL_SEGMENT if is_small else LARGE_SEGMENT


def _merge(last: dict[int, Access], others: dict[int, Access]) -> None:
    """Add ``others`` to ``last``. Of each queue the last access is enough: what comes after it
    comes after all earlier ones."""
    for queue, access in others.items():
        if queue not in last or last[queue].stamp.tick < access.stamp.tick:
            last[queue] = access
