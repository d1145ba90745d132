"""Trains residual blocks with Megatron-FSDP, sharded over four ranks."""

import torch
from megatron_fsdp import fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

DEVICE = "cuda"
WIDTH, DEPTH, BATCH, STEPS = 64, 6, 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    mesh = init_device_mesh(DEVICE, (4, 1), mesh_dim_names=("ranks", "tensors"))
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1)).to(DEVICE)
    model, optimizer = fully_shard(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        device_mesh=mesh,
        dp_shard_dim="ranks",
        tp_dim="tensors",
        fsdp_unit_modules=[Block],
    )
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        loss = (model(x).squeeze(-1) - x.mean(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
