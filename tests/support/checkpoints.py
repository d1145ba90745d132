"""Models that train the same on any number of ranks, and go on from checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.checkpoint import SafeFileSystemReader
from fsdp_overlap.optim import AdamW
from support.zoo import Model, shard_layers

Shard = Callable[[Model], None]


def by_layers(model: Model) -> None:
    shard_layers(model, FsdpContext())


def as_one(model: Model) -> None:
    fully_shard(model, FsdpContext())


def by_pairs(model: Model) -> None:
    ctx = FsdpContext()
    fully_shard(model.embedding, ctx)
    fully_shard(model.layers[1], ctx)
    fully_shard(model, ctx)


def by_torch(model: Model) -> None:
    for layer in model.layers:
        torch_fully_shard(layer)
    torch_fully_shard(model)


def not_at_all(model: Model) -> None:
    pass


GROUPINGS: dict[str, Shard] = {
    "layers": by_layers,
    "one unit": as_one,
    "pairs": by_pairs,
    "FSDP2": by_torch,
    "not sharded": not_at_all,
}


def build(
    seed: int, shard: Shard = by_layers, optimizer: type[torch.optim.Optimizer] = AdamW
) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    shard(model)
    return model, optimizer(model.parameters(), lr=0.1 / seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same for every world size, to the bit: the first rank alone has a loss, for all."""
    ranks = dist.get_world_size()
    share = float(ranks) if dist.get_rank() == 0 else 0.0
    for step in steps:
        tokens = torch.arange(step, step + 8).view(2, 4) % 6
        (model(tokens).square().sum() * share).backward()
        if not any(isinstance(p, DTensor) for p in model.parameters()):
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return parameters and states of the optimizer by name, whole."""
    states = get_optimizer_state_dict(model, optimizer)["state"]
    found = {name: whole(p).detach().clone() for name, p in model.state_dict().items()}
    for name, state in states.items():
        found |= {f"{name} {key}": whole(value).clone() for key, value in state.items()}
    return found


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, storage_reader=SafeFileSystemReader(folder))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
