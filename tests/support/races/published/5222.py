"""Trains residual blocks with Megatron-FSDP, whose communication buffers are allocated once."""

import torch
from megatron_fsdp import fully_shard
from residual import Block, make_model, train
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (4, 1), mesh_dim_names=("ranks", "tensors"))
model = make_model(depth=6)
sharded, optimizer = fully_shard(
    module=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    device_mesh=mesh,
    dp_shard_dim="ranks",
    tp_dim="tensors",
    fsdp_unit_modules=[Block],
    fsdp_double_buffer=True,
)
train(sharded, optimizer)
