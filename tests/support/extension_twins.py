"""Models with tensor extensions, sharded by this library and by FSDP2, trained side by side."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from support.extensions import WIDTH, Net, parts
from support.twins import NAMES

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def both(
    kind: str = "rounded", inner: int = 16, mesh: tuple[int, ...] | None = None, **options: Any
) -> tuple[Any, Any, FsdpContext]:
    """Return one model, sharded by this library and by FSDP2."""
    torch.manual_seed(2)
    ours, theirs = Net(kind, inner), Net(kind, inner)
    theirs = copy.deepcopy(ours)
    named = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=NAMES)
    ctx = FsdpContext(named, layout=PerTensor())
    for module in (*ours.layers, ours):
        fully_shard(module, ctx, **options)
    if named is not None:
        options["mesh"] = named
    for module in (*theirs.layers, theirs):
        torchs_fully_shard(module, **options)
    return ours, theirs, ctx


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    return list(torch.randn(count, 3, WIDTH, generator=generator))


def same(ours: Any, theirs: Any, name: str) -> None:
    """Compare what a rank holds, class by class."""
    assert isinstance(ours, DTensor)
    assert isinstance(theirs, DTensor)
    assert (ours.shape, ours.stride(), ours.placements) == (
        theirs.shape,
        theirs.stride(),
        theirs.placements,
    ), name
    mine, its = ours._local_tensor, theirs._local_tensor
    assert type(mine) is type(its), (name, type(mine), type(its))
    assert mine.shape == its.shape, name
    for one, other in zip(parts(mine), parts(its), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)


def check(ours: nn.Module, theirs: nn.Module, gradients: bool = False) -> None:
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if gradients:
            same(mine.grad, its.grad, f"gradient of {name}")
        else:
            same(mine, its, name)


def train(ours: Any, theirs: Any, steps: int = 3, micro: int = 1) -> None:
    models = (ours, theirs)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in models]
    for _ in range(steps):
        for index, batch in enumerate(batches(micro)):
            losses = []
            for model in models:
                model.set_requires_gradient_sync(index == micro - 1)
                loss = model(batch).square().mean()
                loss.backward()
                losses.append(parts(loss)[0])
            torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        check(ours, theirs, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check(ours, theirs)
