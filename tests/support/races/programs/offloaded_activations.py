"""Activations that go to pinned memory and come back on streams of their own, by TRL's
OffloadActivations, on FSDP2."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from trl.models.activation_offloading import OffloadActivations

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
model = nn.Sequential(*blocks).cuda()
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
offload = OffloadActivations(use_pin_memory=True, use_streams=True, min_offload_size=1024)
for _ in range(4):
    with offload:
        loss = model(torch.randn(16, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
