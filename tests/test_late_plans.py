"""Units that nobody planned ahead are planned together once the unit around them is made."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import is_
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_overlap import Flat, FsdpContext, RaggedDTensor, TensorAtomic, fully_shard
from fsdp_overlap.engine.bucket import Bucket
from fsdp_overlap.engine.unit_plans import UnitPlans, all_or_none
from fsdp_overlap.layout import LayoutRule, ParamSpec
from fsdp_overlap.optim import Muon
from support.ranks import expect_rank_errors, run_ranks
from support.twins import COPIES, Twins, same
from support.zoo import WIDTH, Model, shard_layers


class Growing(Model):
    """Its last layer is the largest, which is the worst order to learn of them in."""

    def __init__(self) -> None:
        super().__init__(layers=8)
        last = self.layers[-1]
        last.up, last.down = nn.Linear(WIDTH, 60), nn.Linear(60, WIDTH)


def deep() -> Any:
    torch.manual_seed(1)
    return Growing().double()


def largest_work(model: nn.Module, ranks: int) -> float:
    """The work of the rank with the most matrices, over the mean."""
    work = [0] * ranks
    for parameter in model.parameters():
        assert isinstance(parameter, RaggedDTensor)
        if parameter.dim() == 2:
            for rank, start, stop in parameter.placement.ranges:
                work[rank] += (stop - start) * min(parameter.shape)
    return max(work) * ranks / sum(work)


def plans_of(ctx: FsdpContext) -> list[Any]:
    return [bucket.plan for unit in ctx.units for bucket in unit.buckets]


def compare_with_planning_ahead(ranks: int) -> None:
    layout = TensorAtomic(split=("head.weight",))
    models, contexts = [], []
    for is_ahead in (True, False):
        model, ctx = deep(), FsdpContext(layout=layout)
        if is_ahead:
            ctx.plan([*model.layers, model])
        shard_layers(model, ctx)
        models.append(model)
        contexts.append(ctx)
    ahead, late = models
    assert plans_of(contexts[0]) == plans_of(contexts[1])
    assert largest_work(late, ranks) == largest_work(ahead, ranks)
    fully_shard(alone := deep(), FsdpContext(layout=layout))  # one unit, which is even by itself
    assert largest_work(late, ranks) <= largest_work(alone, ranks) + 1e-9
    for (name, mine), its in zip(late.named_parameters(), deep().parameters(), strict=True):
        assert isinstance(mine, RaggedDTensor)
        same(mine.full_tensor().detach(), its.detach(), name)


def test_units_lie_as_if_they_had_been_planned_ahead() -> None:
    run_ranks(compare_with_planning_ahead, 4, 4)


def train(options: dict[str, Any]) -> None:
    twins = Twins(
        deep, shard_layers, optimizer=Muon, layout=TensorAtomic(), ns_dtype=torch.double, **options
    )
    twins.train(2)


@pytest.mark.parametrize("options", [{}, COPIES, {**COPIES, "shard_optimizer_over_replicas": True}])
def test_training_equals_unsharded_training(options: dict[str, Any]) -> None:
    run_ranks(train, 4, options)


def keep_what_was_noted() -> None:
    model = deep()
    model.layers[1].requires_grad_(False)
    for parameter in model.parameters():
        parameter.mark = tuple(parameter.shape)
    ctx = FsdpContext(layout=TensorAtomic())
    for layer in model.layers:
        fully_shard(layer, ctx)
    early = list(model.layers.parameters())
    optimizer = torch.optim.AdamW(early)
    fully_shard(model, ctx)
    moved = [one is not other for one, other in zip(early, model.layers.parameters(), strict=True)]
    assert any(moved)
    for name, parameter in model.named_parameters():
        assert parameter.mark == tuple(parameter.shape)
        assert parameter.requires_grad == ("layers.1." not in name)
    with pytest.raises(RuntimeError, match=r"made before fully_shard\(\) of a module around it"):
        optimizer.step()


def test_parameters_keep_what_was_noted_on_them_and_early_optimizers_are_told() -> None:
    run_ranks(keep_what_was_noted, 4)


def collectives_of_sharding(layout: LayoutRule, device: str, is_ahead: bool) -> int:
    with torch.device(device):
        model = Growing()
    ctx = FsdpContext(layout=layout)
    if is_ahead:
        ctx.plan([*model.layers, model])
    with CommDebugMode() as issued:
        shard_layers(model, ctx)
    return issued.get_total_counts()


@pytest.mark.parametrize(
    ("case", "communicates"),
    [
        ((TensorAtomic(), "cpu", False), True),
        ((TensorAtomic(), "cpu", True), 1),  # one number
        ((TensorAtomic(), "meta", False), 1),
        ((Flat(), "cpu", False), 0),
    ],
)
def test_shards_move_only_where_they_must(case: Sequence[Any], communicates: int | bool) -> None:
    for count in run_ranks(collectives_of_sharding, 4, *case):
        assert count > 1 if communicates is True else count == communicates


def from_meta() -> None:
    with torch.device("meta"):
        model = Growing().double()
    ctx = FsdpContext(layout=TensorAtomic())
    shard_layers(model, ctx)
    model.to_empty(device="cpu")
    model.load_state_dict(deep().state_dict())
    for (name, mine), its in zip(model.named_parameters(), deep().parameters(), strict=True):
        assert isinstance(mine, RaggedDTensor)
        same(mine.full_tensor().detach(), its.detach(), name)
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()


def test_a_model_on_the_meta_device_is_planned_late_too() -> None:
    run_ranks(from_meta, 4)


def around_a_model_that_ran() -> None:
    model = deep()
    ctx = FsdpContext(layout=TensorAtomic())
    for layer in model.layers:
        fully_shard(layer, ctx)
    x = torch.ones(2, 3, 6, dtype=torch.double)
    for layer in model.layers:
        x = layer(x)
    x.sum().backward()
    before = plans_of(ctx)
    fully_shard(model, ctx)
    assert plans_of(ctx)[: len(before)] == before


def test_nothing_moves_once_a_forward_has_run() -> None:
    run_ranks(around_a_model_that_ran, 4)


def copied() -> None:
    model = deep()
    shard_layers(model, FsdpContext(layout=TensorAtomic()))
    other = copy.deepcopy(model)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(mine, RaggedDTensor)
        assert isinstance(its, RaggedDTensor)
        assert mine.placements == its.placements
        same(mine.full_tensor().detach(), its.full_tensor().detach(), "copy")


def test_a_copy_lies_as_its_original() -> None:
    run_ranks(copied, 4)


def mixed_meshes() -> None:
    """Units of another mesh are planned among themselves."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = deep()
    ctx = FsdpContext(layout=TensorAtomic())
    for index, layer in enumerate(model.layers):
        fully_shard(layer, ctx, mesh=grid["a"] if index % 2 else None)
    fully_shard(model, ctx)
    for (name, mine), its in zip(model.named_parameters(), deep().parameters(), strict=True):
        assert isinstance(mine, RaggedDTensor)
        same(mine.full_tensor().detach(), its.detach(), name)
    assert dist.get_world_size() == 4
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()


