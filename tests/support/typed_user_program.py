"""What users write, for their type checker: mypy reads this file, and ``test_types`` runs it.

A line that mypy must refuse carries ``# type: ignore``; mypy says so if it accepts that line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import pytest
import torch
from torch import nn

from fsdp_overlap import FsdpContext, FSDPModule, FsdpModule, UnshardHandle, fully_shard

WIDTH = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.epoch = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores

    def described(self, by: str) -> str:
        return f"{by}: {len(self.layers)} layers"


def readme(model: Model, batch: torch.Tensor) -> None:
    ctx = FsdpContext()  # shards over all ranks
    for block in model.layers:
        fully_shard(block, ctx)  # a unit each
    fully_shard(model, ctx)  # the parameters that are left
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    print(ctx.stats)  # what was gathered, reduced and fetched ahead


def run_readme() -> None:
    readme(Model(), torch.ones(2, WIDTH))


def returned() -> None:
    """What is returned has the verbs and what the module's own class has."""
    model = Model()
    model = fully_shard(model, FsdpContext())
    model.set_zero_stage(2)
    assert_type(model.unshard(async_op=True), UnshardHandle | None)
    assert model.described(by="it") == "it: 2 layers"
    model.epoch = model.epoch + 1
    model.head.weight.requires_grad_(False)
    model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(ValueError, match="use 1, 2 or 3"):
        model.set_zero_stage("2")  # type: ignore[arg-type]


class Training:
    """Keeps what is returned, with no annotation."""

    def __init__(self) -> None:
        self.model = fully_shard(Model(), FsdpContext())
        self.layers = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))

    def step(self, is_last: bool) -> None:
        self.model.set_requires_gradient_sync(is_last)
        self.model(self.layers(torch.ones(2, WIDTH))).sum().backward()
        assert len(self.layers) == 2
        assert self.layers[0].in_features == WIDTH
        self.model.epoch += 1

    def evaluated(self) -> Model:
        self.model.reshard()
        return self.model


def kept() -> None:
    training = Training()
    training.step(is_last=True)
    assert evaluated(training.evaluated()) == 1


def evaluated(model: Model) -> int:
    return model.epoch


def checked() -> None:
    """After ``isinstance`` both classes are known exactly."""
    model = Model()
    fully_shard(model)
    assert isinstance(model, FsdpModule)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    assert_type(model.described(by="it"), str)
    assert_type(model.layers, nn.ModuleList)
    with pytest.raises(TypeError):
        model.described()  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        model.set_zero_stages(2)  # type: ignore[operator]


def listed() -> None:
    model = Model()
    pair = fully_shard([model.norm, model.head], FsdpContext())
    assert_type(pair[0].unshard(), UnshardHandle | None)
    _, head = pair
    assert head.weight.shape == (1, WIDTH)
    head.set_modules_to_backward_prefetch(pair)
    assert pair[1] is model.head
    several: Sequence[FsdpModule] = pair
    assert len(several) == 2


def refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        fully_shard(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="pass a mesh as mesh="):
        fully_shard(Model(), FsdpContext().mesh)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="mash"):
        fully_shard(Model(), mash=FsdpContext().mesh)  # type: ignore[call-overload]
