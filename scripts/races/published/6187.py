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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

DEVICE = "cuda"
WIDTH, DEPTH, BATCH, STEPS = 64, 4, 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("hosts", "ranks"))
    placements = Placements(
        dp_axes=["hosts", "ranks"],
        parameter=[Replicate(), Flat()],
        gradient=[Partial(dist.ReduceOp.AVG), Flat()],
        optimizer=[Replicate(), Flat()],
    )
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1)).to(DEVICE)
    for block in model[:-1]:
        fully_shard(block, mesh=mesh, placements=placements)
    fully_shard(model, mesh=mesh, placements=placements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fully_shard_optimizer(optimizer)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        loss = (model(x).squeeze(-1) - x.mean(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
