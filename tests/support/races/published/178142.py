"""Trains residual blocks with FSDP1: whole parameters on each rank, kept on the host."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

DEVICE = "cuda"
WIDTH, DEPTH, BATCH, STEPS = 32, 4, 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    mesh = init_device_mesh(DEVICE, (4,))
    model = FullyShardedDataParallel(
        nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, WIDTH)),
        device_mesh=mesh,
        device_id=torch.device(DEVICE, 0),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        cpu_offload=CPUOffload(offload_params=True),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        forward_prefetch=True,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        (model(x) - x.flip(-1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
