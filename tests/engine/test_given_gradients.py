"""What users do to one gradient of a unit is seen by clipping and by steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard, optim
from support.ranks import run_ranks


class Around(nn.Module):
    """The outermost unit has parameters before and behind those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sharded() -> tuple[nn.Module, list[Any]]:
    """A model with gradients, and its parameters."""
    torch.manual_seed(5)
    model = Around()
    ctx = FsdpContext()
    for block in model.blocks:
        fully_shard(block, ctx)
    fully_shard(model, ctx)
    model(torch.linspace(-1, 1, 16).view(2, 8)).square().sum().backward()
    return model, list(model.parameters())


def replace(weights: list[Any]) -> None:
    weights[3].grad = weights[3].grad * 3


def drop(weights: list[Any]) -> None:
    weights[3].grad = None


def delete(weights: list[Any]) -> None:
    del weights[3].grad


def swap(weights: list[Any]) -> None:
    weights[2].grad, weights[4].grad = weights[4].grad, weights[2].grad


def point_elsewhere(weights: list[Any]) -> None:
    local = weights[3].grad.to_local()
    local.data = local * 3


def exchange_local(weights: list[Any]) -> None:
    weights[3].grad._local_tensor = weights[3].grad.to_local() * 3


def scale(weights: list[Any]) -> None:
    weights[3].grad.to_local().mul_(3)


def scale_all(weights: list[Any]) -> None:
    torch._foreach_mul_([weight.grad for weight in weights], 3)


def freeze(weights: list[Any]) -> None:
    weights[3].requires_grad_(False)


def nothing(weights: list[Any]) -> None:
    """What was given stays."""


CHANGES: list[Callable[[list[Any]], None]] = [
    *(replace, drop, delete, swap, point_elsewhere, exchange_local),
    *(scale, scale_all, freeze, nothing),
]


def clip_after(change: Callable[[list[Any]], None], norm_type: float) -> None:
    _, weights = sharded()
    change(weights)
    gradients = [each.grad.full_tensor() for each in weights if each.grad is not None]
    norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients]), norm_type)
    found = optim.clip_grad_norm_(weights, norm.item() / 2, norm_type)
    torch.testing.assert_close(found, norm)
    halves = [each.grad.full_tensor() for each in weights if each.grad is not None]
    for half, gradient in zip(halves, gradients, strict=True):
        torch.testing.assert_close(half, gradient / 2, msg=change.__name__)


def clip_after_changes() -> None:
    for change in CHANGES:
        for norm_type in (2.0, float("inf"), 1.0):
            clip_after(change, norm_type)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_sees_what_was_done_to_gradients(world_size: int) -> None:
    run_ranks(clip_after_changes, world_size)


def other_parameters() -> None:
    """Other orders, some, others between them, and copies are not taken for what was given."""
    _, weights = sharded()
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.full((3,), 2.0)
    twin = nn.Parameter(weights[3].detach(), requires_grad=False)
    twin.grad = weights[3].grad * 3
    _, weights = sharded()
    choices = [weights[:3], weights[1:5], weights[::-1], [*weights[:4], plain, *weights[4:]]]
    choices += [[weights[0], weights[0]], [twin], [nn.Parameter(torch.ones(2)), *weights]]
    for chosen in choices:
        gradients = [
            each.grad.full_tensor() if each is not plain else each.grad.clone()
            for each in chosen
            if each.grad is not None
        ]
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        torch.testing.assert_close(optim.clip_grad_norm_(chosen, 1e9), norm)


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_choice_of_parameters_is_clipped(world_size: int) -> None:
    run_ranks(other_parameters, world_size)


def stepped_without_the_model() -> None:
    """A step before, in which gradients were the user's, found out which parameters there are."""
    found = []
    for keeps_model in (True, False):
        model, weights = sharded()
        kept = [model] if keeps_model else []
        optimizer = optim.AdamW(weights, lr=0.1)
        replace(weights)
        optimizer.step()
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 16).view(2, 8)).square().sum().backward()
        del model
        optimizer.step()
        found.append([weight.full_tensor() for weight in weights])
        del kept
    for with_model, without in zip(*found, strict=True):
        assert torch.equal(with_model, without)


def test_parameters_are_stepped_when_their_model_is_gone() -> None:
    run_ranks(stepped_without_the_model, 2)
