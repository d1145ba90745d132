"""Ways to reduce gradients, each compared with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_overlap import fully_shard

Prepare = Callable[[Any, list[torch.Tensor]], None]


def gradients_of(
    shard: Any, mesh_shape: tuple[int, ...], prepare: Prepare
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of two microbatches, and what ``prepare``'s hooks saw."""
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
    """A hook of ours sees means, where FSDP2's may see what is still to be divided."""
    whole, _ = gradients_of(fully_shard, mesh_shape, nothing)
    _, seen = gradients_of(fully_shard, mesh_shape, hooked)
    assert len(seen) == 4  # two units, two microbatches
    total = torch.stack(seen).sum()
    dist.all_reduce(total)
    copies = mesh_shape[0] if len(mesh_shape) > 1 else 1
    torch.testing.assert_close(total / copies, sum(gradient.sum() for gradient in whole))


def in_half_precision(mesh_shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    module = fully_shard(
        nn.Linear(1, 1), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)
    )
    (module(torch.ones(1, 1)) * 40_000).backward()
    assert module.weight.grad.full_tensor().item() == 40_000
