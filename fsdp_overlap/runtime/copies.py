"""How gradients are reduced, and the second part of it on a mesh that holds copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import or_
from typing import TYPE_CHECKING

import torch

from fsdp_overlap.comm.collectives import all_reduce
from fsdp_overlap.comm.lanes import Lane, Ticket

if TYPE_CHECKING:
    from fsdp_overlap.runtime.bucket import Bucket

Accept = Callable[[torch.Tensor], None]


@dataclass
class Reducing:
    """How a unit's gradients are reduced.

    ``divisor``: what their sum over all ranks is divided by, ``None`` for the number of ranks.
    ``sums_only``: whether collectives must be sums, with divisions of their own. ``across_copies``:
    whether backward reduces across copies too, or leaves that for one that does. ``hook`` is called
    with this rank's reduced range before it becomes a gradient, on ``hook_stream`` if given.
    """

    divisor: float | None = None
    sums_only: bool = False
    across_copies: bool = True
    hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: torch.cuda.Stream | None = None

    def divisors(self, shards: int, copies: int) -> tuple[float | None, float | None]:
        """Of the reduction among ``shards`` ranks and of the one across ``copies``; ``None`` for
        their number."""
        if self.divisor is not None:
            return self.divisor, 1.0
        return (float(shards), float(copies)) if self.sums_only else (None, None)

    def call_hook(self, reduced: torch.Tensor) -> None:
        """Lets the user's hook see, and edit, ``reduced``."""
        if self.hook is None:
            return
        if self.hook_stream is None:
            self.hook(reduced)
            return
        lane = torch.cuda.current_stream()
        self.hook_stream.wait_stream(lane)
        with torch.cuda.stream(self.hook_stream):
            self.hook(reduced)
        lane.wait_stream(self.hook_stream)


class CopiesReduction:
    """Of one bucket on a mesh ``(replicate, shard)``: what was reduced among shards is reduced
    across the ranks that hold copies of this one's shard, at once or after some more backwards.

    ``filled`` says of which parameters there is a gradient in what waits here.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._waiting: torch.Tensor | None = None
        # With what is reduced: its memory belongs to the lane of reduce-scatters, which must not
        # use it anew meanwhile.
        self._in_flight: list[tuple[Ticket, torch.Tensor]] = []
        self.filled = [False] * len(bucket.parameters)

    def keep(self, mean: torch.Tensor) -> None:
        """Adds ``mean``, of the shards, to what waits for :meth:`start`."""
        self._waiting = mean if self._waiting is None else self._waiting.add_(mean)

    def keep_filled(self, filled: Sequence[bool]) -> None:
        """Says of which parameters :meth:`keep` will get a gradient."""
        self.filled = list(map(or_, self.filled, filled))

    def take_filled(self, filled: Sequence[bool]) -> list[bool]:
        """Of which parameters :meth:`start` will reduce a gradient, if :meth:`start` gets those
        that are ``filled``."""
        self.keep_filled(filled)
        taken, self.filled = self.filled, [False] * len(filled)
        return taken

    def start(self, lane: Lane, divisor: float | None, accept: Accept, mean: torch.Tensor) -> None:
        """Enqueues the all-reduce of ``mean`` and what waits; ``accept`` gets the result.
        Collective over the copies."""
        self.keep(mean)
        group = self.bucket.groups.across
        total, self._waiting = self._waiting, None
        assert group is not None
        assert total is not None
        lane.after_compute()  # which here is what the lane of reduce-scatters did
        ticket = lane.enqueue(
            "all_reduce",
            self.bucket.label,
            lambda: all_reduce(total, group, divisor),
            accept,
            nbytes=2 * total.nbytes * (group.size() - 1) // group.size(),
        )
        self._in_flight.append((ticket, total))

    def finish(self) -> None:
        """Makes compute wait for the all-reduces under way."""
        for ticket, _ in self._in_flight:
            ticket.wait()
        self._in_flight.clear()

    def abandon(self) -> None:
        """Waits for the all-reduces under way, of which nobody needs the results."""
        for ticket, _ in self._in_flight:
            with suppress(RuntimeError):  # of a collective that failed
                ticket.abandon()
                ticket.wait()
        self._in_flight.clear()

    def drop(self) -> None:
        """Forgets everything."""
        self._waiting = None
        self._in_flight.clear()
        self.filled = [False] * len(self.filled)
