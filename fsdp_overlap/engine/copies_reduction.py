"""Reduces gradients across the ranks that hold copies, after the reduction among shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import or_

import torch

from fsdp_overlap.comm.collectives import all_reduce
from fsdp_overlap.comm.lanes import Lane, Ticket
from fsdp_overlap.engine.bucket import Bucket

Accept = Callable[[torch.Tensor], None]


class CopiesReduction:
    """Reduces one bucket's gradients across the ranks that hold copies of this rank's shard, on a
    mesh ``(replicate, shard)``.

    The gradients were reduced among shards before. They travel at once, or wait here while later
    backwards add to them. Each rank gets all of them, or its part if the shard is a
    :class:`DividedShard`. ``filled`` says which parameters have a gradient in what waits here.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._waiting: torch.Tensor | None = None
        # Each ticket with the tensor that is reduced. The tensor's memory belongs to the lane of
        # reduce-scatters, which must not use it anew meanwhile.
        self._in_flight: list[tuple[Ticket, torch.Tensor]] = []
        self.filled = [False] * len(bucket.parameters)

    def keep(self, mean: torch.Tensor) -> None:
        """Adds ``mean``, the result of a reduction among shards, to what waits for
        :meth:`start`."""
        self._waiting = mean if self._waiting is None else self._waiting.add_(mean)

    def keep_filled(self, filled: Sequence[bool]) -> None:
        """Notes for which parameters :meth:`keep` will get a gradient."""
        self.filled = list(map(or_, self.filled, filled))

    def take_filled(self, filled: Sequence[bool]) -> list[bool]:
        """Returns which parameters have a gradient in what :meth:`start` will reduce: those that
        are ``filled``, and those noted by :meth:`keep_filled`. Forgets these notes."""
        self.keep_filled(filled)
        taken, self.filled = self.filled, [False] * len(filled)
        return taken

    def start(self, lane: Lane, divisor: float | None, accept: Accept, mean: torch.Tensor) -> None:
        """Enqueues the reduction of the sum of ``mean`` and what waits. ``accept`` gets the result.
        Collective over the copies."""
        self.keep(mean)
        group, divided = self.bucket.groups.across, self.bucket.divided
        total, self._waiting = self._waiting, None
        assert group is not None
        assert total is not None
        lane.after_compute()  # "compute" here is the lane of reduce-scatters, on which this runs
        if divided is None:
            kind, times, issue = "all_reduce", 2, partial(all_reduce, total, group, divisor)
        else:
            reduce_scatter = divided.collectives.reduce_scatter
            kind, times = "copies_reduce_scatter", 1
            issue = partial(reduce_scatter, total, divided.plan, group, divisor)
        nbytes = times * total.nbytes * (group.size() - 1) // group.size()
        ticket = lane.enqueue(kind, self.bucket.label, issue, accept, nbytes)
        self._in_flight.append((ticket, total))

    def is_done(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        return all(ticket.done() for ticket, _ in self._in_flight)

    def finish(self) -> None:
        """Makes compute wait for the reductions under way."""
        for ticket, _ in self._in_flight:
            ticket.wait()
        self._in_flight.clear()

    def finish_before(self, lane: Lane) -> None:
        """Makes ``lane``, the lane of reduce-scatters, wait for the reductions under way. It may
        then use the memory of what they reduce again."""
        for ticket, _ in self._in_flight:
            lane.after_ticket(ticket)
        self._in_flight.clear()

    def abandon(self) -> None:
        """Waits for the reductions under way. Nobody needs their results."""
        for ticket, _ in self._in_flight:
            with suppress(RuntimeError):  # a collective failed
                ticket.abandon()
                ticket.wait()
        self._in_flight.clear()

    def drop(self) -> None:
        """Forgets everything."""
        self._waiting = None
        self._in_flight.clear()
        self.filled = [False] * len(self.filled)
