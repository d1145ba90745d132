"""Units that are planned together are balanced, and each is planned alone otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_overlap import (
    Flat,
    FsdpContext,
    QuantizedCommPolicy,
    RaggedDTensor,
    TensorAtomic,
    fully_shard,
    fully_shard_model,
)
from fsdp_overlap.layout import ParamSpec
from fsdp_overlap.layout.balanced_planner import BalancedPlanner
from fsdp_overlap.layout.plan import Planner, rollback_on_error
from fsdp_overlap.optim import Muon
from support.fake_group import run_on_fake_group
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
    return [param_group.plan for unit in ctx.units for param_group in unit.param_groups]


def balance(ranks: int) -> None:
    layout = TensorAtomic(split=("head.weight",))
    together = FsdpContext(layout=layout)
    with CommDebugMode() as issued:
        model = fully_shard_model(deep(), together)
    assert issued.get_total_counts() == 0
    alone = FsdpContext(layout=layout)
    shard_layers(one_by_one := deep(), alone)
    explicit = FsdpContext(layout=layout)
    explicit.plan_layout([*(planned := deep()).layers, planned])
    shard_layers(planned, explicit)
    assert plans_of(together) == plans_of(explicit) != plans_of(alone)
    assert largest_work(model, ranks) < largest_work(one_by_one, ranks)
    fully_shard(single := deep(), FsdpContext(layout=layout))  # one unit, which is even by itself
    assert largest_work(model, ranks) <= largest_work(single, ranks) + 1e-9
    for each in (model, one_by_one):
        for (name, mine), its in zip(each.named_parameters(), deep().parameters(), strict=True):
            assert isinstance(mine, RaggedDTensor)
            same(mine.full_tensor().detach(), its.detach(), name)


def test_units_that_are_planned_together_are_balanced() -> None:
    run_ranks(balance, 4, 4)


def with_options() -> None:
    """What a unit of one call gets, every unit of :func:`fully_shard_model` gets."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    options: list[dict[str, Any]] = [
        {"mesh": grid["b"], "reshard_after_forward": False},
        {"ignored_params": {"head.weight"}},
        {"comm_policy": QuantizedCommPolicy(gather_dtype=torch.float8_e4m3fn, block=(1, 2))},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ]
    for given in options:
        models = [deep().float(), deep().float()]
        contexts = [FsdpContext(), FsdpContext()]
        for model, ctx, shard in zip(models, contexts, (shard_layers, shard_whole), strict=True):
            own = dict(given)
            if names := own.get("ignored_params"):
                own["ignored_params"] = {model.get_parameter(name) for name in names}
            shard(model, ctx, **own)
        mine, its = ([(unit.mesh, unit.mp_policy) for unit in ctx.units] for ctx in contexts)
        assert mine == its
        assert plans_of(contexts[0]) == plans_of(contexts[1])
    model = fully_shard_model(deep(), mesh=grid["b"])
    assert {unit.mesh for unit in unit_context(model).units} == {grid["b"]}
    layers = (model := deep()).layers
    fully_shard_model(model, ctx := FsdpContext(), units=[[layers[0], layers[1]], layers[2]])
    assert [unit.modules for unit in ctx.units] == [[*layers[:2]], [layers[2]], [model]]


def shard_whole(model: Any, ctx: FsdpContext, **options: Any) -> None:
    assert fully_shard_model(model, ctx, **options) is model


def unit_context(model: Any) -> FsdpContext:
    return model._fsdp_unit.context


def test_options_of_fully_shard_model_are_those_of_fully_shard() -> None:
    run_on_fake_group(with_options, 4)


def train(options: dict[str, Any]) -> None:
    twins = Twins(
        deep, shard_whole, optimizer=Muon, layout=TensorAtomic(), ns_dtype=torch.double, **options
    )
    twins.train(2)


