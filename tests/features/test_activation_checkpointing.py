"""Every kind of activation checkpointing, around units and inside them, trains as without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from fsdp_overlap import FsdpContext, fully_shard
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import (
    WIDTH,
    Block,
    CheckpointedGroupsReentrant,
    CheckpointedReentrant,
    Model,
    shard_layers,
)

SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def prefer_every_other_product() -> Any:
    """A policy with a state, as those of training programs have."""
    products = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in SAVED:
            products[ctx.is_recompute] += 1
            if products[ctx.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


selective = partial(create_selective_checkpoint_contexts, SAVED)

KINDS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "to the end": {"use_reentrant": False, "early_stop": False},
    "selective": {"use_reentrant": False, "context_fn": selective},
    "selective by a policy": {"use_reentrant": False, "context_fn": prefer_every_other_product},
}


def wrap(module: nn.Module, kind: str) -> nn.Module:
    if kind == "offloaded":
        return wrappers.offload_wrapper(module)
    options = dict(KINDS[kind])
    is_reentrant = options.pop("use_reentrant")
    impl = wrappers.CheckpointImpl
    return wrappers.checkpoint_wrapper(
        module, impl.REENTRANT if is_reentrant else impl.NO_REENTRANT, **options
    )


def shard_with(kind: str, where: str) -> Callable[[Any, FsdpContext], None]:
    def shard(model: Any, ctx: FsdpContext) -> None:
        for index, layer in enumerate(model.layers):
            if where == "inside the unit":
                layer.up = wrap(layer.up, kind)
                fully_shard(layer, ctx)
            elif where == "the unit is the wrapper":
                model.layers[index] = fully_shard(wrap(layer, kind), ctx)
            else:
                model.layers[index] = wrap(fully_shard(layer, ctx), kind)
        fully_shard(model, ctx)

    return shard


def train_wrapped(kind: str, where: str) -> None:
    Twins(Model, shard_with(kind, where)).train(2)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["inside the unit", "the unit is the wrapper", "around the unit"])
@pytest.mark.parametrize("kind", [*KINDS, "offloaded"])
def test_wrapped_modules(kind: str, where: str) -> None:
    run_ranks(train_wrapped, 2, kind, where)


class Parts(Model):
    """Pieces of the model that are no modules, and pieces within pieces."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.options: dict[str, Any] = {"use_reentrant": False}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def half(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(layers[0], x, **self.options)
            return layers[1](x).tanh()

        x = self.embedding(tokens)
        for layers in (self.layers[:2], self.layers[2:]):
            x = checkpoint(half, layers, x, **self.options)
        return checkpoint(self.head, x, **self.options)


def train_parts(options: dict[str, Any], early_stop: bool) -> None:
    twins = Twins(Parts, shard_layers)
    twins.model.options = twins.twin.options = options
    with set_checkpoint_early_stop(early_stop):
        twins.train(2)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_checkpoints_within_checkpoints(options: dict[str, Any], early_stop: bool) -> None:
    run_ranks(train_parts, 2, options, early_stop)


class Recomputed(nn.Module):
    """What is in it is recomputed by a reentrant checkpoint; with a weight that is read last in
    backward."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inside = nn.Sequential(*inside)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(torch.tanh(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=True)


class WithinEachOther(Model):
    def __init__(self) -> None:
        super().__init__()
        inner = Recomputed(Recomputed(Block()), Recomputed(Block(), Block()))
        self.layers = nn.ModuleList([Recomputed(Block(), inner, Block()), Recomputed(Block())])


def train_within_each_other(prefetch: int, innermost: bool) -> None:
    def shard(model: WithinEachOther, ctx: FsdpContext) -> None:
        others = () if innermost else tuple(model.layers[0].inside[1].inside)
        for module in reversed(list(model.layers.modules())):  # inner ones first
            if isinstance(module, (Block, Recomputed)) and module not in others:
                fully_shard(module, ctx)
        fully_shard(model, ctx)

    Twins(WithinEachOther, shard, prefetch=prefetch).train(3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("innermost", [True, False])
def test_units_within_reentrant_checkpoints_within_others(prefetch: int, innermost: bool) -> None:
    """A unit stays whole while what it encloses is recomputed, also when units before it in what
    was recomputed are yet to come; whether or not the innermost checkpoints are units."""
    run_ranks(train_within_each_other, 2, prefetch, innermost)


def gathers_ahead(model: type[Model], late: int) -> None:
    twins = Twins(model, shard_layers)
    stats = twins.ctx.stats
    tokens, targets = next(twins.batches(1))
    for expected in (late, 0):
        loss, _ = twins.losses(tokens, targets)
        stats.reset()
        loss.backward()
        assert (stats.prefetch_misses, stats.prefetches_unused) == (expected, 0), stats


@pytest.mark.parametrize(
    ("model", "late"),
    # The size of the first group of backward is not known before.
    [(CheckpointedReentrant, 0), (CheckpointedGroupsReentrant, 1)],
)
def test_units_that_are_recomputed_by_reentrant_checkpoints_are_gathered_ahead(
    model: type[Model], late: int
) -> None:
    """Already in the first backward."""
    run_on_fake_group(gathers_ahead, 2, model, late)


class SkippedBetweenCheckpoints(Model):
    """A rank may drop what the middle layer gave, and backward then comes from one reentrant
    checkpoint to the one before it at once."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + checkpoint(self.layers[0], x, use_reentrant=True)
        y = self.layers[1](x)
        if tokens[0, 0] % 2:
            x = x + y
        x = x + checkpoint(self.layers[2], x, use_reentrant=True)
        return self.head(x)


def skip_between_checkpoints() -> None:
    Twins(SkippedBetweenCheckpoints, shard_layers).train(6)


def test_a_rank_may_skip_what_lies_between_reentrant_checkpoints() -> None:
    run_ranks(skip_between_checkpoints, 3)
