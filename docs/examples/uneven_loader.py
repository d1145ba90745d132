"""Training on all data where ranks have different numbers of batches:

    torchrun --nproc-per-node 2 docs/examples/uneven_loader.py

No batch is dropped or repeated. A rank that has run out of batches takes part in the collectives of
the others, adds zero to gradients, and steps the optimizer as they do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from fsdp_overlap import FsdpContext, fully_shard

WIDTH, BATCH = 8, 4


def build() -> nn.Sequential:
    torch.manual_seed(0)  # every rank builds the same model
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh()),
        nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
        nn.Linear(32, 1),
    )


def shard(model: nn.Sequential) -> FsdpContext:
    ctx = FsdpContext(init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in model:
        fully_shard(layer, ctx)
    fully_shard(model, ctx)
    return ctx


def loader_of(rank: int) -> DataLoader:
    """Load what a rank has, here more on each rank than on the one before."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(10 + 7 * rank, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.prod(dim=1, keepdim=True).sign()), BATCH)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def run(epochs: int) -> tuple[nn.Module, list[float]]:
    """Train. Return the model and the losses on this rank."""
    model = build()
    ctx = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(epochs):
        for batch in ctx.until_all_done(loader_of(dist.get_rank())):
            optimizer.zero_grad()
            if batch is None:
                ctx.shadow()
            else:
                loss = loss_of(model, batch)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        if dist.get_rank() == 0 and epoch % 10 == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
    return model, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(epochs=31)
    dist.destroy_process_group()
