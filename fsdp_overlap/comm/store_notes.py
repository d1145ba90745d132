"""What ranks tell each other beside collectives, when these wait for each other: by the store at
which they met."""

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

# For the store to answer: it may be that of a rank which was stopped, and would be waited for
# beyond every timeout.
ANSWER_SECONDS = 5.0

# Stores that have not answered yet.
_silent: WeakSet[dist.Store] = WeakSet()


def has_peers(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks of ``group`` exist. They may be made up, to try things out."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return dist.get_backend(group) != "fake" and not isinstance(store, dist.HashStore)


class StoreNotes:
    """A note of each of ``group``'s ranks, which the others read. Boards of one ``name`` are one.

    Nothing here is collective, and nothing raises: a store may have gone with its rank.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._me = dist.get_rank()
        ranks = dist.get_process_group_ranks(group) if has_peers(group) else []
        self._others = [rank for rank in sorted(ranks) if rank != self._me]
        self._whole = default_store()
        self._store = dist.PrefixStore(f"fsdp_overlap/{name}", self._whole)

    def post(self, note: str) -> None:
        """Shows ``note`` instead of this rank's last one."""
        if self._whole not in _silent:
            self._ask(lambda: self._store.set(str(self._me), note), None, ANSWER_SECONDS)

    def meet(self, timeout: timedelta | None, note: str = "") -> list[int]:
        """Waits for all ranks to call this, once, each with a ``note`` for :meth:`read`; returns
        those that did not within ``timeout``."""
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

    def read(self) -> dict[int, str]:
        """The other ranks' notes that are there, by their ranks in the default group."""

        def read() -> dict[int, str]:
            there = [rank for rank in self._others if self._store.check([str(rank)])]
            return {rank: self._store.get(str(rank)).decode() for rank in there}

        return {} if self._whole in _silent else self._ask(read, {}, ANSWER_SECONDS)

    def _ask(self, question: Callable[[], T], otherwise: T, seconds: float | None) -> T:
        """What the store answers within ``seconds``."""
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
