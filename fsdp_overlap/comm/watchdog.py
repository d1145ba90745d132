"""Watchdogs, which the host polls for errors of other ranks while it waits for a collective."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

# How long a rank waits before it polls. Long compared to a step, short compared to the patience of
# people.
FIRST_POLL = timedelta(seconds=1)


class Watchdog(Protocol):
    """Is polled by the host, while collectives are under way."""

    def poll(self) -> None:
        """Look for a failure while a collective lasts. The other ranks may have posted why.

        Raises:
            RuntimeError: the collective will never be done; says why.
        """
        ...

    def explain(self, failure: RuntimeError) -> str:
        """Return why a collective ended with ``failure``, as far as the other ranks have posted."""
        ...


# Weak on both sides: a watchdog knows its groups, and a group keeps its threads until it is freed.
_watchdogs: WeakKeyDictionary[dist.ProcessGroup, ref[Watchdog]] = WeakKeyDictionary()


def set_watchdog(group: dist.ProcessGroup, watchdog: Watchdog) -> None:
    """Poll ``watchdog`` about collectives of ``group`` from now on, as long as it lives."""
    _watchdogs[group] = ref(watchdog)


def watchdog_of(group: dist.ProcessGroup | None) -> Watchdog | None:
    """Return the watchdog that is polled about collectives of ``group``, or ``None``."""
    found = None if group is None else _watchdogs.get(group)
    return None if found is None else found()


def wait(work: dist.Work, watchdog: Watchdog | None) -> None:
    """Block the host until ``work`` is done. Meanwhile poll ``watchdog``, if there is one, at
    intervals that double.

    Raises:
        RuntimeError: ``work`` failed or timed out, or ``watchdog`` knows that it will.
    """
    if watchdog is None:
        work.wait()
        return
    patience = FIRST_POLL
    while True:
        try:
            work.wait(patience)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it failed; otherwise it was done in the meantime
                return
        watchdog.poll()
        patience *= 2
