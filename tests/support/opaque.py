"""Frozen weights of a class of its own, as quantized ones are, beside adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16


class Nibbles(nn.Parameter):
    """Numbers of four bits, two in a byte. The bytes may be stored as elements of a wider dtype.
    What they stand for is known with ``scales``, one for each row."""

    scales: torch.Tensor
    whole: torch.Size

    @staticmethod
    def of(weight: torch.Tensor, storage: torch.dtype) -> Nibbles:
        scales = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scales).round().add(8).to(torch.uint8).view(-1, 2)
        stored = (codes[:, 0] * 16 + codes[:, 1]).view(storage).view(-1, 1)
        parameter: Any = torch.Tensor._make_subclass(Nibbles, stored, False)
        parameter.scales, parameter.whole = scales, weight.shape
        return parameter

    @property
    def largest(self) -> torch.Tensor:
        return self.scales * 7

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        stored = self.detach().view(-1).view(torch.uint8)
        codes = torch.stack([stored // 16, stored % 16], dim=1).view(self.whole)
        return ((codes.float() - 8) * self.scales).to(dtype)


class _Product(torch.autograd.Function):
    """Backward reads the parameter, and autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Nibbles) -> torch.Tensor:  # type: ignore[override]
        ctx.weight = weight
        return F.linear(x, weight.numbers(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient @ ctx.weight.numbers(gradient.dtype), None


class FourBits(nn.Module):
    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.weight = Nibbles.of(torch.randn(WIDTH, WIDTH), storage)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scales"] = self.weight.scales


class Bytes(nn.Parameter):
    """Numbers of eight bits. ``codes`` are the same elements under a name of their own."""

    codes: torch.Tensor | None

    @staticmethod
    def of(weight: torch.Tensor) -> Bytes:
        parameter: Any = torch.Tensor._make_subclass(Bytes, weight.mul(30).to(torch.int8), False)
        parameter.codes = parameter.data
        return parameter


class EightBits(nn.Module):
    """Computes with what its first forward took from the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Bytes.of(torch.randn(WIDTH, WIDTH))
        self.state = SimpleNamespace(codes=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.codes is not None:
            self.state.codes, self.weight.codes = self.weight.codes, None
        assert self.state.codes is not None
        return F.linear(x, self.state.codes.to(x.dtype) / 30)


class PlainBytes(nn.Module):
    """The same with plain parameters, one of them for the scales."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH).mul(30).to(torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(torch.full((WIDTH, 1), 1 / 30), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scales.to(x.dtype))


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.base = base
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + self.base(x) + self.up(self.down(x))


def build(storage: torch.dtype = torch.uint8, seed: int = 1) -> Any:
    """Return blocks with frozen weights of three kinds, each with adapters."""
    torch.manual_seed(seed)
    bases = FourBits(storage), EightBits(), PlainBytes(), FourBits(storage)
    return nn.Sequential(*map(Adapted, bases))


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same on every rank: the mean over ranks is that of one, to the bit."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {name: each.grad for name, each in model.named_parameters()}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in found.items()
        if grad is not None
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return bytes that are stored as numbers may be those of a NaN."""
    return torch.equal(*(each.detach().view(-1).view(torch.uint8) for each in (one, other)))


def check_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
