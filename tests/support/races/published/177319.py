"""Trains a mixture of experts, whose experts are sharded over fewer ranks than all else."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

DEVICE = "cuda"
WIDTH, EXPERTS, DEPTH, BATCH, STEPS = 32, 4, 4, 8, 3


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.up) @ self.down


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        return x + torch.einsum("ebw,be->bw", self.experts(y), weights)


def main() -> None:
    mesh = init_device_mesh(DEVICE, (4,), mesh_dim_names=("ranks",))
    pairs = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("experts", "ranks"))["ranks"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1)).to(DEVICE)
    for block in model[:-1]:
        own = ShardPlacementResult(Shard(1), FSDPMeshInfo(pairs, shard_mesh_dim=0))
        experts = set(block.experts.parameters())
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=lambda each, own=own, experts=experts: (
                own if each in experts else None
            ),
        )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        loss = (model(x).squeeze(-1).float() - x.mean(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
