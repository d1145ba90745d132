"""The settings of Muon and AdamW in all benchmarks, and torch's own two with them."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import _muon as torch_muon

LR = 0.02
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


def torchs(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """A step of torch's optimizers."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    steps: list[torch.optim.Optimizer] = []
    if matrices:
        steps.append(torch.optim.Muon(matrices, lr=LR))
    if others:
        steps.append(torch.optim.AdamW(others, **ADAMW, fused=True))
    if dtype != torch.bfloat16:
        torch_muon._zeropower_via_newtonschulz = products_in(dtype)

    def step() -> None:
        for each in steps:
            each.step()

    return step


def products_in(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """What torch's Muon calls, with its own products in another dtype than bfloat16."""

    def orthogonalize(
        grad: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
    ) -> torch.Tensor:
        a, b, c = coefficients
        is_tall = grad.size(0) > grad.size(1)
        x = grad.to(dtype).T if is_tall else grad.to(dtype)
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if is_tall else x

    return orthogonalize
