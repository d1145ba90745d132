"""Ranks that a launcher forks begin once all of them are forked.

The store in a launcher answers ranks in a thread, and libc's resolver has a lock, which that thread
takes for each rank that connects. A rank that is forked meanwhile finds it taken, for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing import api

_gate: tuple[int, int] | None = None
"""The ends of a pipe while ranks are forked: to read from, and to write to."""


def begin_together() -> None:
    """Have all ranks that this process starts by torchelastic wait for the last of them."""
    kinds: tuple[Any, ...] = (api.MultiprocessContext, api.SubprocessContext)
    for kind in kinds:
        kind._start = _gated(kind._start)
    os.register_at_fork(after_in_child=_wait)


def _gated(start: Callable[[Any], None]) -> Callable[[Any], None]:
    def gated(context: Any) -> None:
        global _gate
        _gate = os.pipe()
        try:
            start(context)
        finally:
            for end in _gate:
                os.close(end)
            _gate = None

    return gated


def _wait() -> None:
    global _gate
    if _gate is not None:
        reads, writes = _gate
        os.close(writes)
        os.read(reads, 1)  # ends where nobody has the other end any more
        os.close(reads)
        _gate = None
