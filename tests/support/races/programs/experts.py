"""A mixture of experts divided among ranks, sharded by this library over a mesh of their own, or
by FSDP2 with "fsdp2"."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard

EXPERTS, WIDTH = 8, 32

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
ranks = dist.get_world_size()
sparse = init_device_mesh("cuda", (ranks // 2, 2), mesh_dim_names=("shard", "experts"))
dense = init_device_mesh("cuda", (ranks,), mesh_dim_names=("shard",))
group = sparse.get_group("experts")


def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    return all_to_all_single_autograd(rows, received, sent, group)


class Experts(nn.Module):
    """Those of this rank, of two ranks that have all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS // 2, WIDTH, WIDTH) / WIDTH)

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(rows)
        for index, weight in enumerate(self.weight):
            (at,) = torch.where(chosen == index)
            output = output.index_copy(0, at, torch.tanh(rows[at] @ weight))
        return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort()
        rows, chosen = x[order], chosen[order]
        counts = torch.bincount(chosen // (EXPERTS // 2), minlength=2)
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts, group=group)
        sent, received = counts.tolist(), told.tolist()
        mine = torch.empty(sum(received), dtype=chosen.dtype, device=x.device)
        dist.all_to_all_single(mine, chosen % (EXPERTS // 2), received, sent, group=group)
        done = self.experts(exchange(rows, sent, received), mine)
        back = exchange(done, received, sent)
        return x + torch.zeros_like(x).index_copy(0, order, back) * weight[:, None]


torch.manual_seed(dist.get_rank())
model: Any = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, WIDTH)).cuda()
ctx = FsdpContext(dense)
for layer in model[:-1]:
    if "fsdp2" in sys.argv:
        fsdp2.fully_shard(layer.experts, mesh=sparse["shard"])
        fsdp2.fully_shard(layer, mesh=dense)
    else:
        fully_shard(layer.experts, ctx, mesh=sparse["shard"])
        fully_shard(layer, ctx)
sharded: Any = (
    fsdp2.fully_shard(model, mesh=dense) if "fsdp2" in sys.argv else fully_shard(model, ctx)
)
optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, foreach=False)
for _ in range(4):
    x = torch.randn(64, WIDTH, device="cuda")
    loss = nn.functional.mse_loss(sharded(x), x.flip(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
