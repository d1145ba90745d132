"""Megatron-FSDP from the registry. The argument is its strategy: "optim_grads", "optim" or
"no_shard", by default "optim_grads_params". "hsdp" replicates. "double" uses double buffers of
gradients, which 0.6.1 overwrites too early: a race is found."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
ranks = dist.get_world_size()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


options: dict[str, Any] = {}
if "hsdp" in sys.argv:
    mesh = init_device_mesh("cuda", (2, ranks // 2, 1), mesh_dim_names=("outer", "shard", "tp"))
    mesh[("outer", "shard")]._flatten("hsdp")
    options = {"dp_outer_dim": "outer", "hybrid_fsdp_group": mesh["hsdp"].get_group()}
else:
    mesh = init_device_mesh("cuda", (ranks, 1), mesh_dim_names=("shard", "tp"))
strategies = ("optim_grads", "optim", "no_shard")
torch.manual_seed(0)
model: Any = fully_shard_model(
    nn.Sequential(*(Block() for _ in range(4))).cuda(),
    device_mesh=mesh,
    dp_shard_dim="shard",
    tp_dim="tp",
    fsdp_unit_modules=[Block],
    zero_dp_strategy=next((each for each in strategies if each in sys.argv), "optim_grads_params"),
    fsdp_double_buffer="double" in sys.argv,
    **options,
)
optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
for _ in range(4):
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
