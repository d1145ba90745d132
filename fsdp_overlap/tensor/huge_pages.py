"""Huge pages for large memory on the host."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
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
