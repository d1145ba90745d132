"""Twins on the emulated device."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_overlap.tools.emulator.nccl_like import unseen
from support.held import held_of
from support.twins import Twins, same


class Trained(Twins):
    """Twins on the emulated device. Each rank compares only what it holds, also in the last step.

    A comparison of whole tensors would gather them, which is a program of its own. The device does
    not see what the twin does, which is several times what the sharded model does.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, device="emulated", **options)

    def twin_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with unseen():
            return super().twin_loss(tokens, targets)

    def twin_backward(self, loss: torch.Tensor) -> None:
        with unseen():
            super().twin_backward(loss)

    def twin_step(self) -> None:
        with unseen():
            super().twin_step()

    def check_gradients(self, whole: bool = False) -> None:
        pairs = []
        for (name, parameter), twin in self.pairs():
            gradient: Any = parameter.grad
            if gradient is not None and twin.grad is None:
                twin.grad = torch.zeros_like(twin)
            assert (gradient is None) == (twin.grad is None), name
            if twin.grad is not None:
                pairs.append((parameter, gradient.to_local(), twin.grad))
        compare(pairs)

    def check_parameters(self, whole: bool = False) -> None:
        compare([(p, p.detach().to_local(), twin) for (_, p), twin in self.pairs()])  # type: ignore[operator]


def compare(pairs: list[tuple[Any, torch.Tensor, torch.Tensor]]) -> None:
    """Compare what a rank holds. Each pair is a parameter, what is held, and the whole tensor."""
    with unseen(), torch.no_grad():
        held = [local.flatten() for _, local, _ in pairs]
        expected = [held_of(whole, parameter) for parameter, _, whole in pairs]
        same(torch.cat(held), torch.cat(expected), "what this rank holds")
