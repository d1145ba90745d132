"""Layouts and boxes: pure planning, so properties over many shapes."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_overlap.layout import ALIGN_ELEMENTS, BucketPlan, Flat, ParamSpec, plan_units
from fsdp_overlap.tensor.boxes import boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> list[ParamSpec]:
    return [
        ParamSpec(
            f"p{index}",
            shape,
            draw(st.sampled_from([torch.float32, torch.bfloat16])),
            draw(st.booleans()),
        )
        for index, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=8)))
    ]


@given(specs(), st.integers(1, 9))
def test_every_element_is_covered_exactly_once(unit: list[ParamSpec], world_size: int) -> None:
    plans = plan_units([unit], world_size, Flat())
    assert sorted(spec.fqn for plan in plans for spec in plan.specs) == [s.fqn for s in unit]
    for plan in plans:
        for spec in plan.specs:
            pieces = sorted((start, stop) for _, start, stop in plan.ranges(spec.fqn))
            assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
            assert pieces[-1][1] == spec.numel
            assert all(start < stop for start, stop in pieces)


@given(specs(), st.integers(1, 9))
def test_ranges_invert_to_offsets(unit: list[ParamSpec], world_size: int) -> None:
    for plan in plan_units([unit], world_size, Flat()):
        for spec, offset in zip(plan.specs, plan.offsets, strict=True):
            for rank, start, stop in plan.ranges(spec.fqn):
                first = plan.shard_starts[rank]
                assert first <= offset + start
                assert offset + stop <= first + plan.shard_numels[rank]


@given(specs(), st.integers(1, 9))
def test_padding_is_below_one_alignment_per_parameter_and_rank(
    unit: list[ParamSpec], world_size: int
) -> None:
    for plan in plan_units([unit], world_size, Flat()):
        assert 0 <= plan.padding < ALIGN_ELEMENTS * (len(plan.specs) + world_size)
        assert len(set(plan.shard_numels)) == 1
        assert all(offset % ALIGN_ELEMENTS == 0 for offset in plan.offsets)
        assert all(start % ALIGN_ELEMENTS == 0 for start in plan.shard_starts)


@given(specs(), st.integers(1, 9))
def test_a_bucket_has_one_dtype_and_one_trainability(
    unit: list[ParamSpec], world_size: int
) -> None:
    for plan in plan_units([unit, unit], world_size, Flat()):
        assert len({(spec.dtype, spec.requires_grad) for spec in plan.specs}) == 1


def test_parameters_must_not_overlap() -> None:
    a, b = (ParamSpec(name, (4,), torch.float32) for name in "ab")
    with pytest.raises(ValueError, match="b starts at 2, inside the parameter before it"):
        BucketPlan((a, b), (0, 2), (8,))
    with pytest.raises(ValueError, match="shards hold 6 elements, the parameters end at 8"):
        BucketPlan((a, b), (0, 4), (3, 3))


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="world_size=0 is not a number of ranks; use 1 or more"):
        plan_units([], 0, Flat())


@settings(max_examples=500)
@given(SHAPES, st.data())
def test_boxes_cover_a_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    found = boxes(shape, start, stop)
    covered: list[int] = []
    for box in found:
        part = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert part.flatten().tolist() == list(range(box.start, box.start + box.numel))
        covered += part.flatten().tolist()
    assert covered == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
