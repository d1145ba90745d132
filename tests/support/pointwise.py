"""Point-wise ops and views, each as a function of one tensor of 5 x 3."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

POINTWISE: dict[str, Callable[[Any], Any]] = {
    "mul": lambda x: x * 2.5,
    "rsub": lambda x: 1.0 - x,
    "torch.add": lambda x: torch.add(x, x, alpha=3),
    "sqrt": lambda x: x.abs().sqrt(),
    "addcdiv": lambda x: x.addcdiv(x, x.abs() + 1.0, value=0.5),
    "lerp": lambda x: x.lerp(x * 2, 0.25),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "eq": lambda x: x == x,
    "zeros_like": torch.zeros_like,
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.bfloat16),
    "to like": lambda x: x.to(torch.zeros(7, dtype=torch.float64)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "scalar tensor": lambda x: x * torch.tensor(3.0),
    "foreach": lambda x: torch._foreach_add(torch._foreach_mul([x], 2.0), [x])[0],
    "aten": lambda x: torch.ops.aten.mul.Tensor(x, x),
    "in place": lambda x: x.clone().mul_(3).add_(1).clamp_(min=0),
    "in place operator": lambda x: operator_in_place(x.clone()),
    "out": lambda x: torch.maximum(x, x * 2, out=x.clone()),
    "whole tensor": lambda x: x + torch.arange(15.0).view(5, 3),
    "transposed tensor": lambda x: x * torch.arange(15.0).view(3, 5).t(),
    "row": lambda x: x * torch.arange(3.0),
    "column": lambda x: torch.arange(5.0)[:, None] - x,
    "masked": lambda x: x.masked_fill(x > 0, 0.5),
    "mask assigned": lambda x: assigned(x.clone(), x > 0),
    "foreach with whole tensors": lambda x: torch._foreach_mul([x], [torch.ones(5, 3) * 3])[0],
    "new_zeros": lambda x: x.new_zeros(5, 3),
    "rand_like": lambda x: (torch.manual_seed(1), torch.rand_like(x))[1],
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(3, 5),
    "row of": lambda x: x[1],
    "rows of": lambda x: x[1:4],
    "part of a row": lambda x: x[2, 1:],
    "iteration": lambda x: list(x)[3],
    "chunk": lambda x: x.chunk(2)[1],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "edited view": lambda x: edited_rows(x.clone()),
    "deepcopy": copy.deepcopy,
}


def assigned(x: Any, mask: Any) -> Any:
    x[mask] = 7.0
    x[0] = 2.0
    x[1:3] = torch.ones(2, 3)
    return x


def edited_rows(x: Any) -> Any:
    x[3:].mul_(2)
    x.view(-1)[1:5].zero_()
    return x


def operator_in_place(x: Any) -> Any:
    x += 2
    x /= 4
    return x
