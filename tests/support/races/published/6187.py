"""Trains residual blocks with Megatron-FSDP over two hosts of two ranks: sharded within a host."""

import torch
import torch.distributed as dist
from megatron_fsdp.experimental import (
    Flat,
    Partial,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_optimizer,
)
from residual import make_model, train
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("hosts", "ranks"))
placements = Placements(
    dp_axes=["hosts", "ranks"],
    parameter=[Replicate(), Flat()],
    gradient=[Partial(dist.ReduceOp.AVG), Flat()],
    optimizer=[Replicate(), Flat()],
)
model = make_model(depth=4)
for block in model[:-1]:
    fully_shard(block, mesh=mesh, placements=placements)
fully_shard(model, mesh=mesh, placements=placements)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fully_shard_optimizer(optimizer)
train(model, optimizer)
