"""Gradients of param groups with replicas: reduced among shards, then over replicas."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from operator import or_

import torch

from fsdp_overlap.comm.comm_streams import Accept, CommStream, WorkHandle
from fsdp_overlap.desync.order_check import REDUCE_OVER_REPLICAS, REDUCE_SCATTER
from fsdp_overlap.engine.grads import ParamGroupGradients, ReduceStreams
from fsdp_overlap.engine.options import ReduceOptions
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.features.hsdp.replica_reduction import ReplicaReduction

# If the host runs ahead: how many reductions over replicas may be under way, beside those of reduce
# inputs that still travel. Such a host may see none of them end, and would keep what each of them
# reads until the end of backward.
MAX_ALL_REDUCES = 2


class ReplicaReductions:
    """The reductions over replicas of one context that are under way, oldest first."""

    def __init__(self) -> None:
        self._under_way: deque[ReplicaReduction] = deque()

    def make_room(self, comm_stream: CommStream) -> None:
        """Make ``comm_stream``, that of reduce-scatters, wait for the oldest if there are many."""
        while len(self._under_way) > MAX_ALL_REDUCES and comm_stream.runs_ahead:
            self._under_way.popleft().finish_before(comm_stream)

    def add(self, reduction: ReplicaReduction) -> None:
        self._under_way.append(reduction)

    def finish_done(self) -> None:
        """Free what those that are done have sent."""
        while self._under_way and self._under_way[0].is_done():
            self._under_way.popleft().finish()

    def finish(self) -> None:
        for reduction in self._under_way:
            reduction.finish()
        self._under_way.clear()

    def abandon(self) -> None:
        for reduction in self._under_way:
            reduction.abandon()
        self._under_way.clear()


class ReplicatedGradients(ParamGroupGradients):
    """Gradients of which other ranks hold the same shard. If the user asked that backward does not
    reduce over replicas, what was reduced among shards waits for a backward that does."""

    kinds = REDUCE_SCATTER, REDUCE_OVER_REPLICAS

    def __init__(
        self, param_group: ParamGroup, reduce_dtype: torch.dtype, reduce_options: ReduceOptions
    ) -> None:
        super().__init__(param_group, reduce_dtype, reduce_options)
        self.replica_reduction = ReplicaReduction(param_group)
        self._filled_partly = [False] * self.count
        """For which parameters :attr:`replica_reduction` holds a gradient, reduced among shards
        alone."""

    def reduce(self, comm: ReduceStreams, accept: Accept | None = None) -> WorkHandle:
        reductions = comm.part(ReplicaReductions)
        reductions.make_room(comm.reduce_scatter_stream)
        replicas, filled = self.replica_reduction, list(map(or_, self._filled_partly, self.filled))
        if self.reduce_options.all_reduce_grads:
            self._filled_partly = [False] * self.count
            # One more collective comes before the result becomes ``.grad``.
            divisor = self.reduce_options.divisor_among_replicas(
                self.param_group.mesh_info.num_replicas
            )
            accept = partial(
                replicas.start, comm.all_reduce_stream, divisor, self._accept_filled(filled)
            )
        else:
            self._filled_partly, accept = filled, replicas.keep
        work = super().reduce(comm, accept)
        return _ReducedAmongShards(work, reductions, replicas)

    def drop(self) -> None:
        super().drop()
        self._filled_partly = [False] * self.count
        self.replica_reduction.drop()


class _ReducedAmongShards:
    """A reduce-scatter whose result is then reduced over replicas."""

    def __init__(
        self, work: WorkHandle, reductions: ReplicaReductions, reduction: ReplicaReduction
    ) -> None:
        self._work = work
        self._reductions = reductions
        self._reduction = reduction
        self.done, self.wait_on_host = work.done, work.wait_on_host

    def wait(self) -> None:
        self._work.wait()
        self._reductions.add(self._reduction)
        self._reductions.finish_done()

    def abandon(self) -> None:
        with suppress(RuntimeError):  # a collective failed
            self._work.wait()  # not abandon(): what the comm stream reads is about to be freed
        # The reduction over replicas is under way too, or began with the wait above, as it may have
        # on another rank.
        self._reductions.add(self._reduction)
