"""HSDP: the all-reduce of gradients over replicas."""

from __future__ import annotations

from contextlib import suppress

import torch

from fsdp_overlap.comm.comm_streams import Accept, CommStream, WorkHandle
from fsdp_overlap.engine.param_group import ParamGroup


class ReplicaReduction:
    """Reduces one param group's gradients across the ranks that hold replicas of this rank's shard,
    on a mesh ``(replicate, shard)``.

    The gradients were reduced among shards before. They travel at once, or wait here while later
    backwards add to them. Each rank gets all of them, or its part if the ranks divide the shard.
    """

    def __init__(self, param_group: ParamGroup) -> None:
        self.param_group = param_group
        self._waiting: torch.Tensor | None = None
        # Each work handle with the tensor that is reduced. The tensor's memory belongs to the comm
        # stream of reduce-scatters, which must not use it anew meanwhile.
        self._in_flight: list[tuple[WorkHandle, torch.Tensor]] = []

    def keep(self, mean: torch.Tensor) -> None:
        """Add ``mean``, the result of a reduction among shards, to what waits for
        :meth:`start`."""
        self._waiting = mean if self._waiting is None else self._waiting.add_(mean)

    def start(
        self, comm_stream: CommStream, divisor: float | None, accept: Accept, mean: torch.Tensor
    ) -> None:
        """Enqueue the reduction of the sum of ``mean`` and what waits. ``accept`` gets the result.
        Collective over the replicas."""
        self.keep(mean)
        group = self.param_group.groups.replicas
        total, self._waiting = self._waiting, None
        assert group is not None
        assert total is not None
        # "compute" here is the comm stream of reduce-scatters, on which this runs
        comm_stream.after_compute()
        kind, times, issue = self.param_group.gatherer.replica_reduction(total, group, divisor)
        nbytes = times * total.nbytes * (group.size() - 1) // group.size()
        work = comm_stream.enqueue(kind, self.param_group.label, issue, accept, nbytes)
        self._in_flight.append((work, total))

    def is_done(self) -> bool:
        """Return whether :meth:`finish` would not wait. Not if it calls hooks, which may
        communicate: all ranks call them at the same point."""
        has_hooks = self.param_group.edits.has_hooks
        return not has_hooks and all(work.done() for work, _ in self._in_flight)

    def finish(self) -> None:
        """Make compute wait for the reductions under way."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def finish_before(self, comm_stream: CommStream) -> None:
        """Make ``comm_stream``, the comm stream of reduce-scatters, wait for the reductions under
        way. It may then use the memory of what they reduce again."""
        for work, _ in self._in_flight:
            comm_stream.after_work(work)
        self._in_flight.clear()

    def abandon(self) -> None:
        """Wait for the reductions under way. Nobody needs their results."""
        for work, _ in self._in_flight:
            with suppress(RuntimeError):  # a collective failed
                work.abandon()
        self._in_flight.clear()

    def drop(self) -> None:
        """Forget everything."""
        self._waiting = None
        self._in_flight.clear()
