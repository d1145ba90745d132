"""How gradients are reduced, as users of FSDP2 set it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.reducing import as_fsdp2, divided, hooked, in_half_precision, only_sums, sees_means
from support.zoo import Model, shard_layers


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_a_hook_sees_the_mean_and_nothing_else(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(sees_means, 3 if mesh_shape == (3,) else 4, mesh_shape)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_the_divide_factor_is_fsdp2s(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(as_fsdp2, 4, divided, mesh_shape)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_what_a_hook_edits_is_the_gradient(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(as_fsdp2, 4, hooked, mesh_shape)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_sums_are_all_that_collectives_do(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(as_fsdp2, 4, only_sums, mesh_shape)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 1)])
def test_sums_in_half_precision_do_not_overflow(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(in_half_precision, 2, mesh_shape)


def a_stream_beside_copies() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    module = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(
        ValueError, match=r"set_all_reduce_hook\(stream=...\) on a mesh \(replicate"
    ):
        module.set_all_reduce_hook(print, stream=object())


def test_a_stream_for_the_hook_is_refused_where_there_are_copies() -> None:
    run_on_fake_group(a_stream_beside_copies, 2)


def shared_and_separate() -> None:
    ctx = FsdpContext()
    model = Model()
    shard_layers(model, ctx)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    for enable in (True, False, True):
        model.set_separate_reduce_scatter_group(enable)
        model(tokens).sum().backward()
        for unit in ctx.units:
            for param_group in unit.param_groups:
                assert (param_group.groups.reduce is not param_group.groups.gather) == enable
                assert param_group.groups.gather is ctx.groups.gather


def test_reductions_can_share_the_group_of_gathers() -> None:
    run_on_fake_group(shared_and_separate, 2)


def deprecated_name() -> None:
    found = []
    for shard in (fully_shard, fsdp2.fully_shard):
        torch.manual_seed(0)
        model: Any = shard(nn.Linear(3, 3).double())
        model.set_force_sum_reduction_for_comms(True)  # FSDP2 on gloo needs it
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            model.set_reduce_scatter_divide_factor(5.0)
        model(torch.ones(2, 3).double() * dist.get_rank()).square().sum().backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    torch.testing.assert_close(*found)


def test_the_divide_factor_has_its_deprecated_name() -> None:
    run_ranks(deprecated_name, 2)
