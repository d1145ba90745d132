"""torch's other composable calls, on modules around units."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor

from fsdp_overlap import fully_shard
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
