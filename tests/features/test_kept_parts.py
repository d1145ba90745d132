"""``reshard_after_forward=2``: neighbours keep parts from forward to backward."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.features.kept_parts import FromNeighbors
from fsdp_overlap.layout import BlockAtomic, LayoutRule, TensorAtomic
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import ZOO, Model, shard_layers


def train(name: str, layout: LayoutRule, prefetch: int) -> None:
    build, shard = ZOO[name]
    twins = Twins(build, partial(shard, reshard_after_forward=2), layout=layout, prefetch=prefetch)
    twins.train(iterations=3)
    assert parts(twins.ctx) == []


def parts(ctx: FsdpContext) -> list[torch.Tensor]:
    param_groups = [param_group for unit in ctx.units for param_group in unit.param_groups]
    kept = [
        param_group.gatherer._values
        for param_group in param_groups
        if isinstance(param_group.gatherer, FromNeighbors)
    ]
    return [values for values in kept if values is not None]


NAMES = ["layers", "unused on some ranks", "branches", "a layer that runs several times"]


@pytest.mark.parametrize("name", NAMES)
def test_training_equals_unsharded_training(name: str) -> None:
    run_ranks(train, 4, name, TensorAtomic(), 1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prefetch_changes_nothing(prefetch: int) -> None:
    run_ranks(train, 4, "layers", BlockAtomic(rows=1), prefetch)


def sharded(**options: Any) -> tuple[Model, FsdpContext]:
    model, ctx = Model(), FsdpContext()
    shard_layers(model, ctx, reshard_after_forward=2, **options)
    return model, ctx


def forward(model: Model) -> torch.Tensor:
    return model(torch.zeros(1, 1, dtype=torch.int64)).sum()


def memory() -> None:
    model, ctx = sharded()
    for _ in range(2):
        loss = forward(model)
        full = sum(
            param_group.full.nbytes for unit in ctx.units for param_group in unit.param_groups
        )
        assert sum(values.nbytes for values in parts(ctx)) == full // 2
        assert ctx.stats.current_full_buffers == 0
        loss.backward()
        assert parts(ctx) == []


def test_half_of_each_unit_is_kept_until_backward() -> None:
    run_ranks(memory, 4)


def bounds() -> None:
    for number, kept in ((1, True), (2, False)):
        model, ctx = Model(), FsdpContext()
        shard_layers(model, ctx, reshard_after_forward=number)
        loss = forward(model)
        assert ctx.stats.current_full_buffers == (len(ctx.units) if kept else 0)
        assert parts(ctx) == []
        loss.backward()
        assert ctx.stats.all_gathers == (1 if kept else 2) * len(ctx.units)


def test_one_keeps_all_and_the_number_of_all_ranks_keeps_nothing() -> None:
    run_ranks(bounds, 2)


def destinations() -> None:
    model, ctx = sharded()
    used: list[tuple[int, ...]] = []
    broadcast = dist.ProcessGroup.broadcast

    def noted(group: dist.ProcessGroup, *given: Any) -> dist.Work:
        used.append(tuple(dist.get_process_group_ranks(group)))
        return broadcast(group, *given)

    with patch.object(dist.ProcessGroup, "broadcast", noted):
        loss = forward(model)
        assert set(used) == {(0, 1, 2, 3)}
        used.clear()
        loss.backward()
    assert set(used) == {(0, 1) if dist.get_rank() < 2 else (2, 3)}
    assert ctx.stats.all_gathers == 2 * len(ctx.units)


def test_backward_gathers_from_neighbours_alone() -> None:
    run_ranks(destinations, 4)


def edited() -> None:
    """What was kept is of no use once weights were edited; an evaluation uses it up."""
    twins = Twins(Model, partial(shard_layers, reshard_after_forward=2))
    tokens, targets = next(twins.batches(1))
    twins.losses(tokens, targets)
    with torch.no_grad():
        for model in (twins.model, twins.twin):
            for parameter in model.parameters():
                parameter.mul_(0.5)
    loss, twin_loss = twins.losses(tokens, targets)
    with torch.no_grad():
        twins.check_loss(*twins.losses(tokens, targets))
    loss.backward()
    twin_loss.backward()
    twins.check_gradients()
    twins.losses(tokens, targets)
    assert parts(twins.ctx)
    twins.ctx.release_unsharded()
    assert parts(twins.ctx) == []
    twins.train(1)


def test_parts_are_never_stale() -> None:
    run_ranks(edited, 4)


class Checkpointed(Model):
    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(layer, x, use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        return y


def checkpointed() -> None:
    Twins(Checkpointed, partial(shard_layers, reshard_after_forward=2)).train(2)


def test_with_activation_checkpointing() -> None:
    run_ranks(checkpointed, 4)


def evaluation() -> None:
    model, ctx = sharded()
    with torch.no_grad():
        forward(model)
    assert parts(ctx) == []


def test_nothing_is_kept_where_no_backward_can_follow() -> None:
    run_ranks(evaluation, 4)


def refused() -> None:
    with pytest.raises(ValueError, match=r"reshard_after_forward=3: use .* or a divisor of 4"):
        fully_shard(Model(), reshard_after_forward=3)


def test_a_number_that_does_not_divide_the_ranks_is_refused() -> None:
    run_on_fake_group(refused, 4)