def test_units_of_several_meshes() -> None:
    run_ranks(mixed_meshes, 4)


def replaced() -> None:
    """What a user puts in the place of a parameter is not put back."""
    model = deep()
    ctx = FsdpContext(layout=TensorAtomic())
    for layer in model.layers:
        fully_shard(layer, ctx)
    model.layers[0].state_dict()  # which changes nothing
    model.layers[2].up.weight = mine = nn.Parameter(torch.ones(18, 6, dtype=torch.double))
    fully_shard(model, ctx)
    assert model.layers[2].up.weight is mine
    with pytest.raises(RuntimeError, match="was replaced after fully_shard"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_a_parameter_that_was_replaced_is_told() -> None:
    run_ranks(replaced, 4)


def loaded_by_the_first_rank_alone() -> None:
    with torch.device("cpu" if not dist.get_rank() else "meta"):
        model = Growing()
    ctx = FsdpContext(layout=TensorAtomic())
    for layer in model.layers:
        fully_shard(layer, ctx)
    before = plans_of(ctx)
    fully_shard(model, ctx)
    assert plans_of(ctx)[: len(before)] == before


def dropped_on_all_ranks_but_one() -> None:
    ctx = FsdpContext(layout=TensorAtomic())
    first: Any = fully_shard(deep().layers[0], ctx)
    if dist.get_rank():
        del first
        gc.collect()
    assert len(ctx.units) == (not dist.get_rank())
    model = deep()
    shard_layers(model, ctx)
    for (name, mine), its in zip(model.named_parameters(), deep().parameters(), strict=True):
        assert isinstance(mine, RaggedDTensor)
        same(mine.full_tensor().detach(), its.detach(), name)


def replaced_on_one_rank() -> None:
    model, ctx = deep(), FsdpContext(layout=TensorAtomic())
    for layer in model.layers:
        fully_shard(layer, ctx)
    if not dist.get_rank():
        model.layers[2].up.weight = nn.Parameter(torch.ones(18, 6, dtype=torch.double))
    before = plans_of(ctx)
    fully_shard(model, ctx)
    assert plans_of(ctx)[: len(before)] == before


@pytest.mark.parametrize(
    "ranks_differ",
    [loaded_by_the_first_rank_alone, dropped_on_all_ranks_but_one, replaced_on_one_rank],
)
def test_nothing_moves_where_ranks_differ(ranks_differ: Callable[[], None]) -> None:
    run_ranks(ranks_differ, 4)


def of_another_size() -> None:
    """The first rank's model is even, so that this rank alone has nothing to gain."""
    shard_layers(
        deep() if dist.get_rank() else Model(layers=8).double(), FsdpContext(layout=TensorAtomic())
    )


def planned_ahead_by_one() -> None:
    model, ctx = deep(), FsdpContext(layout=TensorAtomic())
    if not dist.get_rank():
        ctx.plan([*model.layers, model])
    shard_layers(model, ctx)


@pytest.mark.parametrize(
    ("ranks_differ", "unit"),
    [(of_another_size, r"'layers\.7' \(Block\)"), (planned_ahead_by_one, r"'layers\.0' \(Block\)")],
)
def test_ranks_that_planned_differently_are_told_at_once(
    ranks_differ: Callable[[], None], unit: str
) -> None:
    told = rf"planned differently: unit {unit} has other .*layouts on rank 0 than on rank 1; every"
    expect_rank_errors(ranks_differ, 4, match=told, timeout=20)


class Lost(RuntimeError):
    """What the tests below raise."""


def failing(owner: Any, name: str, call: int) -> Any:
    """Makes the function ``name`` raise at a certain call."""
    calls, original = 0, getattr(owner, name)

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Lost("connection lost")
        return original(*args)

    return patch.object(owner, name, run)


def with_a_failing_collective(call: int) -> None:
    model, ctx = deep(), FsdpContext(layout=TensorAtomic())
    for layer in model.layers:
        fully_shard(layer, ctx)
    before, early = plans_of(ctx), list(model.layers.parameters())
    with failing(RaggedDTensor, "full_tile", call), pytest.raises(Lost):
        fully_shard(model, ctx)
    assert plans_of(ctx)[:-1] == before
    assert all(map(is_, model.layers.parameters(), early))
    for (name, mine), its in zip(model.named_parameters(), deep().parameters(), strict=True):
        assert isinstance(mine, RaggedDTensor)
        same(mine.full_tensor().detach(), its.detach(), name)
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("call", [1, 3, 30])
def test_a_collective_that_fails_leaves_everything_as_it_was(call: int) -> None:
    run_ranks(with_a_failing_collective, 4, call)


def with_a_failure_on_one_rank() -> None:
    """Once the collectives are done, nothing tells the other ranks of it."""
    model, ctx = deep(), FsdpContext(layout=TensorAtomic())
    for layer in model.layers:
        fully_shard(layer, ctx)
    if dist.get_rank() == 1:
        with failing(Bucket, "give_memory", 3), pytest.raises(Lost):
            fully_shard(model, ctx)
    else:
        fully_shard(model, ctx)
    model(torch.zeros(1, 3, dtype=torch.int64))


def test_ranks_of_which_one_did_not_move_all_are_told_at_the_first_forward() -> None:
    told = r"ranks planned unit '[\w.]+' differently"
    expect_rank_errors(with_a_failure_on_one_rank, 4, match=told, timeout=20)


def looked_at_on_one_rank() -> None:
    model, ctx = deep(), FsdpContext(layout=TensorAtomic())
    for layer in model.layers:
        fully_shard(layer, ctx)
        if not dist.get_rank():
            layer.state_dict()
    before = plans_of(ctx)
    fully_shard(model, ctx)
    assert plans_of(ctx)[: len(before)] != before


def test_ranks_plan_again_alike_whatever_one_of_them_looked_at() -> None:
    run_ranks(looked_at_on_one_rank, 4)


def test_a_plan_that_failed_leaves_late_planning_as_it_was() -> None:
    plans = UnitPlans(4, TensorAtomic())
    layers = [nn.Linear(32, 32, bias=False) for _ in range(8)] + [nn.Linear(64, 64, bias=False)]
    with suppress(KeyError), all_or_none([plans]):
        plans.plan([[layers[0]]], (), layers)
        raise KeyError
    for layer in layers:
        plans.take([layer], [ParamSpec("weight", tuple(layer.weight.shape), torch.float32)])
    found = plans.plan_again()
    assert list(found) == layers
    assert plans.plan_again() == {}  # they are even now
