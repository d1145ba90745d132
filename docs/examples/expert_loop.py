"""A mixture of experts as a loop over those that got tokens, which are others on each rank:

    torchrun --nproc-per-node 2 docs/examples/expert_loop.py

Each expert is a conditional unit. A rank that has no tokens for an expert takes part in its
collectives, and adds zero to its gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard

WIDTH, EXPERTS, CHOSEN, TOKENS = 16, 6, 2, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    """Each token goes to ``CHOSEN`` experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(CHOSEN)
        for index in chosen.unique().tolist():
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            found = self.experts[index](x[rows]) * weights[rows, slots, None]
            x = x.index_add(0, rows, found)
        return x


def build() -> nn.Sequential:
    torch.manual_seed(0)  # every rank builds the same model
    return nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, WIDTH))


def shard(model: nn.Sequential) -> None:
    ctx = FsdpContext(init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in model:
        if isinstance(layer, Layer):
            for expert in layer.experts:
                fully_shard(expert, ctx, conditional=True)
            fully_shard(layer, ctx)
    fully_shard(model, ctx)


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Learn to reverse tokens."""
    return nn.functional.mse_loss(model(x), x.flip(1))


def run(steps: int) -> tuple[nn.Module, list[float]]:
    """Train. Return the model and the losses on this rank."""
    model = build()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return model, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(steps=201)
    dist.destroy_process_group()
