"""Trains a classifier with HSDP on two hosts of two ranks, in bfloat16 over float32 parameters."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DEVICE = "cuda"
WIDTH, DEPTH, CLASSES, BATCH, STEPS = 32, 4, 8, 8, 3


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = Classifier().to(DEVICE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        labels = torch.randint(CLASSES, (BATCH,), device=DEVICE)
        nn.functional.cross_entropy(model(x).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
