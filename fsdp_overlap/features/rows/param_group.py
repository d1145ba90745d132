"""Param groups of which each rank has rows of each parameter."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.comm.collectives import Collectives
from fsdp_overlap.comm.process_groups import communicates
from fsdp_overlap.engine.param import ParamInfo
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.features.rows.collectives import PackedRows, choose_for_rows
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.features.rows.row_tensor import RowTensor, read_full_scalars
from fsdp_overlap.layout import ParamSpec
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam
from fsdp_overlap.torch_internals import StridedShard


class RowsParamGroup(ParamGroup):
    """Parameters in rows. Their sharded forms are DTensors as FSDP2's are."""

    plan: RowsPlan
    gather_plan: RowsPlan
    give_grads = staticmethod(RowTensor.give_grads)

    def _make_sharded(self, item: ParamInfo, spec: ParamSpec, local: torch.Tensor) -> ShardedParam:
        rank, dtype = self.mesh_info.plan_rank, self.plan.specs[0].dtype
        layout = self.mesh_info.spec(item, row_shard(item, spec.cut_dim), dtype)
        read_full_scalars(layout.mesh)
        return RowTensor.wrap(local.view(self.plan.chunk_shape(spec, rank)), layout, self.edits)

    def _own_part(self, value: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
        first, last = self.plan.held(spec, self.mesh_info.plan_rank)
        return value.narrow(spec.cut_dim, first, last - first)

    def _wrap_carriers(self) -> Collectives:
        group = self.groups.gather
        if not communicates(group):
            return self.carriers
        if self.transport is not None:
            return PackedRows(self.gather_plan, self.carriers)
        return choose_for_rows(group, self.mesh_info.device.type, self.gather_plan)


def row_shard(item: ParamInfo, dim: int) -> Placement:
    """Return the placement of chunks of a parameter. Where tensor parallelism has cut the same
    dimension, the chunks of all ranks do not follow each other in the order of the mesh."""
    factor, parameter = 1, item.parameter
    if item.placement is not None:
        factor = item.placement.cuts_after(dim)
    elif isinstance(parameter, DTensor):
        for other, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard) and placement.dim == dim:
                factor *= parameter.device_mesh.size(other)
    return Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)
