"""Groups of ranks train copies of one sharded model with torchft. A group that dies is missed for a
step, comes back, takes the weights of another and goes on:

    torchft_lighthouse --bind "[::]:29510" --min_replicas 1 &
    TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc-per-node 2 --rdzv-backend c10d \\
        --rdzv-endpoint localhost:0 docs/examples/torchft_training.py --group 0

and the same with ``--group 1``. Each torchrun is a group, with process groups of its own; between
groups torchft averages gradients. Start the torchrun of a group that died again.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, FsdpModule, fully_shard
from fsdp_overlap.optim import AdamW

WIDTH, ROWS = 16, 8


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1)).double()


def batch(step: int, group: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``[ROWS, WIDTH]`` and targets ``[ROWS, 1]``, others for each rank of each group."""
    generator = torch.Generator().manual_seed(step * 1000 + group * 100 + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.double)
    return x, x.sum(1, keepdim=True).sin()


def held(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank holds of weights and of the optimizer's state, for the same rank of another
    group, which holds the same parts."""
    return {
        name: {
            "weight": local(parameter.detach()),
            "state": {key: local(value) for key, value in optimizer.state[parameter].items()},
        }
        for name, parameter in parameters.items()
    }


def take(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, given: dict[str, Any]
) -> None:
    """Takes what :func:`held` gave on another rank."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            local(parameter.detach()).copy_(given[name]["weight"])
            state = optimizer.state[parameter]
            for key, value in given[name]["state"].items():
                if key not in state:
                    state[key] = torch.zeros_like(parameter) if value.ndim else value.clone()
                local(state[key]).copy_(value)


def local(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor; all of one that is not sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


def run(group: int, steps: int, pause: float) -> None:
    rank = dist.get_rank()
    model = build()
    ctx = FsdpContext()
    for block in model:
        fully_shard(block, ctx)
    fully_shard(model, ctx)
    # Those that are sharded: torchft asks for them on a thread of its own, while a forward may have
    # put gathered parameters in their places.
    parameters = dict(model.named_parameters())
    inner = AdamW(parameters.values(), lr=1e-2)
    between = torchft.ProcessGroupGloo(timeout=timedelta(seconds=10))
    manager = torchft.Manager(
        pg=between,
        load_state_dict=lambda given: take(parameters, inner, given),
        state_dict=lambda: held(parameters, inner),
        min_replica_size=1,
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=10),
    )
    optimizer = torchft.Optimizer(manager, inner)
    for module in model.modules():
        if isinstance(module, FsdpModule):
            # With the mean over this group, before it becomes a gradient.
            module.set_all_reduce_hook(lambda mean: manager.allreduce(mean).wait())
    while manager.current_step() < steps:
        step = manager.current_step()
        optimizer.zero_grad()  # finds out which groups there are
        x, y = batch(step, group, rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()  # if no group was lost meanwhile
        told = {
            "group": group,
            "rank": rank,
            "step": step,
            "loss": loss.item(),
            "groups": manager.num_participants(),
            "committed": manager.current_step() > step,
        }
        print(json.dumps(told) + "\n", end="", flush=True)  # as one, beside other ranks
        time.sleep(pause)
    manager.shutdown(wait=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    run(args.group, args.steps, args.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
