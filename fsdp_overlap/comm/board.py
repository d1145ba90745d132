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
        self._me = dist.get_rank()
        ranks = dist.get_process_group_ranks(group)
        self._others = [rank for rank in sorted(ranks) if rank != self._me]
        self._store = dist.PrefixStore(f"fsdp_overlap/{name}", c10d._get_default_store())

    def post(self, note: str) -> None:
        """Shows ``note`` instead of this rank's last one."""
        with suppress(RuntimeError):
            self._store.set(str(self._me), note)

    def meet(self, timeout: timedelta | None) -> list[int]:
        """Waits for all ranks to call this, once; returns those that did not within ``timeout``."""
        self.post("")
        others = [str(rank) for rank in self._others]
        with suppress(RuntimeError):
            if timeout is None:
                self._store.wait(others)
            else:
                self._store.wait(others, timeout)
            return []
        met = self.read()
        return [rank for rank in self._others if rank not in met]

    def read(self) -> dict[int, str]:
        """The other ranks' notes that are there, by their ranks in the default group."""
        notes: dict[int, str] = {}
        with suppress(RuntimeError):
            for rank in self._others:
                if self._store.check([str(rank)]):
                    notes[rank] = self._store.get(str(rank)).decode()
        return notes
