"""Runs a claim on simulated ranks, and compares a model with its unsharded twin there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness import simulated_ranks, simulated_training
from support.ranks import run_ranks
from support.twins import loss_of
from support.zoo import ROWS, VOCABULARY

WORLD = 4


def simulate(claim: Callable[..., Any], device: str, *args: Any) -> Any:
    """Run `claim(device, link, *args)` on rank 0 of `WORLD` simulated ranks, in a process of its
    own."""
    return run_ranks(_simulated, 1, claim, device, args)[0]


def _simulated(claim: Callable[..., Any], device: str, args: tuple[Any, ...]) -> Any:
    dist.destroy_process_group()  # the one real rank's
    return claim(device, simulated_ranks.start(device, WORLD), *args)


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS, 5), generator=generator)
    return tokens.to(device), targets.to(device)


def compare(model: nn.Module, twin: nn.Module, device: str) -> None:
    """Losses and gradients of two backwards of a sharded model against its unsharded twin's."""
    weights = simulated_training.true_weights(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(weights[name])
    for _ in range(2):
        tokens, targets = batch(device)
        losses = [loss_of(each(tokens), targets) for each in (model, twin)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss in losses:
            loss.backward()
    for (name, parameter), same in zip(model.named_parameters(), twin.parameters(), strict=True):
        if same.grad is None:
            # On a GPU, whether another rank has one would be known too late.
            assert parameter.grad is None or not parameter.grad.to_local().any(), name
            continue
        torch.testing.assert_close(
            parameter.grad.to_local().flatten(),
            simulated_training.own_range(parameter, same.grad),
            msg=lambda text, name=name: f"{name}: {text}",
        )
