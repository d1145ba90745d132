"""Messages between ranks in the rendezvous store, which can be read while collectives wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_overlap.comm.threads import make_thread
from fsdp_overlap.torch_internals import default_store

T = TypeVar("T")

# How long the store has to answer. The store of a rank that was stopped would be waited for beyond
# every timeout.
ANSWER_SECONDS = 5.0

# The thread that still waits for a store that has not answered in time.
_unanswered: WeakKeyDictionary[dist.Store, Thread] = WeakKeyDictionary()

# The mailboxes for which this process waits. Meanwhile its store may answer nobody else.
_in_barrier: set[StoreMailbox] = set()


def in_barrier() -> bool:
    """Return whether this process waits for other ranks in a store."""
    return bool(_in_barrier)


def has_peers(group: dist.ProcessGroup) -> bool:
    """Return whether the other ranks of ``group`` exist. In a fake group, or one with a store of a
    single process, they are made up, to try things out."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return dist.get_backend(group) != "fake" and not isinstance(store, dist.HashStore)


class StoreMailbox:
    """One message from each rank of ``group``, which the others read. Two objects of the same
    ``name`` have the same messages.

    No collective is used, and nothing raises: a store may have gone with its rank.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._me = dist.get_rank()
        ranks = dist.get_process_group_ranks(group) if has_peers(group) else []
        self.others = [rank for rank in sorted(ranks) if rank != self._me]
        self._root = default_store()
        self._store = dist.PrefixStore(f"fsdp_overlap/{name}", self._root)

    def post(self, message: str) -> None:
        """Replace this rank's message. Do nothing while the store does not answer."""
        if not self._is_silent():
            self._query(lambda: self._store.set(str(self._me), message), None, ANSWER_SECONDS)

    def barrier(self, timeout: timedelta | None, message: str = "") -> dict[int, str]:
        """Post ``message`` and wait for all ranks to do so. Return those of the other ranks that
        did within ``timeout``. Works once for each name."""
        others = [str(rank) for rank in self.others]

        def wait() -> dict[int, str]:
            self._store.set(str(self._me), message)
            with suppress(RuntimeError):  # some are late
                if timeout is None:
                    self._store.wait(others)
                else:
                    self._store.wait(others, timeout)
            return self._read_of(self.others)

        seconds = None if timeout is None else timeout.total_seconds() + ANSWER_SECONDS
        _in_barrier.add(self)
        try:
            return self._query(wait, {}, seconds)
        finally:
            _in_barrier.remove(self)

    def read(self, most: int | None = None) -> dict[int, str]:
        """Return what other ranks have posted, by their ranks in the default group: all,
        or those of the first ``most`` of them. Empty while the store does not answer."""
        if self._is_silent():
            return {}
        return self._query(lambda: self._read_of(self.others[:most]), {}, ANSWER_SECONDS)

    def _read_of(self, ranks: Sequence[int]) -> dict[int, str]:
        there = [rank for rank in ranks if self._store.check([str(rank)])]
        return {rank: self._store.get(str(rank)).decode() for rank in there}

    def _is_silent(self) -> bool:
        """Return whether the store still owes an answer that did not come in time."""
        thread = _unanswered.get(self._root)
        return thread is not None and thread.is_alive()

    def _query(self, query: Callable[[], T], otherwise: T, seconds: float | None) -> T:
        """Return what the store answers to ``query`` within ``seconds``, and else
        ``otherwise``."""
        answers: list[T] = []

        def run() -> None:
            with suppress(RuntimeError):
                answers.append(query())

        thread = make_thread(run, "fsdp_overlap_mailbox", None)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            _unanswered[self._root] = thread
        return answers[0] if answers else otherwise
