"""torch's other composable calls, on modules around units and in them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from support.ranks import run_ranks


def replicated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    twin = copy.deepcopy(model)
    fully_shard(model[1])
    replicate(model)
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(3, 4).double()
    for module in (model, twin):
        module(inputs).square().sum().backward()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert expected.grad is not None
        dist.all_reduce(expected.grad)
        found = parameter.grad
        if isinstance(found, DTensor):
            found = found.full_tensor()
        torch.testing.assert_close(found, expected.grad / 2)
    assert [type(each) is nn.Parameter for each in model.parameters()] == [True, True, False, False]


def test_replicate_around_a_unit_leaves_the_unit_alone() -> None:
    run_ranks(replicated, 2)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().sum().backward()
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def replicated_within(is_fsdps: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(3, 4).double()
    mesh = init_device_mesh("cpu", (2,))
    shards: list[Any] = [
        partial(fully_shard, ctx=FsdpContext(layout=PerTensor())),
        torchs_fully_shard,
    ]
    found = []
    for shard in (fully_shard, *shards):
        model: Any = copy.deepcopy(plain)
        if is_fsdps:
            replicate_by_fsdp(model[0], mesh=mesh)
        else:
            replicate(model[0])
        shard(model)
        kinds = [getattr(each, "placements", None) for each in model.parameters()]
        found.append((gradients(model, x), kinds))
    (mine, _), (rows, kinds), (theirs, their_kinds) = found
    assert kinds == their_kinds
    for each in (mine, rows):
        torch.testing.assert_close(each, theirs)


@pytest.mark.parametrize("is_fsdps", [False, True], ids=["replicate", "replicate_with_fsdp"])
def test_a_unit_leaves_modules_alone_that_are_replicated(is_fsdps: bool) -> None:
    run_ranks(replicated_within, 2, is_fsdps)


def replicated_itself() -> None:
    module = nn.Linear(4, 4)
    replicate(module)
    with pytest.raises(ValueError, match=r"replicate\(\) was called on DDPLinear.*one of the two"):
        fully_shard(module)
    assert type(module.weight) is nn.Parameter


def test_a_module_is_replicated_or_sharded() -> None:
    run_ranks(replicated_itself, 1)
