"""A program that somebody wrote for FSDP2, and faults that can be planted in it."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

fault = sys.argv[1] if len(sys.argv) > 1 else ""
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 16
print(*sys.argv[3:], flush=True)
if fault == "gpu":
    torch.cuda.set_device(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
if fault == "ranks":
    dist.init_device_mesh("cpu", (2, 4))
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Dropout(0.1))
if fault != "unsharded":
    for layer in model[:2]:
        fully_shard(layer)
    fully_shard(model)
is_ours = fully_shard.__module__.startswith("fsdp_overlap")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank + 10 * (fault == "seed" and is_ours and rank == 1))
for _ in range(steps):
    for backward in range(2):
        loss = model(torch.randn(8, 32)).square().mean()
        if fault != "no backward":
            loss.backward()
        if fault == "missing" and is_ours and not backward:
            model[1].weight.grad = None
    if fault == "raises" and is_ours:
        raise RuntimeError("a fault in the program")
    if fault not in ("no step", "no backward"):
        optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
