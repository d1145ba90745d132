"""Residual blocks, and how the programs beside this train them with Megatron-FSDP."""

import torch
from torch import nn

WIDTH, BATCH, STEPS = 64, 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model(depth: int) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(depth)), nn.Linear(WIDTH, 1)).cuda()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device="cuda")
        loss = (model(x).squeeze(-1) - x.mean(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
