"""The engine under every layout: the same training, the plan's ranges, checkpoints between them."""

from __future__ import annotations

import copy
from math import inf
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap import FsdpContext, RaggedDTensor, fully_shard
from fsdp_overlap.comm.collectives import RaggedTensorCollectives, TensorCollectives, choose
from fsdp_overlap.layout import BlockAtomic, Flat, ParamSpec, TensorAtomic, plan_units
from fsdp_overlap.optim import AdamW
from support.fake_group import run_on_fake_group
from support.layouts import LAYOUTS, forced_shards, train
from support.ranks import expect_rank_errors, run_ranks
from support.twins import Twins
from support.zoo import Model, shard_layers

NAMES = [
    "giant",
    "layers",
    "root only",
    "nested units",
    "tied parameters",
    "frozen and partly frozen units",
    "unused on some ranks",
    "odd parameters",
    "checkpointed",
    "recurrent",
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("whole", 3),
        ("whole", 4),
        ("padded", 3),
        ("mixed", 4),
        ("rows", 3),
        ("blocks", 3),
    ],
)
def test_training_equals_unsharded_training(layout: str, name: str, world_size: int) -> None:
    run_ranks(train, world_size, layout, name)


def uncut(fqn: str, spec: ParamSpec) -> BlockAtomic | TensorAtomic:
    return TensorAtomic() if spec.ndim == 2 and "embedding" not in fqn else BlockAtomic(rows=1000)


