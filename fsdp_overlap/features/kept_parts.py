"""Parts of unsharded parameters that neighbors keep from forward to backward: post-forward
meshes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import choose
from fsdp_overlap.comm.comm_streams import CollectiveOp, CommStream, PendingCollective
from fsdp_overlap.comm.process_groups import alive
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param_group import Gatherer, ParamGroup
from fsdp_overlap.features.offload import gatherer_of_shard
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.torch_internals import current_graph_task_id


class FromNeighbors(Gatherer):
    """This rank's part of a param group's full buffer, kept from forward to backward.

    Each of ``size`` neighbors, usually the ranks of one machine, keeps ``1 / size`` of the buffer
    ``full``. Backward gathers it from them alone. ``plan`` is the param group's plan, merged to
    ``size`` ranks (:meth:`ParamGroupPlan.merged`)."""

    goes_alone = True

    def __init__(self, among_shards: Gatherer, param_group: ParamGroup, size: int) -> None:
        mesh_info, full = param_group.mesh_info, param_group.full
        assert isinstance(full, FlatBuffer)
        group = neighbors_group(mesh_info, size)
        self._among_shards = among_shards
        self.prepares = among_shards.prepares
        self.plan = plan = full.plan.merged(size)
        # What no gather fills travels, too.
        self._gaps = [] if isinstance(full.plan, ParamGroupPlan) else full.gaps
        self._collectives = choose(group, mesh_info.device.type, plan)
        self._group = ref(group)
        rank = group.rank()
        self._start, self._numel = plan.shard_starts[rank], plan.shard_numels[rank]
        self._values: torch.Tensor | None = None
        self._version = -1

    def collective_op(self, param_group: ParamGroup) -> CollectiveOp:
        version, full = param_group.version, param_group.full.flat
        # Backward uses the part up, and without gradients no backward will need it.
        keeps = torch.is_grad_enabled() and current_graph_task_id() == -1
        accept = self._keeper(version) if keeps else self._drop
        if not self._holds(version):
            issue, _, nbytes = self._among_shards.collective_op(param_group)
            return issue, accept, nbytes
        nbytes = (self.plan.numel - self._numel) * full.element_size()
        return partial(self._all_gather, full), accept, nbytes

    def source(self, param_group: ParamGroup) -> torch.Tensor:
        return self._among_shards.source(param_group)

    def prepare(self, comm_stream: CommStream) -> None:
        self._among_shards.prepare(comm_stream)

    def wait_for_prepared(self) -> None:
        self._among_shards.wait_for_prepared()

    def replica_reduction(
        self, total: torch.Tensor, group: dist.ProcessGroup, divisor: float | None
    ) -> tuple[str, int, Callable[[], PendingCollective]]:
        return self._among_shards.replica_reduction(total, group, divisor)

    def mark_stale(self) -> None:
        self._among_shards.mark_stale()

    def drop_parts(self) -> None:
        self._values = None

    def _holds(self, version: int) -> bool:
        """Return whether a part is kept, and was gathered from shards of ``version``."""
        return self._values is not None and self._version == version

    def _all_gather(self, full: torch.Tensor) -> PendingCollective:
        """Fill ``full`` from the neighbors' parts. Collective over the neighbors."""
        assert self._values is not None
        return self._collectives.all_gather(full, self._values, alive(self._group))

    def _keeper(self, version: int) -> Callable[[torch.Tensor], None]:
        """Return a function that keeps this rank's part of a full buffer. The buffer was gathered
        from shards of ``version``."""

        def keep(full: torch.Tensor) -> None:
            if self._gaps:
                torch._foreach_zero_(self._gaps)
            self._values = full.narrow(0, self._start, self._numel).clone()
            self._version = version

        return keep

    def _drop(self, full: torch.Tensor) -> None:
        self._values = None


def make_gatherer(param_group: ParamGroup, size: int | None) -> Gatherer:
    """Return the gatherer of a param group of which ``size`` neighbors keep a part each, if any
    do."""
    gatherer = gatherer_of_shard(param_group)
    return gatherer if size is None else FromNeighbors(gatherer, param_group, size)


def neighbors_group(mesh_info: MeshInfo, size: int) -> dist.ProcessGroup:
    """Return the group of ``size`` neighbours that this rank belongs to, along the dimension that
    parameters are sharded over. ``size`` divides that dimension. Collective over the mesh at its
    first call."""
    mesh, cache = mesh_info.mesh, mesh_info.group_cache
    shard = mesh.get_group(mesh.ndim - 1)
    first = shard.rank() // size * size
    ranks = dist.get_process_group_ranks(shard)[first : first + size]
    key = "part", tuple(ranks)
    if key not in cache.groups:
        cache.make(key, shard, mesh.device_type, "all_gather", color=first)
    return alive(cache.groups[key])
