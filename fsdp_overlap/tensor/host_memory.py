"""Memory on the host: huge pages for what is large, and what malloc keeps of what was freed."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path
from typing import Any

# glibc takes memory of this size from the system each time, and gives it back each time. So all of
# its pages are made anew, which takes longer than gathering into them.
LARGE_BYTES = 32 * 1024 * 1024


@cache
def _madvise() -> Any:
    """The C library's function, or ``None`` where there is no such advice."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def use_huge_pages(address: int, nbytes: int) -> None:
    """Asks the system to make the memory there of huge pages. The system may decline."""
    if (madvise := _madvise()) is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        madvise(start, address + nbytes - start, mmap.MADV_HUGEPAGE)


class FreedMemory:
    """Gives what malloc keeps of freed buffers back to the system, when it becomes too much.

    torch aligns memory, for which glibc (2.36, say) takes a little more than a block and frees what
    is left over. Small objects settle there. So when the block itself is freed it is just too small
    for the next one like it, and memory grows with each all-gather, by hundreds of MiB for units of
    1 MiB.
    """

    LOOK_EVERY = 32 * 1024 * 1024
    """After how many freed bytes to call :meth:`look`."""
    KEPT = 16 * 1024 * 1024
    """How many bytes more than it needs the process may have."""

    def __init__(self) -> None:
        self.nbytes = 0
        """What was freed since. Whoever frees adds to it."""
        self._needed = 0
        self._has_trimmed = True

    def look(self) -> None:
        """Give memory back if the process has too much."""
        self.nbytes = 0
        resident = _resident()
        if self._has_trimmed:
            # What is back so soon, activations above all, is in use: to give it back in each step
            # would take time.
            self._needed = max(self._needed, resident)
        self._has_trimmed = resident > self._needed + self.KEPT
        if self._has_trimmed and (trim := _malloc_trim()) is not None:
            trim(0)


def _resident() -> int:
    """Return the bytes that the process has in memory, or 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


@cache
def _malloc_trim() -> Any:
    """The C library's function, or ``None`` if it has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


freed_memory = FreedMemory()
