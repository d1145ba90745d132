"""Fully-sharded data parallelism for PyTorch that hides every collective behind compute."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_overlap.blocks import find_blocks
from fsdp_overlap.comm.mesh_groups import MeshGroups
from fsdp_overlap.deciding.finalization import GradientReductionHandle
from fsdp_overlap.deciding.stats import Stats
from fsdp_overlap.fsdp_module import (
    FsdpModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_overlap.fully_shard import fully_shard
from fsdp_overlap.layout import Blocks, Flat, Rows, Whole
from fsdp_overlap.replacing import replacing_fsdp2
from fsdp_overlap.runtime.context import FsdpContext
from fsdp_overlap.runtime.full_mesh import DataParallelMeshDims
from fsdp_overlap.runtime.wire_policy import WirePolicy
from fsdp_overlap.tensor.creation import distribute_tensor
from fsdp_overlap.tensor.placement import RangeShard
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor

FSDPModule = FsdpModule
"""The name of :class:`FsdpModule` in FSDP2, so that code for FSDP2 changes only its import."""

__all__ = [
    "Blocks",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "Flat",
    "FsdpContext",
    "FsdpModule",
    "GradientReductionHandle",
    "MeshGroups",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RangeShard",
    "Rows",
    "ShardedTensor",
    "Stats",
    "UnshardHandle",
    "Whole",
    "WirePolicy",
    "distribute_tensor",
    "find_blocks",
    "fully_shard",
    "register_fsdp_forward_method",
    "replacing_fsdp2",
    "share_comm_ctx",
]
