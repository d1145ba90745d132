"""HSDP and post-forward meshes: the all-reduce of gradients over replicas, optimizer shards among
replicas, and parts of unsharded parameters that neighbors keep until backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol
from weakref import ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import PendingCollective, all_reduce, choose
from fsdp_overlap.comm.comm_streams import Accept, CommStream, WorkHandle
from fsdp_overlap.comm.process_groups import CommGroups, alive
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.layout import ParamGroupPlan, Plan
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tensor.ragged_dtensor import ShardEdits

# ---- A part of the full buffer, kept between forward and backward ----


class PostForwardShard:
    """This rank's part of a param group's full buffer, kept from forward to backward.

    Each of ``size`` neighbors, usually the ranks of one machine, keeps ``1 / size`` of the buffer
    ``full``. Backward gathers it from them alone. ``plan`` is the param group's plan, merged to
    ``size`` ranks (:meth:`ParamGroupPlan.merged`)."""

    def __init__(
        self, full: FlatBuffer, size: int, group: dist.ProcessGroup, device_type: str
    ) -> None:
        self.plan = plan = full.plan.merged(size)
        # What no gather fills travels, too.
        self._gaps = [] if isinstance(full.plan, ParamGroupPlan) else full.gaps
        self._collectives = choose(group, device_type, plan)
        self._group = ref(group)
        rank = group.rank()
        self._start, self._numel = plan.shard_starts[rank], plan.shard_numels[rank]
        self._values: torch.Tensor | None = None
        self._version = -1

    def nbytes_of_others(self, full: torch.Tensor) -> int:
        """Return the bytes that travel to this rank in :meth:`all_gather`."""
        return (self.plan.numel - self._numel) * full.element_size()

    def holds(self, version: int) -> bool:
        """Return whether a part is kept, and was gathered from shards of ``version``."""
        return self._values is not None and self._version == version

    def all_gather(self, full: torch.Tensor) -> PendingCollective:
        """Fill ``full`` from the neighbors' parts. Collective over the neighbors."""
        assert self._values is not None
        return self._collectives.all_gather(full, self._values, alive(self._group))

    def keeper(self, version: int) -> Callable[[torch.Tensor], None]:
        """Return a function that keeps this rank's part of a full buffer. The buffer was gathered
        from shards of ``version``."""

        def keep(full: torch.Tensor) -> None:
            if self._gaps:
                torch._foreach_zero_(self._gaps)
            self._values = full.narrow(0, self._start, self._numel).clone()
            self._version = version

        return keep

    def drop(self, _: torch.Tensor | None = None) -> None:
        """Free the part. The argument, which a comm stream passes, is not used."""
        self._values = None


# ---- A shard that ranks with replicas divide ----


class ReplicatedShard(Protocol):
    """A param group whose shard other ranks hold too. ``shard`` is this rank's part of it, if they
    divide it."""

    label: str
    plan: Plan
    shard: torch.Tensor
    compute_dtype: torch.dtype
    is_meta: bool
    groups: CommGroups
    outer_shard: OuterShard | None

    @property
    def edits(self) -> ShardEdits: ...

    @property
    def version(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class OuterShard:
    """A shard that the ranks with copies of it divide: each rank keeps a part, which its optimizer
    steps.

    ``full_shard`` is the shard put together, in the dtype of compute. All-gathers among shards read
    it, and it is kept until a part is edited. So the ranks with replicas exchange parts once for
    each step of the optimizer, however often a unit is gathered. ``plan`` is about the shard alone,
    and has no parameters."""

    def __init__(self, param_group: ReplicatedShard, mesh_info: MeshInfo) -> None:
        self.param_group: ReplicatedShard = weakref.proxy(param_group)  # which owns this object
        group = param_group.groups.replicas
        assert group is not None
        first = mesh_info.shard_rank * mesh_info.num_replicas
        numels = param_group.plan.shard_numels[first : first + mesh_info.num_replicas]
        self.plan = plan = ParamGroupPlan((), (), numels)
        self.collectives = choose(group, mesh_info.device_type, plan)
        self.full_shard = FlatBuffer(plan, param_group.compute_dtype, param_group.device)
        self._work: WorkHandle | None = None
        self._version = -1

    @property
    def is_fresh(self) -> bool:
        """Whether ``full_shard`` is put together, or will be, from the parts as they are now."""
        return self._version == self.param_group.version

    def gather(self, comm_stream: CommStream) -> None:
        """Enqueue the all-gather that puts the shard together, unless it is fresh or on the meta
        device. Collective over the replicas."""
        if self.is_fresh or self.param_group.is_meta:
            return
        self.wait()
        group = self.param_group.groups.replicas
        assert group is not None
        # Compute edited the part. It also has waited for all all-gathers that read ``full_shard``,
        # but for those whose result nobody needs now.
        comm_stream.after_compute()
        if not self.full_shard.allocated:
            comm_stream.allocate(self.param_group.label, self.full_shard)
        version = self.param_group.version
        issue = partial(
            self.collectives.all_gather, self.full_shard.flat, self.param_group.shard, group
        )
        self._work = comm_stream.enqueue(
            "copies_all_gather",
            self.param_group.label,
            issue,
            nbytes=self.full_shard.nbytes_of_others(group.rank()),
        )
        self._version = version

    def wait(self) -> None:
        """Make the current comm stream wait until the shard is put together."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def reset(self) -> None:
        """Make the next :meth:`gather` put the shard together anew, even if the last failed."""
        with suppress(RuntimeError):  # a collective failed
            self.wait()
        self._work = None
        self._version = -1


# ---- The all-reduce of gradients over replicas ----


class ReplicaReduction:
    """Reduces one param group's gradients across the ranks that hold replicas of this rank's shard,
    on a mesh ``(replicate, shard)``.

    The gradients were reduced among shards before. They travel at once, or wait here while later
    backwards add to them. Each rank gets all of them, or its part if the shard is a
    :class:`OuterShard`.
    """

    def __init__(self, param_group: ReplicatedShard) -> None:
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
        group, outer_shard = self.param_group.groups.replicas, self.param_group.outer_shard
        total, self._waiting = self._waiting, None
        assert group is not None
        assert total is not None
        # "compute" here is the comm stream of reduce-scatters, on which this runs
        comm_stream.after_compute()
        if outer_shard is None:
            kind, times, issue = "all_reduce", 2, partial(all_reduce, total, group, divisor)
        else:
            reduce_scatter = outer_shard.collectives.reduce_scatter
            kind, times = "copies_reduce_scatter", 1
            issue = partial(reduce_scatter, total, group, divisor)
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
