"""The settings of Muon and AdamW in all benchmarks, and torch's own two with them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

LR = 0.02
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


OfMatrices = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MUON: OfMatrices = partial(torch.optim.Muon, lr=LR)


def torchs(model: nn.Module, of_matrices: OfMatrices = MUON) -> Callable[[], None]:
    """A step of torch's optimizers, or of another one of matrices and torch's AdamW."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    steps: list[torch.optim.Optimizer] = []
    if matrices:
        steps.append(of_matrices(matrices))
    if others:
        steps.append(torch.optim.AdamW(others, **ADAMW, fused=True))

    def step() -> None:
        for each in steps:
            each.step()

    return step