@pytest.mark.parametrize("options", [{}, COPIES, {**COPIES, "shard_optimizer_over_replicas": True}])
def test_training_equals_unsharded_training(options: dict[str, Any]) -> None:
    run_ranks(train, 4, options)


def from_meta() -> None:
    with torch.device("meta"):
        model = Growing().double()
    fully_shard_model(model, FsdpContext(layout=TensorAtomic()))
    model.to_empty(device="cpu")
    model.load_state_dict(deep().state_dict())
    for (name, mine), its in zip(model.named_parameters(), deep().parameters(), strict=True):
        assert isinstance(mine, RaggedDTensor)
        same(mine.full_tensor().detach(), its.detach(), name)
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()


def test_a_model_on_the_meta_device_is_planned_too() -> None:
    run_ranks(from_meta, 4)


def copied() -> None:
    model = fully_shard_model(deep(), FsdpContext(layout=TensorAtomic()))
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


def of_another_size() -> None:
    model = deep() if dist.get_rank() else Model(layers=8).double()
    shard_layers(model, FsdpContext(layout=TensorAtomic()))
    model(torch.zeros(1, 3, dtype=torch.int64))


def planned_ahead_by_one() -> None:
    model, ctx = deep(), FsdpContext(layout=TensorAtomic())
    if not dist.get_rank():
        ctx.plan_layout([*model.layers, model])
    shard_layers(model, ctx)
    model(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks_differ", [of_another_size, planned_ahead_by_one])
def test_ranks_that_planned_differently_are_told_at_the_first_forward(
    ranks_differ: Callable[[], None],
) -> None:
    told = r"ranks planned unit '[\w.]+' differently"
    expect_rank_errors(ranks_differ, 4, match=told, timeout=20)


def test_a_plan_that_failed_leaves_planning_as_it_was() -> None:
    plans = Planner(4, TensorAtomic(), BalancedPlanner)
    layers = [nn.Linear(32, 32, bias=False) for _ in range(8)] + [nn.Linear(64, 64, bias=False)]
    specs = [[ParamSpec("weight", tuple(each.weight.shape), torch.float32)] for each in layers]
    with suppress(KeyError), rollback_on_error([plans]):
        plans.plan_ahead([[layers[0]]], specs[:1])
        raise KeyError
    fresh = Planner(4, TensorAtomic(), BalancedPlanner)
    for layer, spec in zip(layers, specs, strict=True):
        assert not plans.has(layer)
        assert plans.plan_unit([layer], spec) == fresh.plan_unit([layer], spec)


def test_a_unit_that_could_not_be_planned_is_not_the_first() -> None:
    def layout(fqn: str, spec: ParamSpec) -> Any:
        return None if fqn == "unknown" else Flat()

    parts = [ParamSpec(name, (2**19,), torch.float32) for name in ("one", "two")]
    plans, layers = Planner(2, layout, BalancedPlanner), [nn.Linear(1, 1), nn.Linear(1, 1)]
    with pytest.raises(TypeError, match="unknown"):
        plans.plan_unit(layers[:1], [ParamSpec("unknown", (4,), torch.float32)])
    assert [plan.specs[0].piece for plan in plans.plan_unit(layers[1:], parts)] == [1, 2]


def test_what_was_planned_anywhere_counts_when_blocks_come() -> None:
    """Until then the planner keeps no loads of ranks."""
    planner, balanced = Planner(4, Flat(), BalancedPlanner), BalancedPlanner(4, Flat())
    specs = [ParamSpec("weight", (64, 30), torch.float32), ParamSpec("bias", (30,), torch.bfloat16)]
    units = [specs, specs[:1], [replace(spec, block=spec.shape[-1]) for spec in specs], specs]
    for unit in units[:2]:
        assert planner.plan([unit]) == balanced.plan([unit])
    other = planner.copy()
    for each in (planner, other):
        expected = copy.deepcopy(balanced)
        for unit in units[2:]:
            assert each.plan([unit]) == expected.plan([unit])