def train_forced(padding: float, tensor_collectives: bool) -> None:
    """With shards that are equal at any cost, or never."""
    with forced_shards(padding, tensor_collectives):
        twins = Twins(Model, shard_layers, layout=uncut)
        plans = [param_group.plan for unit in twins.ctx.units for param_group in unit.param_groups]
        assert all(plan.is_equal for plan in plans) == (padding > 0)
        twins.train(3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_and_ragged_shards_train_alike(world_size: int) -> None:
    run_ranks(train_forced, world_size, 1e9, False)
    run_ranks(train_forced, world_size, 1e9, True)
    run_ranks(train_forced, world_size, -1.0, False)


def travels_plainly() -> None:
    model = Model()
    ctx = FsdpContext(layout=TensorAtomic(max_padding=inf))
    shard_layers(model, ctx)
    plans = [param_group.plan for unit in ctx.units for param_group in unit.param_groups]
    assert any(plan.padding for plan in plans)
    for plan in plans:
        assert isinstance(choose(dist.group.WORLD, "cuda", plan), TensorCollectives)
    ragged = plan_units([[ParamSpec("w", (8, 8), torch.float32)]], 3, TensorAtomic())[0]
    assert isinstance(choose(dist.group.WORLD, "cuda", ragged), RaggedTensorCollectives)


def test_equal_shards_on_request_take_the_plain_collectives() -> None:
    run_on_fake_group(travels_plainly, 3)


def low_precision(layout: str) -> None:
    """Ranks that hold nothing of a param group take part with its dtypes: bf16 parameters,
    gradients reduced in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    twin = copy.deepcopy(model)
    ctx = FsdpContext(layout=LAYOUTS[layout])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, ctx, mp_policy=policy)
    fully_shard(model, ctx, mp_policy=policy)
    x = torch.randn(4, 8)
    model(x).float().square().mean().backward()
    twin.to(torch.bfloat16)(x.to(torch.bfloat16)).float().square().mean().backward()
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(
            mine.grad.full_tensor(), expected.grad.float(), rtol=2e-2, atol=1e-4
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_hold_nothing_take_part_in_low_precision(layout: str) -> None:
    run_ranks(low_precision, 4, layout)


def follows_the_plan(layout: str, ahead: bool) -> None:
    model = Model()
    ctx = FsdpContext(layout=LAYOUTS[layout])
    units = [*model.layers, model]
    in_layers = {id(p) for layer in model.layers for p in layer.parameters()}
    specs = [
        [
            ParamSpec(name, tuple(p.shape), p.dtype, True, "embedding" in name)
            for name, p in unit.named_parameters()
            if unit is not model or id(p) not in in_layers
        ]
        for unit in units
    ]
    if ahead:
        ctx.plan_layout(units)
    for unit in units:
        fully_shard(unit, ctx)
    expected = plan_units(specs, dist.get_world_size(), LAYOUTS[layout])
    plans = [param_group.plan for unit in ctx.units for param_group in unit.param_groups]
    if ahead or layout == "flat":
        assert plans == expected
    rank = dist.get_rank()
    for unit, plan in zip(units, plans, strict=True):
        for name, parameter in unit.named_parameters():
            if name in (spec.fqn for spec in plan.specs):
                assert isinstance(parameter, RaggedDTensor)
                held = [(a, b) for owner, a, b in plan.ranges(name) if owner == rank]
                assert parameter.local_range == (held[0] if held else (0, 0))
                if layout == "whole" and parameter.dim() == 2 and "embedding" not in name:
                    assert parameter.to_local().numel() in (0, parameter.numel())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "rows"])
def test_units_lie_as_plan_units_says(layout: str, ahead: bool) -> None:
    run_ranks(follows_the_plan, 3, layout, ahead)


def planned_otherwise() -> None:
    model = Model()
    ctx = FsdpContext(layout=TensorAtomic())
    ctx.plan_layout([model.layers[0], model])
    fully_shard(model.layers[0], ctx)
    fully_shard(model.layers[1], ctx)
    with pytest.raises(
        ValueError, match=r"Model was planned with other parameters \(layers.1.down"
    ):
        fully_shard(model, ctx)
    assert not any(isinstance(p, RaggedDTensor) for p in model.head.parameters())
    for units in ([model.layers[0]], [model], [model.layers[2], model.layers[2]]):
        with pytest.raises(ValueError, match=r"planned already|given a module twice"):
            ctx.plan_layout(units)


def test_a_unit_must_own_what_was_planned() -> None:
    run_on_fake_group(planned_otherwise, 2)


def plans_differ(kind: str) -> None:
    model = Model()
    rank = dist.get_rank()
    if kind == "layout":
        ctx = FsdpContext(layout=TensorAtomic() if rank else Flat(), validate_layouts=True)
    else:
        ctx = FsdpContext(validate_layouts=True)
    if kind == "units" and rank:
        fully_shard(model.layers[1], ctx)
    shard_layers_left(model, ctx)
    model(torch.zeros(1, 2, dtype=torch.int64))


def shard_layers_left(model: Model, ctx: FsdpContext) -> None:
    fully_shard(model.layers[0], ctx)
    fully_shard(model, ctx)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("layout", r"unit 'layers.0' \(Block\) has other .* on rank 0 than on rank 1"),
        ("units", r"where rank 0 has unit 'layers.0' \(Block\), rank 1 has 'layers.1'"),
    ],
)
def test_different_plans_are_found_by_name(kind: str, message: str) -> None:
    expect_rank_errors(plans_differ, 2, kind, match=f"ranks planned differently: {message}")


def one_rank_plans_otherwise() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model()
    ctx = FsdpContext(
        mesh, layout=TensorAtomic() if dist.get_rank() == 3 else Flat(), validate_layouts=True
    )
    shard_layers_left(model, ctx)
    model(torch.zeros(1, 2, dtype=torch.int64))


def test_every_rank_of_a_mesh_with_copies_finds_the_one_that_plans_otherwise() -> None:
    expect_rank_errors(one_rank_plans_otherwise, 4, match="on rank 0 than on rank 3")


def equal_plans() -> None:
    model = Model()
    ctx = FsdpContext(layout=TensorAtomic(), validate_layouts=True)
    shard_layers(model, ctx)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()


def test_equal_plans_pass_the_check() -> None:
    run_ranks(equal_plans, 3)


def copied() -> None:
    """A copy lies as its original does, although the planner that it has knows no other unit."""
    twins = Twins(Model, shard_layers, layout=TensorAtomic())
    twins.train(1)
    duplicate = copy.deepcopy(twins.model)
    for mine, its in zip(twins.model.parameters(), duplicate.parameters(), strict=True):
        assert mine.placement == its.placement
        assert torch.equal(mine.to_local(), its.to_local())


def test_a_copied_model_keeps_its_layout() -> None:
    run_ranks(copied, 3)


def on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    ctx = FsdpContext(layout=TensorAtomic())
    ctx.plan_layout([*model.layers, model])
    shard_layers(model, ctx)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    whole = Model()
    model.load_state_dict(whole.state_dict())
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    torch.testing.assert_close(model(tokens), whole(tokens))


def test_a_meta_model_is_planned_ahead_and_filled() -> None:
    run_ranks(on_meta, 3)


def one_step(layout: str, source: str | None, target: str) -> list[torch.Tensor]:
    torch.manual_seed(1 if source is None else 2)
    model = Model()
    shard_layers(model, FsdpContext(layout=LAYOUTS[layout]))
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if source is not None:
        dcp.load(state, checkpoint_id=source)
        optimizer.load_state_dict(state["optimizer"])
    dcp.save(state, checkpoint_id=target)
    states = [s["exp_avg"].full_tensor() for s in optimizer.state_dict()["state"].values()]
    return [parameter.full_tensor().detach() for parameter in model.parameters()] + states


@pytest.mark.slow
def test_checkpoints_move_between_all_layouts(tmp_path: Path) -> None:
    source, expected = None, None
    for i, layout in enumerate([*LAYOUTS, *reversed(LAYOUTS)]):
        target = str(tmp_path / str(i))
        for found in run_ranks(one_step, 2 + i % 3, layout, source, target):
            expected = expected or found
            assert all(map(torch.equal, found, expected)), layout
        source = target
