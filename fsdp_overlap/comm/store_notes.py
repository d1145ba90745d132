"""Notes that ranks leave for each other in the store at which they met. They can be read while
collectives wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import TypeVar
from weakref import WeakSet

import torch.distributed as dist

from fsdp_overlap.torch_internals import default_store

T = TypeVar("T")

# How long the store has to answer. The store of a rank that was stopped would be waited for beyond
# every timeout.
ANSWER_SECONDS = 5.0

# Stores that have not answered yet.
_silent: WeakSet[dist.Store] = WeakSet()


def has_peers(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks of ``group`` exist. In a fake group, or one with a store of a single
    process, they are made up, to try things out."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return dist.get_backend(group) != "fake" and not isinstance(store, dist.HashStore)


class StoreNotes:
    """One note from each rank of ``group``, which the others read. Two objects of the same ``name``
    show the same notes.

    No collective is used, and nothing raises: a store may have gone with its rank.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._me = dist.get_rank()
        ranks = dist.get_process_group_ranks(group) if has_peers(group) else []
        self._others = [rank for rank in sorted(ranks) if rank != self._me]
        self._whole = default_store()
        self._store = dist.PrefixStore(f"fsdp_overlap/{name}", self._whole)

    def post(self, note: str) -> None:
        """Replaces this rank's note by ``note``. Does nothing while the store does not answer."""
        if self._whole not in _silent:
            self._ask(lambda: self._store.set(str(self._me), note), None, ANSWER_SECONDS)

    def meet(self, timeout: timedelta | None, note: str = "") -> list[int]:
        """Posts ``note`` for :meth:`read` and waits for all ranks to do so. Returns the ranks that
        did not within ``timeout``. Works once for each name."""
        others = [str(rank) for rank in self._others]

        def meet() -> bool:
            self._store.set(str(self._me), note)
            if timeout is None:
                self._store.wait(others)
            else:
                self._store.wait(others, timeout)
            return True

        seconds = None if timeout is None else timeout.total_seconds() + ANSWER_SECONDS
        if self._ask(meet, False, seconds):
            return []
        met = self.read()
        return [rank for rank in self._others if rank not in met]

    def read(self, most: int | None = None) -> dict[int, str]:
        """The notes that other ranks have posted, by their ranks in the default group: all, or
        those of the first ``most`` of them. Empty while the store does not answer."""

        def read() -> dict[int, str]:
            asked = self._others[:most]
            there = [rank for rank in asked if self._store.check([str(rank)])]
            return {rank: self._store.get(str(rank)).decode() for rank in there}

        return {} if self._whole in _silent else self._ask(read, {}, ANSWER_SECONDS)

    def _ask(self, question: Callable[[], T], otherwise: T, seconds: float | None) -> T:
        """What the store answers to ``question`` within ``seconds``, and else ``otherwise``."""
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())
            _silent.discard(self._whole)

        asking = Thread(target=ask, name="fsdp_overlap_board", daemon=True)
        _silent.add(self._whole)
        asking.start()
        asking.join(seconds)
        return answers[0] if answers else otherwise
