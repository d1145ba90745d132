"""Memory on the host: huge pages for what is large, and what malloc keeps of what was freed."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path
from typing import Any

# glibc takes memory of this size from the system each time, and gives it back each time. So all of
# its pages are made anew, which takes longer than gathering into them.
MMAP_BYTES = 32 * 1024 * 1024


@cache
def _madvise() -> Any:
    """Return the C library's function, or ``None`` where there is no such advice."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def use_huge_pages(address: int, nbytes: int) -> None:
    """Ask the system to make the memory there of huge pages. The system may decline."""
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
    """How many bytes more than it needs the process may have, at first."""
    SOON = 16
    """After fewer looks than these, memory that was given back has been taken again."""

    def __init__(self) -> None:
        self.nbytes = 0
        """What was freed since. Whoever frees adds to it."""
        self._kept = self.KEPT
        self._needed = 0
        self._looks = 0
        """Since memory was given back."""

    def look(self) -> None:
        """Give memory back if the process has too much.

        Each page that is given back and needed again is made anew, which takes time. So memory that
        is soon back, activations or chunks that take turns, is kept: twice as much each time.
        """
        self.nbytes = 0
        resident = _resident()
        if self._looks == 0:
            self._needed = max(self._needed, resident)
        self._looks += 1
        if resident > self._needed + self._kept and (trim := _malloc_trim()) is not None:
            if self._looks < self.SOON:
                self._kept *= 2
            self._looks = 0
            trim(0)


def _resident() -> int:
    """Return the bytes that the process has in memory, or 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


@cache
def _malloc_trim() -> Any:
    """Return the C library's function, or ``None`` if it has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


freed_memory = FreedMemory()
