"""Whom a rank asks when a collective lasts or fails, because other ranks may know the reason."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

# How long a rank waits before it asks. Long compared to a step, short compared to the patience of
# people.
FIRST_LOOK = timedelta(seconds=1)


class Watch(Protocol):
    """Is asked on the host, while collectives are under way."""

    def look(self) -> None:
        """Look for a reason while a collective lasts. The other ranks may have told why.

        Raises:
            RuntimeError: the collective will never be done; says why.
        """
        ...

    def explain(self, failure: RuntimeError) -> str:
        """Return why a collective ended with ``failure``, as far as the other ranks tell."""
        ...


# Weak on both sides: a watch knows its groups, and a group keeps its threads until it is freed.
_watches: WeakKeyDictionary[dist.ProcessGroup, ref[Watch]] = WeakKeyDictionary()


def watch_over(group: dist.ProcessGroup, watch: Watch) -> None:
    """Ask ``watch`` from now on about collectives of ``group``, as long as ``watch`` lives."""
    _watches[group] = ref(watch)


def watch_of(group: dist.ProcessGroup | None) -> Watch | None:
    """Return the watch that is asked about collectives of ``group``, or ``None``."""
    found = None if group is None else _watches.get(group)
    return None if found is None else found()


def wait(work: dist.Work, watch: Watch) -> None:
    """Block the host until ``work`` is done. Meanwhile ask ``watch``, at intervals that double.

    Raises:
        RuntimeError: ``work`` failed or timed out, or ``watch`` knows that it will.
    """
    patience = FIRST_LOOK
    while True:
        try:
            work.wait(patience)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it failed; otherwise it was done in the meantime
                return
        watch.look()
        patience *= 2
