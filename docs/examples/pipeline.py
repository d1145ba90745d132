"""A pipeline of two stages, each sharded over data-parallel ranks:

    torchrun --nproc-per-node 4 docs/examples/pipeline.py

The schedule is torch's. It sees that its stages are sharded: gradients of microbatches are summed
on each rank, and each unit is reduced once a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from fsdp_overlap import FsdpContext, fully_shard

STAGES, WIDTH, BATCH, MICROBATCHES = 2, 32, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def run(steps: int) -> list[float]:
    """Trains; returns the losses on this rank, none where it does not have the last stage."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (STAGES, dist.get_world_size() // STAGES)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
    index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(index)  # ranks of one stage start from the same weights
    model = nn.Sequential(Block(), Block()).to(device)
    ctx = FsdpContext(mesh["dp"])  # one for each stage
    for block in model:
        # Without False, each microbatch gathers each block in its forward and in its backward.
        fully_shard(block, ctx, reshard_after_forward=False)
    fully_shard(model, ctx, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage = PipelineStage(model, index, STAGES, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    generator = torch.Generator().manual_seed(replica)  # other rows on each data-parallel rank
    history: list[float] = []
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH, generator=generator).to(device)
        if stage.is_last:
            losses: list[torch.Tensor] = []
            schedule.step(target=x.flip(1), losses=losses)
            history.append(torch.stack(losses).mean().item())
        else:
            schedule.step(x)
        optimizer.step()
        optimizer.zero_grad()
    return history


if __name__ == "__main__":
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    losses = run(steps=200)
    if losses:
        print(f"rank {dist.get_rank()}: loss {losses[0]:.3f}, then {losses[-1]:.3f}", flush=True)
    dist.destroy_process_group()
