"""Megatron-FSDP. Arguments choose what it uses: `python train_megatron_fsdp.py zero2 mixed`."""

import os
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron_fsdp import MixedPrecisionPolicy, fully_shard, param_and_grad_buffer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

WIDTH = 16
chosen = set(sys.argv[1:])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if "checkpoints" in chosen else layer(x)
        return self.head(x)


def shard(model: Model, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    options: dict[str, Any] = {}
    if "hybrid" in chosen:
        mesh = init_device_mesh("cuda", (2, 2, 1), mesh_dim_names=("outer", "shard", "tp"))
        options["dp_outer_dim"] = "outer"
        options["hybrid_fsdp_group"] = mesh["outer", "shard"]._flatten("both").get_group()
        options["outer_dp_sharding_strategy"] = "optim" if "outer" in chosen else "no_shard"
    else:
        mesh = init_device_mesh("cuda", (4, 1), mesh_dim_names=("shard", "tp"))
    if "mixed" in chosen:
        options["mixed_precision_policy"] = MixedPrecisionPolicy(
            main_params_dtype=torch.float32,
            main_grads_dtype=torch.float32,
            grad_comm_dtype=torch.bfloat16,
        )
    if "groups" in chosen:
        options["fsdp_group_ag"] = dist.new_group(list(range(4)))
    strategy = next((int(name[-1]) for name in chosen if name.startswith("zero")), 3)
    return fully_shard(
        module=model,
        optimizer=optimizer,
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        overlap_grad_reduce="exposed" not in chosen,
        overlap_param_gather="exposed" not in chosen,
        sync_model_each_microbatch="accumulate" not in chosen,
        fsdp_double_buffer="double" in chosen,
        preproc_state_dict_for_dcp_ckpt=False,
        **options,
    )


def train() -> None:
    model = Model().cuda()
    if "mixed" in chosen:
        model.bfloat16()
    sharded, optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if "queue" in chosen:
        sharded.suggested_RS_queue_capacity = 3000  # of reductions under way, in elements
    dtype = torch.bfloat16 if "mixed" in chosen else torch.float32
    batches = 2 if "accumulate" in chosen else 1
    for _ in range(3):
        if "sync" in chosen:
            sharded.start_param_sync(force_sync=True)
        if "pending" in chosen:
            sharded.start_param_sync()
            sharded.synchronize_param_gather()
        for index in range(batches):
            if "accumulate" in chosen:
                sharded.set_model_auto_sync(index == batches - 1)
            x = torch.randn(8, 4, WIDTH, device="cuda", dtype=dtype)
            sharded(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        sharded(torch.randn(8, 4, WIDTH, device="cuda", dtype=dtype))


def train_experimental() -> None:
    from megatron_fsdp.experimental import (
        Flat,
        Partial,
        Placements,
        Replicate,
        fully_shard,
        fully_shard_optimizer,
        microbatch,
    )

    mesh: DeviceMesh = init_device_mesh("cuda", (4,), mesh_dim_names=("shard",))
    placements = Placements(["shard"], [Flat()], [Flat()], [Flat()])
    if "hybrid" in chosen:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "shard"))
        mean = Partial(dist.ReduceOp.AVG)
        placements = Placements(
            ["outer", "shard"], [Replicate(), Flat()], [mean, Flat()], [Replicate(), Flat()]
        )
    model = Model().cuda()
    if "mixed" in chosen:
        model.bfloat16()
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh, placements, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fully_shard_optimizer(optimizer)
    dtype = torch.bfloat16 if "mixed" in chosen else torch.float32
    batches = 2 if "accumulate" in chosen else 1
    for _ in range(3):
        for index in range(batches):
            last = index == batches - 1
            with microbatch(model, last) if batches > 1 else nullcontext():
                x = torch.randn(8, 4, WIDTH, device="cuda", dtype=dtype)
                model(x.requires_grad_()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none="accumulate" not in chosen)


warnings.filterwarnings("ignore")
# It compares what all ranks say, and the others do not exist.
param_and_grad_buffer.validate_uneven_dtensor = lambda _: None
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
train_experimental() if "experimental" in chosen else train()
dist.destroy_process_group()
