"""Who is asked when a collective lasts or fails: what a rank waits for is known to the others."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

# Of a wait, until others are asked. Long against a step, short against the patience of people.
FIRST_LOOK = timedelta(seconds=1)


class Watch(Protocol):
    """Asked on the host, beside the collectives."""

    def look(self) -> None:
        """A collective lasts: the others may have told why.

        Raises:
            RuntimeError: it will never be done; says why.
        """
        ...

    def explain(self, failure: RuntimeError) -> str:
        """Why a collective ended with ``failure``, as far as the others tell."""
        ...


# Weak on both sides: a watch knows its groups, and a group that is never freed keeps its threads.
_watches: WeakKeyDictionary[dist.ProcessGroup, ref[Watch]] = WeakKeyDictionary()


def watch_over(group: dist.ProcessGroup, watch: Watch) -> None:
    """``watch`` is asked about collectives of ``group`` from now on, as long as it lives."""
    _watches[group] = ref(watch)


def watch_of(group: dist.ProcessGroup | None) -> Watch | None:
    """Who is asked about collectives of ``group``, if anybody."""
    found = None if group is None else _watches.get(group)
    return None if found is None else found()


def wait(work: dist.Work, watch: Watch) -> None:
    """Blocks the host until ``work`` is done, and asks ``watch`` ever more rarely meanwhile.

    Raises:
        RuntimeError: it failed or timed out, or ``watch`` knows that it will.
    """
    patience = FIRST_LOOK
    while True:
        try:
            work.wait(patience)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it failed; else it was done in the meantime
                return
        watch.look()
        patience *= 2
