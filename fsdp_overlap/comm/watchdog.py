"""Watchdogs, which the host polls for errors of other ranks while it waits for a collective."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist


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
watchdogs: WeakKeyDictionary[dist.ProcessGroup, ref[Watchdog]] = WeakKeyDictionary()


def set_watchdog(group: dist.ProcessGroup, watchdog: Watchdog) -> None:
    """Poll ``watchdog`` about collectives of ``group`` from now on, as long as it lives."""
    watchdogs[group] = ref(watchdog)
