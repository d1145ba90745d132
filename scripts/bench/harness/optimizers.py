"""The settings of Muon and AdamW in all benchmarks, and torch's own two with them."""

from collections.abc import Callable

import torch
from torch import nn

LR = 0.02
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


def torchs(model: nn.Module) -> Callable[[], None]:
    """A step of torch's optimizers."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    steps: list[torch.optim.Optimizer] = []
    if matrices:
        steps.append(torch.optim.Muon(matrices, lr=LR))
    if others:
        steps.append(torch.optim.AdamW(others, **ADAMW, fused=True))

    def step() -> None:
        for each in steps:
            each.step()

    return step
