"""A rank of a program that ends as soon as it has trained: ``python -m support.ending STORE RANK``.

It trains, gathers its parameters, takes a last step, which gathers for a forward that never comes,
and destroys its process group, with nothing in between that would give threads time to come to
rest.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import fully_shard
from fsdp_overlap.optim import AdamW

RANKS = 2
WIDTH = 512


def train(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), prefetch_next_forward=True)
    for step in range(4):
        model(torch.ones(2, WIDTH)).sum().backward()
        if step == 3:
            assert all(each.full_tensor().isfinite().all() for each in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    # Kept as globals would be: the model is freed when Python ends, and not before.
    globals()["kept"] = model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
