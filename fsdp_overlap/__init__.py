"""Fully-sharded data parallelism for PyTorch that hides every collective behind compute."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_overlap.fully_shard import FsdpModule, UnshardHandle, fully_shard
from fsdp_overlap.runtime.context import FsdpContext
from fsdp_overlap.runtime.stats import Stats
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor

__all__ = [
    "CPUOffloadPolicy",
    "FsdpContext",
    "FsdpModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedTensor",
    "Stats",
    "UnshardHandle",
    "fully_shard",
]
