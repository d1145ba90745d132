"""Weights as a plain program quantizes them: block by block, in Python's own numbers."""

from __future__ import annotations

import copy
import math
from itertools import product
from typing import Any

import torch

from fsdp_overlap import QuantizedCommPolicy
from support.twins import Twins

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def as_gathered(
    whole: torch.Tensor, policy: QuantizedCommPolicy, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return what compute in ``dtype`` sees of a parameter."""
    dtype = dtype or whole.dtype
    if whole.ndim < 2 or not whole.numel():
        return whole.to(dtype)
    matrix = whole.detach().cpu().reshape(-1, whole.shape[-1])
    rows, columns = (
        size or extent for size, extent in zip(policy.block, matrix.shape, strict=True)
    )
    result = torch.empty(matrix.shape, dtype=dtype)
    places = product(range(0, matrix.shape[0], rows), range(0, matrix.shape[1], columns))
    for row, column in places:
        place = slice(row, row + rows), slice(column, column + columns)
        result[place] = _block(matrix[place], policy, dtype)
    return result.view(whole.shape).to(whole.device)


def _block(values: torch.Tensor, policy: QuantizedCommPolicy, dtype: torch.dtype) -> torch.Tensor:
    values = values.float()
    exact = values.abs().max() / LARGEST[policy.gather_dtype]
    if not math.isfinite(exact):
        return torch.full_like(values, math.nan, dtype=dtype)
    exact = max(exact, torch.tensor(torch.finfo(torch.float32).tiny))
    if policy.powers_of_two:
        scale = torch.tensor(2.0 ** math.ceil(math.log2(exact)))
    else:
        scale = exact.to(dtype if dtype == torch.bfloat16 else torch.float32).float()
    codes = values / scale
    if policy.gather_dtype == torch.int8:
        codes = codes.round()
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(policy.gather_dtype).to(wide) * scale).to(dtype)


class Straight(torch.autograd.Function):
    """The gathered values, with gradients as if nothing had been quantized."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, policy: QuantizedCommPolicy) -> torch.Tensor:
        return as_gathered(whole, policy)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def quantize_twin(twins: Twins, policy: QuantizedCommPolicy) -> Twins:
    """Have the twin compute with quantized weights, as the model does."""
    skeleton = copy.deepcopy(twins.twin)

    def forward(*arguments: torch.Tensor) -> Any:
        weights = {
            name: parameter if name in policy.keep else Straight.apply(parameter, policy)
            for name, parameter in twins.twin.named_parameters()
        }
        return torch.func.functional_call(skeleton, weights, arguments)

    twins.twin.forward = forward
    return twins
