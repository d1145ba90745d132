"""What ranks tell each other beside collectives, when these wait for each other: by the store at
which they met."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class Board:
    """A note of each of ``group``'s ranks, which the others read. Boards of one ``name`` are one.

    Nothing here is collective, and nothing raises: a store may have gone with its rank.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._me = dist.get_rank()
        self._store = dist.PrefixStore(f"fsdp_overlap/{name}", c10d._get_default_store())

    def post(self, note: str) -> None:
        """Shows ``note`` instead of this rank's last one."""
        with suppress(RuntimeError):
            self._store.set(str(self._me), note)

    def meet(self, timeout: timedelta | None) -> list[int]:
        """Waits for all ranks to call this, once; returns those that did not within ``timeout``."""
        self.post("")
        others = [str(rank) for rank in self.ranks if rank != self._me]
        with suppress(RuntimeError):
            if timeout is None:
                self._store.wait(others)
            else:
                self._store.wait(others, timeout)
            return []
        return [rank for rank in map(int, others) if rank not in self.read()]

    def read(self, seconds: float = 0.0) -> dict[int, str]:
        """The other ranks' notes, by their ranks in the default group; those that are there within
        ``seconds``."""
        others = [str(rank) for rank in self.ranks if rank != self._me]
        notes: dict[int, str] = {}
        with suppress(RuntimeError):
            if seconds:
                with suppress(RuntimeError):  # not all of them are
                    self._store.wait(others, timedelta(seconds=seconds))
            for rank in others:
                if self._store.check([rank]):
                    notes[int(rank)] = self._store.get(rank).decode()
        return notes
