"""A model whose gradients have another dtype than its parameters: sharded, by FSDP2, or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from fsdp_overlap import FsdpContext, PerTensor, TensorAtomic, fully_shard
from fsdp_overlap.layout import Flat

BF16, FP32 = torch.bfloat16, torch.float32
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
WIDTH = 6

KEPT = {"float32 of bfloat16": (BF16, FP32), "bfloat16 of float32": (FP32, BF16)}
"""The dtype of parameters, and that of their gradients."""
LAYOUTS = {"flat": Flat(), "whole": TensorAtomic(), "rows": PerTensor()}

every_dtype = pytest.mark.parametrize("kept", KEPT)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Scaled(nn.Module):
    """Autograd has a float32 gradient for ``scale``, whatever its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.scale.dtype)).float() * self.scale


class Net(nn.Module):
    """``turns``: how often the first layer runs."""

    def __init__(self, dtype: torch.dtype, turns: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Scaled() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.turns = turns
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*[self.layers[0]] * self.turns, *self.layers[1:]]:
            x = torch.tanh(layer(x)) + x
        return self.head(x.to(self.head.weight.dtype))


def set_grad_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters():
        parameter.grad_dtype = dtype


def shard_net(verb: Callable[..., Any], net: Net, **options: Any) -> Any:
    for layer in net.layers:
        verb(layer, **options)
    verb(net, **options)
    return net


def ours(net: nn.Module, layout: str = "flat", **options: Any) -> Any:
    names = ("mesh", "shard_optimizer_over_replicas")
    context = {name: options.pop(name) for name in names if name in options}
    ctx = FsdpContext(layout=LAYOUTS[layout], **context)
    return shard_net(partial(fully_shard, ctx=ctx), net, **options)  # type: ignore[arg-type]


def theirs(net: nn.Module, **options: Any) -> Any:
    return shard_net(torchs_fully_shard, net, **options)  # type: ignore[arg-type]


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).float().square().sum().backward()


def gradients(model: Any, syncs: tuple[bool, ...]) -> list[torch.Tensor]:
    for is_synced, x in zip(syncs, batches(len(syncs)), strict=True):
        model.set_requires_gradient_sync(is_synced)
        backward(model, x)
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def mean_of(gradient: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return among shards first and then across replicas, two by two, rounded to the gradient's
    dtype."""
    found = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(found, gradient)
    for _ in dims:
        found = [(one + other) / 2 for one, other in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def unsharded(
    net: nn.Module,
    grad_dtype: torch.dtype,
    reduced: torch.dtype | None,
    syncs: tuple[bool, ...],
    dims: tuple[int, ...],
) -> list[torch.Tensor]:
    """Return the gradients that torch's own autograd accumulates, reduced and cast by hand."""
    set_grad_dtype(net, reduced or grad_dtype)
    totals: dict[nn.Parameter, torch.Tensor] = {}
    for is_synced, x in zip(syncs, batches(len(syncs)), strict=True):
        backward(net, x)
        for parameter in net.parameters() if is_synced else ():
            assert parameter.grad is not None
            mean = mean_of(parameter.grad, dims).to(grad_dtype)
            totals[parameter] = totals[parameter] + mean if parameter in totals else mean
            parameter.grad = None
    return list(totals.values())


def check(found: list[torch.Tensor], expected: list[torch.Tensor], case: object) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert mine.dtype is its.dtype, case
        assert torch.equal(mine, its), case


def mesh_of(dims: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])
