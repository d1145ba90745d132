"""Layouts and boxes: pure planning, so properties over many shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_overlap.layout import (
    BlockAtomic,
    Flat,
    LayoutRule,
    ParamGroupPlan,
    ParamSpec,
    TensorAtomic,
    plan_units,
)
from fsdp_overlap.layout.balance import water_level
from fsdp_overlap.layout.balanced_planner import BalancedPlanner
from fsdp_overlap.layout.layouts import layout_for
from fsdp_overlap.layout.plan import Planner
from fsdp_overlap.tensor.boxes import bounded_boxes, boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def units_of_specs(draw: st.DrawFn) -> list[list[ParamSpec]]:
    size = st.integers(0, 7) | st.integers(8, 300)
    stacks = st.tuples(st.integers(8, 60), st.integers(1, 6), st.integers(1, 6))
    shapes = st.lists(size, max_size=2).map(tuple) | SHAPES | stacks
    return [
        [
            ParamSpec(
                f"p{index}",
                shape,
                draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])),
                draw(st.booleans()),
                draw(st.booleans()),
            )
            for index, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=8)))
        ]
        for _ in range(draw(st.integers(1, 4)))
    ]


def mixed(fqn: str, spec: ParamSpec) -> Flat | BlockAtomic | TensorAtomic:
    return (Flat(), BlockAtomic(rows=2), TensorAtomic(), TensorAtomic(split=("p3",)))[
        int(fqn[1:]) % 4
    ]


LAYOUTS: list[LayoutRule] = [
    Flat(),
    BlockAtomic(rows=1),
    BlockAtomic(rows=3),
    TensorAtomic(),
    TensorAtomic(("p1",)),
    mixed,
]
PADDED = [TensorAtomic(max_padding=0.25), TensorAtomic(max_padding=inf)]
units = units_of_specs()
layouts = st.sampled_from([*LAYOUTS, *PADDED])
world_sizes = st.integers(1, 9) | st.sampled_from([16, 37])


def check_covered_once(plan: ParamGroupPlan) -> None:
    for spec in plan.specs:
        found = sorted((start, stop) for _, start, stop in plan.ranges(spec.fqn))
        assert all(start < stop for start, stop in found)
        assert sum(stop - start for start, stop in found) == spec.numel
        assert [start for start, _ in found] == [0, *(stop for _, stop in found)][: len(found)]


def check_ranges_invert_to_offsets(plan: ParamGroupPlan) -> None:
    for spec, offset in zip(plan.specs, plan.offsets, strict=True):
        for rank, start, stop in plan.ranges(spec.fqn):
            first = plan.shard_starts[rank]
            assert first <= offset + start
            assert offset + stop <= first + plan.shard_numels[rank]


def check_cuts(plan: ParamGroupPlan, layout: LayoutRule) -> None:
    for spec in plan.specs:
        block_size = layout_for(layout, spec).block_size(spec)
        inner = [stop for _, _, stop in plan.ranges(spec.fqn) if stop < spec.numel]
        assert all(stop % block_size == 0 for stop in inner)
        if (
            layout in (TensorAtomic(), *PADDED)
            and spec.ndim == 2
            and not spec.is_embedding
            and spec.numel
        ):
            assert plan.owner(spec.fqn) is not None


@settings(max_examples=300)
@given(units, world_sizes, layouts)
def test_plans_keep_what_layouts_promise(
    specs: list[list[ParamSpec]], world_size: int, layout: LayoutRule
) -> None:
    plans = plan_units(specs, world_size, layout)
    # Where the order of sets decided, or the time of day, these would differ.
    assert plans == plan_units(specs, world_size, layout)
    validate_layouts(plans, specs, world_size, layout)


@settings(max_examples=200)
@given(units, world_sizes, layouts, st.integers(1, 4))
def test_plans_made_one_by_one_keep_it_too(
    specs: list[list[ParamSpec]], world_size: int, layout: LayoutRule, copies: int
) -> None:
    planner = Planner(world_size, layout, BalancedPlanner)
    specs = [unit for unit in specs for _ in range(copies)]
    plans = [plan for unit in specs for plan in planner.plan([unit])[0]]
    validate_layouts(plans, specs, world_size, layout)


def validate_layouts(
    plans: list[ParamGroupPlan], specs: list[list[ParamSpec]], world_size: int, layout: LayoutRule
) -> None:
    names = sorted(spec.fqn for plan in plans for spec in plan.specs)
    assert names == sorted(spec.fqn for unit in specs for spec in unit)
    max_padding = max(0.01, getattr(layout, "max_padding", 0.0))
    for plan in plans:
        assert plan.world_size == world_size
        check_covered_once(plan)
        check_ranges_invert_to_offsets(plan)
        check_cuts(plan, layout)
        unit = max(8, 16 // plan.specs[0].dtype.itemsize)  # 16 bytes at least
        assert all(offset % unit == 0 for offset in plan.offsets)
        held = sum(spec.numel for spec in plan.specs)
        rounding = unit * (len(plan.specs) + world_size)
        assert 0 <= plan.padding <= max_padding * (held + rounding) + rounding
        assert plan.is_equal or layout != TensorAtomic(max_padding=inf)
        assert str(plan).count("\n") == world_size


@given(units, world_sizes)
def test_flat_is_equal_and_pads_less_than_one_alignment_per_parameter_and_rank(
    specs: list[list[ParamSpec]], world_size: int
) -> None:
    for plan in plan_units(specs, world_size, Flat()):
        assert 0 <= plan.padding < plan.specs[0].alignment * (len(plan.specs) + world_size)
        assert plan.is_equal


@given(units, world_sizes)
def test_a_bucket_has_one_dtype_and_one_trainability(
    specs: list[list[ParamSpec]], world_size: int
) -> None:
    for plan in plan_units(specs, world_size, TensorAtomic()):
        assert len({(spec.dtype, spec.requires_grad) for spec in plan.specs}) == 1


@given(units, world_sizes)
def test_a_rule_that_says_flat_for_each_is_flat(
    specs: list[list[ParamSpec]], world_size: int
) -> None:
    flat = plan_units(specs, world_size, Flat())
    assert plan_units(specs, world_size, lambda fqn, spec: Flat()) == flat


def block(width: int, kv: int, hidden: int) -> list[ParamSpec]:
    shapes = [(width, width), (kv, width), (kv, width), (width, width)]
    shapes += [(hidden, width), (hidden, width), (width, hidden)]
    matrices = [ParamSpec(f"w{i}", shape, torch.bfloat16) for i, shape in enumerate(shapes)]
    norms = [ParamSpec(f"norm{i}", (width,), torch.bfloat16) for i in range(2)]
    return [norms[0], *matrices, norms[1]]


def llama(layers: int, width: int, kv: int, hidden: int) -> list[list[ParamSpec]]:
    embedding = ParamSpec("embedding", (128_256, width), torch.bfloat16, is_embedding=True)
    head = ParamSpec("output.weight", (128_256, width), torch.bfloat16)
    return [block(width, kv, hidden)] * layers + [[embedding, head]]


def imbalance(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads)


def loads_of(plans: list[ParamGroupPlan], layout: TensorAtomic) -> tuple[list[int], list[float]]:
    """Elements and Newton-Schulz cost of each rank."""
    elements = [sum(numels) for numels in zip(*(p.shard_numels for p in plans), strict=True)]
    work = [0.0] * len(elements)
    for plan in plans:
        for spec in plan.specs:
            for rank, start, stop in plan.ranges(spec.fqn):
                work[rank] += layout.work(spec) * (stop - start) / spec.numel
    return elements, work


@pytest.mark.parametrize(
    ("layers", "width", "hidden", "world_size"),
    [(32, 4096, 14336, 8), (32, 4096, 14336, 32), (80, 8192, 28672, 64), (126, 16384, 53248, 64)],
)
def test_whole_parameters_are_balanced_over_all_units(
    layers: int, width: int, hidden: int, world_size: int
) -> None:
    layout = TensorAtomic(split=("output.weight",))
    plans = plan_units(llama(layers, width, 1024, hidden), world_size, layout)
    assert len(plans) == layers + 1
    assert sum(plan.padding for plan in plans) <= 0.01 * sum(plan.numel for plan in plans)
    elements, work = loads_of(plans, layout)
    assert imbalance(elements) <= 1.05
    assert imbalance(work) <= 1.05


def experts(stacked: bool, blocks: int = 30) -> list[list[ParamSpec]]:
    """Attention with a matrix that weighs as much as 28 experts, and 3 times 256 experts."""
    shapes: list[tuple[int, ...]] = [(96, 448), (1536, 96), (448, 1024), (2048, 32)]
    if stacked:
        shapes += [(256, 128, 448), (256, 128, 448), (256, 448, 128)]
    else:
        shapes += [(128, 448)] * 512 + [(448, 128)] * 256
    unit = [ParamSpec(f"w{i}", shape, torch.bfloat16) for i, shape in enumerate(shapes)]
    return [[ParamSpec("norm", (448,), torch.bfloat16), *unit]] * blocks


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("world_size", [3, 16, 256])
def test_experts_are_balanced_beside_attention(stacked: bool, world_size: int) -> None:
    elements, work = loads_of(
        plan_units(experts(stacked), world_size, TensorAtomic()), TensorAtomic()
    )
    assert imbalance(elements) <= 1.05
    assert imbalance(work) <= 1.05


def test_units_planned_one_by_one_are_still_spread() -> None:
    planner = Planner(8, TensorAtomic(), BalancedPlanner)
    plans = [planner.plan([block(64, 16, 224)])[0][0] for _ in range(40)]
    elements, work = loads_of(plans, TensorAtomic())
    assert imbalance(elements) <= 1.2
    assert imbalance(work) <= 1.2


def test_stacked_matrices_are_cut_between_matrices_only() -> None:
    experts = ParamSpec("experts", (10, 6, 4), torch.float32)
    plan = plan_units([[experts, ParamSpec("router", (10, 6), torch.float32)]], 4, TensorAtomic())[
        0
    ]
    assert len(plan.ranges("experts")) > 1
    assert all(start % 24 == stop % 24 == 0 for _, start, stop in plan.ranges("experts"))
    assert TensorAtomic().work(experts) == 10 * 6 * 16


def test_divisible_parameters_fill_the_gaps_that_atomic_ones_leave() -> None:
    matrices = [ParamSpec(f"w{i}", (64, 64), torch.float32) for i in range(3)]
    embedding = ParamSpec("embedding", (100, 64), torch.float32, is_embedding=True)
    plan = plan_units([[*matrices, embedding]], 4, TensorAtomic())[0]
    assert [plan.owner(matrix.fqn) is not None for matrix in matrices] == [True] * 3
    assert max(plan.shard_numels) <= 1.5 * plan.numel / 4
    assert plan.padding == 0


def test_shards_are_equal_where_that_costs_nothing_and_ragged_where_it_would() -> None:
    even = [ParamSpec(f"w{i}", (16, 16), torch.float32) for i in range(4)]
    assert plan_units([even], 2, TensorAtomic())[0].is_equal
    odd = plan_units([even[:3]], 2, TensorAtomic())[0]
    assert sorted(odd.shard_numels) == [256, 512]
    assert odd.padding == 0


def test_padding_makes_shards_equal_up_to_a_limit() -> None:
    odd = [ParamSpec(f"w{i}", (16, 16), torch.float32) for i in range(3)]
    assert not plan_units([odd], 2, TensorAtomic(max_padding=0.3))[0].is_equal
    for padding in (0.34, 1, inf):
        plan = plan_units([odd], 2, TensorAtomic(max_padding=padding))[0]
        assert plan.shard_numels == (512, 512)
        assert plan.padding == 256


def test_padding_spreads_owners_over_units() -> None:
    """Which rank is padded changes from unit to unit."""
    odd = [ParamSpec(f"w{i}", (16, 16), torch.float32) for i in range(3)]
    plans = plan_units([odd] * 4, 2, TensorAtomic(max_padding=0.5))
    assert all(plan.is_equal for plan in plans)
    _, work = loads_of(plans, TensorAtomic())
    assert imbalance(work) == 1


def test_stacks_are_cut_into_equal_shards() -> None:
    stack = ParamSpec("experts", (24, 8, 8), torch.float32)
    router = ParamSpec("router", (24, 8), torch.float32)
    plan = plan_units([[stack, router]], 7, TensorAtomic(max_padding=0.25))[0]
    assert plan.shard_numels == (256,) * 7
    assert len(plan.ranges("experts")) == 6
    assert plan.owner("router") is not None


def test_a_mix_with_padding_is_padded_as_far_as_one_of_its_layouts_allows() -> None:
    def rule(fqn: str, spec: ParamSpec) -> LayoutRule:
        return TensorAtomic(max_padding=0.5) if fqn == "w0" else TensorAtomic()

    odd = [ParamSpec(f"w{i}", (16, 16), torch.float32) for i in range(3)]
    assert plan_units([odd], 2, rule)[0].is_equal  # type: ignore[arg-type]


def test_water_rises_to_one_level() -> None:
    assert water_level([3.0, 0.0, 1.0], 3.0) == 2.0
    assert water_level([1.0, 1.0], 4.0) == 3.0
    assert water_level([5.0, 0.0], 1.0) == 1.0
    assert water_level([1.0, 1.0], 0.0) == 1.0


def test_a_plan_draws_itself() -> None:
    specs = [ParamSpec("a", (4, 8), torch.float32), ParamSpec("b", (2, 8), torch.float32)]
    plan = ParamGroupPlan(tuple(specs), (0, 32), (24, 24))
    drawn = str(plan).splitlines()
    assert drawn[0] == "2 parameters on 2 ranks, 48 elements in equal shards, 0 of them padding"
    assert drawn[1].endswith("24  a[0:24]")
    assert drawn[2].endswith("24  a[24:32], b")


def test_broken_plans_are_refused() -> None:
    a, b = (ParamSpec(name, (4,), torch.float32) for name in "ab")
    with pytest.raises(ValueError, match="b starts at 2, inside the parameter before it"):
        ParamGroupPlan((a, b), (0, 2), (8,))
    with pytest.raises(ValueError, match="the shards hold 6 elements, the parameters end at 8"):
        ParamGroupPlan((a, b), (0, 4), (3, 3))
    matrix = ParamSpec("w", (4, 4), torch.float32)
    message = r"w of shape \(4, 4\) is cut at element 8, but its layout allows cuts at multiples of"
    with pytest.raises(ValueError, match=message):
        ParamGroupPlan((matrix,), (0,), (8, 8), (16,))


def test_impossible_wishes_are_refused() -> None:
    spec = ParamSpec("w", (4, 4), torch.float32)
    with pytest.raises(ValueError, match="world_size=0 is not a number of ranks"):
        plan_units([], 0, Flat())
    with pytest.raises(ValueError, match="rows must be an int of at least 1"):
        BlockAtomic(rows=0)
    with pytest.raises(TypeError, match="split must be a tuple of names"):
        TensorAtomic(split="output.weight")  # type: ignore[arg-type]
    for padding in (-0.1, float("nan"), "a quarter", True):
        with pytest.raises(ValueError, match="max_padding must be a fraction of at least 0"):
            TensorAtomic(max_padding=padding)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the layout of parameter 'w' is None; use Flat"):
        plan_units([[spec]], 2, lambda fqn, spec: None)  # type: ignore[arg-type, return-value]


# ---- ranges as boxes ----


@settings(max_examples=300)
@given(SHAPES, st.data())
def test_boxes_cover_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = boxes(shape, start, stop)
    flat = torch.arange(numel).view(shape)
    covered = []
    for box in found:
        region = flat[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        covered.append(region.flatten())
        assert region.flatten().tolist() == list(range(box.start, box.start + box.numel))
    if start < stop:
        assert torch.cat(covered).tolist() == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
    else:
        assert not found


@settings(max_examples=300)
@given(SHAPES, st.integers(1, 40), st.data())
def test_bounded_boxes_are_small_and_follow_each_other(
    shape: tuple[int, ...], most: int, data: st.DataObject
) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    position = start
    for box in bounded_boxes(shape, start, stop, most):
        assert box.start == position
        assert 0 < box.numel <= most
        position += box.numel
    assert position == stop
