"""Fully-sharded data parallelism for PyTorch that hides every collective behind compute."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_overlap.comm.process_groups import MeshGroups
from fsdp_overlap.engine.context import FsdpContext
from fsdp_overlap.engine.options import QuantizedCommPolicy
from fsdp_overlap.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_overlap.fully_shard import find_blocks, fully_shard, fully_shard_model
from fsdp_overlap.layout import BlockAtomic, Flat, PerTensor, TensorAtomic
from fsdp_overlap.patching import patch_fsdp2
from fsdp_overlap.schedule.finalization import GradientReductionHandle
from fsdp_overlap.schedule.stats import Stats
from fsdp_overlap.tensor.creation import distribute_tensor
from fsdp_overlap.tensor.placement import RaggedShard
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from fsdp_overlap.tensor.spmd_mesh import DataParallelMeshDims

FsdpModule = FSDPModule
"""Another name of :class:`FSDPModule`, which has its name in FSDP2."""

__all__ = [
    "BlockAtomic",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "Flat",
    "FsdpContext",
    "GradientReductionHandle",
    "MeshGroups",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PerTensor",
    "QuantizedCommPolicy",
    "RaggedDTensor",
    "RaggedShard",
    "Stats",
    "TensorAtomic",
    "UnshardHandle",
    "distribute_tensor",
    "find_blocks",
    "fully_shard",
    "fully_shard_model",
    "patch_fsdp2",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
