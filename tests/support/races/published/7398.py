"""Trains a stack of residual blocks, whose large activations wait for the backward on the host."""

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from torch import nn

DEVICE = "cuda"
WIDTH, DEPTH, BATCH, STEPS = 32, 4, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offloading = Offloading(True, x, "mlp")
        with offloading as y:
            y = self.down(nn.functional.gelu(self.up(self.norm(y))))
        return x + offloading.group_offload(y)


def main() -> None:
    dist.init_process_group("nccl")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(DEPTH))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        Offloading.init_chunk_handler(0, 1, None, 1, 0, 1.0)
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        Offloading.reset()


main()
