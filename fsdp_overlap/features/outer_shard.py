"""Shards that the ranks with replicas divide: ``shard_optimizer_over_replicas=True``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import choose
from fsdp_overlap.comm.comm_streams import CollectiveOp, CommStream, PendingCollective, WorkHandle
from fsdp_overlap.engine.param_group import Gatherer, ParamGroup
from fsdp_overlap.features.kept_parts import FromNeighbors
from fsdp_overlap.features.offload import gatherer_of_shard
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.tensor.flat_buffer import FlatBuffer


class OuterShard(Gatherer):
    """A shard that the ranks with copies of it divide: each rank keeps a part, which its optimizer
    steps.

    ``full_shard`` is the shard put together, in the dtype of compute. All-gathers among shards read
    it, and it is kept until a part is edited. So the ranks with replicas exchange parts once for
    each step of the optimizer, however often a unit is gathered. ``plan`` is about the shard alone,
    and has no parameters."""

    prepares = True

    def __init__(self, param_group: ParamGroup) -> None:
        self.param_group: ParamGroup = weakref.proxy(param_group)  # which owns this object
        mesh_info, group = param_group.mesh_info, param_group.groups.replicas
        assert group is not None
        first = mesh_info.shard_rank * mesh_info.num_replicas
        numels = param_group.plan.shard_numels[first : first + mesh_info.num_replicas]
        self.plan = plan = ParamGroupPlan((), (), numels)
        self.collectives = choose(group, mesh_info.device.type, plan)
        self._of_part = gatherer_of_shard(param_group)
        self.full_shard = FlatBuffer(plan, param_group.compute_dtype, param_group.device)
        self._work: WorkHandle | None = None
        self._version = -1

    @property
    def is_up_to_date(self) -> bool:
        """Whether ``full_shard`` is put together, or will be, from the parts as they are now."""
        return self._version == self.param_group.version

    def prepare(self, comm_stream: CommStream) -> None:
        """Enqueue the all-gather that puts the shard together, unless it is fresh or on the meta
        device. Collective over the replicas."""
        if self.is_up_to_date or self.param_group.is_meta:
            return
        self.wait_for_prepared()
        group = self.param_group.groups.replicas
        assert group is not None
        # Compute edited the part. It also has waited for all all-gathers that read ``full_shard``,
        # but for those whose result nobody needs now.
        comm_stream.after_compute()
        if not self.full_shard.allocated:
            comm_stream.allocate(self.param_group.label, self.full_shard)
        version, part = self.param_group.version, self._of_part.source(self.param_group)
        issue = partial(self.collectives.all_gather, self.full_shard.flat, part, group)
        self._work = comm_stream.enqueue(
            "copies_all_gather",
            self.param_group.label,
            issue,
            nbytes=self.full_shard.nbytes_of_others(group.rank()),
        )
        self.param_group.reading = self._work
        self._version = version

    def wait_for_prepared(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def source(self, param_group: ParamGroup) -> torch.Tensor:
        self.wait_for_prepared()
        return self.full_shard.flat

    def collective_op(self, param_group: ParamGroup) -> CollectiveOp:
        return self._all_gather, None, param_group.comm_nbytes

    def _all_gather(self) -> PendingCollective:
        param_group = self.param_group
        source, group = self.source(param_group), param_group.groups.gather
        return param_group.collectives.all_gather(param_group.full.flat, source, group)

    def replica_reduction(
        self, total: torch.Tensor, group: dist.ProcessGroup, divisor: float | None
    ) -> tuple[str, int, Callable[[], PendingCollective]]:
        issue = partial(self.collectives.reduce_scatter, total, group, divisor)
        return "copies_reduce_scatter", 1, issue

    def mark_stale(self) -> None:
        """Make the next :meth:`prepare` put the shard together anew, even if the last failed."""
        with suppress(RuntimeError):  # a collective failed
            self.wait_for_prepared()
        self._work = None
        self._version = -1


def make_gatherer(param_group: ParamGroup, size: int | None) -> Gatherer:
    """Return the gatherer of a param group whose shard replicas divide, and of which ``size``
    neighbors keep a part each, if any do."""
    outer_shard = OuterShard(param_group)
    return outer_shard if size is None else FromNeighbors(outer_shard, param_group, size)
