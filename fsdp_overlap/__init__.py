"""Fully-sharded data parallelism for PyTorch that hides every collective behind compute."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from fsdp_overlap._fully_shard import fully_shard, fully_shard_model
    from fsdp_overlap.blocks import find_blocks
    from fsdp_overlap.context import FsdpContext
    from fsdp_overlap.features.dtypes import UnitDtypes, unit_dtypes
    from fsdp_overlap.features.full_mesh import DataParallelMeshDims
    from fsdp_overlap.features.mesh_groups import MeshGroups
    from fsdp_overlap.features.numerics import NumericsWarning
    from fsdp_overlap.features.quantized.policy import QuantizedCommPolicy
    from fsdp_overlap.features.rows.layout import PerTensor
    from fsdp_overlap.fsdp_module import (
        FSDPModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from fsdp_overlap.fsdp_module import (
        FsdpModule as FsdpModule,
    )
    from fsdp_overlap.layout import BlockAtomic, Flat, TensorAtomic
    from fsdp_overlap.patching import patch_fsdp2
    from fsdp_overlap.schedule.finalization import GradientReductionHandle
    from fsdp_overlap.schedule.stats import Stats
    from fsdp_overlap.tensor.creation import distribute_tensor
    from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, RaggedShard

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
    "NumericsWarning",
    "OffloadPolicy",
    "PerTensor",
    "QuantizedCommPolicy",
    "RaggedDTensor",
    "RaggedShard",
    "Stats",
    "TensorAtomic",
    "UnitDtypes",
    "UnshardHandle",
    "distribute_tensor",
    "find_blocks",
    "fully_shard",
    "fully_shard_model",
    "patch_fsdp2",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "unit_dtypes",
]

_MODULE_OF = {
    "BlockAtomic": "fsdp_overlap.layout",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "DataParallelMeshDims": "fsdp_overlap.features.full_mesh",
    "FSDPModule": "fsdp_overlap.fsdp_module",
    "Flat": "fsdp_overlap.layout",
    "FsdpContext": "fsdp_overlap.context",
    "FsdpModule": "fsdp_overlap.fsdp_module",
    "GradientReductionHandle": "fsdp_overlap.schedule.finalization",
    "MeshGroups": "fsdp_overlap.features.mesh_groups",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "NumericsWarning": "fsdp_overlap.features.numerics",
    "OffloadPolicy": "torch.distributed.fsdp",
    "PerTensor": "fsdp_overlap.features.rows.layout",
    "QuantizedCommPolicy": "fsdp_overlap.features.quantized.policy",
    "RaggedDTensor": "fsdp_overlap.tensor.ragged_dtensor",
    "RaggedShard": "fsdp_overlap.tensor.ragged_dtensor",
    "Stats": "fsdp_overlap.schedule.stats",
    "TensorAtomic": "fsdp_overlap.layout",
    "UnitDtypes": "fsdp_overlap.features.dtypes",
    "UnshardHandle": "fsdp_overlap.fsdp_module",
    "distribute_tensor": "fsdp_overlap.tensor.creation",
    "find_blocks": "fsdp_overlap.blocks",
    "fully_shard": "fsdp_overlap._fully_shard",
    "fully_shard_model": "fsdp_overlap._fully_shard",
    "patch_fsdp2": "fsdp_overlap.patching",
    "register_fsdp_forward_method": "fsdp_overlap.fsdp_module",
    "share_comm_ctx": "fsdp_overlap.fsdp_module",
    "unit_dtypes": "fsdp_overlap.features.dtypes",
}


def __getattr__(name: str) -> Any:
    """Import a name of the API when it is asked for, so that the tools run without the sharder."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
