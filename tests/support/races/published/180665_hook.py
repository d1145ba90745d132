"""Trains residual blocks by FSDP within a host, and averages over hosts itself."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DEVICE = "cuda"
WIDTH, DEPTH, BATCH, STEPS = 32, 4, 8, 3


def main() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("hosts", "ranks"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH))
    ).to(DEVICE)
    for block in model:
        fully_shard(block, mesh=mesh["ranks"], mp_policy=policy)
    fully_shard(model, mesh=mesh["ranks"], mp_policy=policy)
    hosts = mesh.get_group("hosts")
    for module in (model, *model):
        module.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient, group=hosts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
