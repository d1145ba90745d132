"""DistributedDataParallel on NCCL: "hook" sends gradients in half precision, "unused" leaves a
parameter out, "accumulate" reduces in every second backward."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)
        self.spare = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.norm(x if "unused" in sys.argv else self.spare(x))


local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(
    Model().cuda(),
    device_ids=[local],
    bucket_cap_mb=0.005,
    gradient_as_bucket_view="view" in sys.argv,
    find_unused_parameters="unused" in sys.argv,
)
if "hook" in sys.argv:
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    x = torch.randn(8, 32).pin_memory().to(local, non_blocking=True)
    skip = "accumulate" in sys.argv and step % 2 == 0
    with model.no_sync() if skip else nullcontext():
        loss = model(x).square().mean()
        loss.backward()
    if skip:
        continue
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"loss {mean.item():.3f}")
dist.barrier(device_ids=[local])
dist.destroy_process_group()
