"""torchao: the optimizer whose states and steps are on the host, or with "adamw8bit" in 8 bits, on
FSDP2 with "fsdp2"."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.optim import AdamW8bit, CPUOffloadOptimizer

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model: Any = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))).cuda()
if "fsdp2" in sys.argv:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer: Any
if "adamw8bit" in sys.argv:
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
else:
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients="gradients" in sys.argv, lr=1e-3
    )
for _ in range(4):
    loss = model(torch.randn(8, 128, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
