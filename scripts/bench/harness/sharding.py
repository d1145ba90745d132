"""Models sharded by ours and by FSDP2, as users of each shard them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_overlap


def cpu_mesh() -> DeviceMesh:
    """All ranks, in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def matrices(width: int, blocks: int) -> nn.Sequential:
    """The matrices of a transformer of `width`, which nobody multiplies; the same on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(width, 3 * width, bias=False),
                nn.Linear(width, width, bias=False),
                nn.Linear(width, 4 * width, bias=False),
                nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(blocks)
        )
    )


def shard_ours(model: Any, ctx: fsdp_overlap.FsdpContext | None = None, **options: Any) -> Any:
    """Shard each child of ``model``, then ``model``, in one context. Return ``model``."""
    ctx = fsdp_overlap.FsdpContext(cpu_mesh()) if ctx is None else ctx
    for module in (*model.children(), model):
        fsdp_overlap.fully_shard(module, ctx, **options)
    return model


def shard_fsdp2(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """The same by FSDP2."""
    mesh = cpu_mesh() if mesh is None else mesh
    for module in (*model.children(), model):
        fsdp2.fully_shard(module, mesh=mesh, **options)
    return model
