"""How gradients are reduced, as users of FSDP2 set it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_overlap import FsdpContext, fully_shard
from support.ranks import run_ranks
from support.zoo import Model, shard_layers

Prepare = Callable[[Any, list[torch.Tensor]], None]


def gradients_of(
    shard: Any, mesh_shape: tuple[int, ...], prepare: Prepare
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of two microbatches, and what ``prepare``'s hooks saw."""
    torch.manual_seed(2)
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).double()
    seen: list[torch.Tensor] = []
    for module in (*model, model):
        shard(module, mesh=mesh)
        prepare(module, seen)
    x = torch.full((1, 8), 1.0 + dist.get_rank(), dtype=torch.double)
    for _ in range(2):
        model(x).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()], seen


def divided(module: Any, seen: list[torch.Tensor]) -> None:
    module.set_gradient_divide_factor(3.0)


def only_sums(module: Any, seen: list[torch.Tensor]) -> None:
    module.set_force_sum_reduction_for_comms(True)


def hooked(module: Any, seen: list[torch.Tensor]) -> None:
    def hook(reduced: torch.Tensor) -> None:
        seen.append(reduced.sum())
        reduced.mul_(0.5)

    module.set_all_reduce_hook(hook)


def as_fsdp2(prepare: Prepare, mesh_shape: tuple[int, ...]) -> None:
    (ours, _), (theirs, _) = (
        gradients_of(shard, mesh_shape, prepare) for shard in (fully_shard, torch_fully_shard)
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)


def nothing(module: Any, seen: list[torch.Tensor]) -> None:
    pass


def sees_means(mesh_shape: tuple[int, ...]) -> None:
    """Where FSDP2's may see what is still to be divided."""
    whole, _ = gradients_of(fully_shard, mesh_shape, nothing)
    _, seen = gradients_of(fully_shard, mesh_shape, hooked)
    assert len(seen) == 4  # two units, two microbatches
    total = torch.stack(seen).sum()
    dist.all_reduce(total)
    copies = mesh_shape[0] if len(mesh_shape) > 1 else 1
    torch.testing.assert_close(total / copies, sum(gradient.sum() for gradient in whole))


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


def in_half_precision(mesh_shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    module = fully_shard(
        nn.Linear(1, 1), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)
    )
    (module(torch.ones(1, 1)) * 40_000).backward()
    assert module.weight.grad.full_tensor().item() == 40_000


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
    run_ranks(a_stream_beside_copies, 2)


def shared_and_separate() -> None:
    ctx = FsdpContext()
    model = Model()
    shard_layers(model, ctx)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    for enable in (True, False, True):
        model.set_separate_reduce_scatter_group(enable)
        model(tokens).sum().backward()
        for unit in ctx.units:
            for bucket in unit.buckets:
                assert (bucket.groups.reduce is not bucket.groups.gather) == enable
                assert bucket.groups.gather is ctx.groups.gather


def test_reductions_can_share_the_group_of_gathers() -> None:
    run_ranks(shared_and_separate, 2)
