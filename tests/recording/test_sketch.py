"""Sketches are additive over any cut, tell any bit, and estimate distances."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_overlap.recording import sketch
from fsdp_overlap.recording.sketch import SketchBuffer, sketch_of
from fsdp_overlap.weights.chunks import Chunk

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64)


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """Draw a shape, and boxes that together are all of it."""
    shape = draw(st.sampled_from([(), (1,), (1500,), (37, 41), (2100, 3), (5, 7, 40), (3, 0, 2)]))
    boxes = [Chunk((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        low, high, first, rest = *([*box.offsets] for _ in range(2)), *([*box.sizes] for _ in "ab")
        first[dim], rest[dim], high[dim] = at, box.sizes[dim] - at, low[dim] + at
        boxes += [Chunk(tuple(low), tuple(first)), Chunk(tuple(high), tuple(rest))]
    return shape, boxes


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    return values.to(dtype)


@given(_boxes(), st.sampled_from(DTYPES))
def test_the_sum_over_any_boxes_is_the_sketch_of_the_tensor(
    cut: tuple[tuple[int, ...], list[Chunk]], dtype: torch.dtype
) -> None:
    shape, boxes = cut
    values = _values(shape, dtype)
    full = Chunk((0,) * len(shape), shape)
    buffer = SketchBuffer()
    for box in boxes:
        buffer.add(box.of(full, values), shape, box)
    total, whole = reduce(add, buffer.finish()), sketch_of(values)
    assert total.digest == whole.digest
    assert total.norm == pytest.approx(whole.norm, rel=1e-5)
    assert total.distance(whole) <= 1e-6 * whole.norm


@given(st.sampled_from([*DTYPES, torch.int8, torch.bool]), st.integers(0, 2999), st.integers(0, 63))
def test_the_digest_tells_any_bit(dtype: torch.dtype, at: int, bit: int) -> None:
    values = _values((3000,), dtype)
    changed = values.clone()
    raw = changed.view(torch.uint8)
    at_byte = at * values.element_size() + bit // 8 % values.element_size()
    raw[at_byte] ^= 1 << bit % 8
    assert sketch_of(changed).digest != sketch_of(values).digest
    assert sketch_of(values.clone()).digest == sketch_of(values).digest


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each.is_signed])
def test_the_digest_tells_signs(dtype: torch.dtype) -> None:
    values = _values((8, 1024), dtype)
    assert sketch_of(values).digest != sketch_of(-values).digest
    for row in range(1, 8):
        changed = values.clone()
        changed[0, 5], changed[row, 5] = -changed[0, 5], -changed[row, 5]
        assert sketch_of(values).digest != sketch_of(changed).digest


def test_the_digest_tells_swapped_elements_and_rows() -> None:
    values = _values((4, 1024), torch.float32)
    swapped = values.flatten()[[1, 0, *range(2, 4096)]]
    digests = {sketch_of(each).digest for each in (values, values.flip(0), swapped.view(4, 1024))}
    assert len(digests) == 3


@pytest.mark.parametrize("shape", [(1,), (40,), (5000,), (600, 700)])
@pytest.mark.parametrize("size", [1e-5, 1e-2, 1.0])
def test_the_distance_is_estimated_within_a_factor_of_two(
    shape: tuple[int, ...], size: float
) -> None:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(shape, generator=generator)
    other = values + size * torch.randn(shape, generator=generator)
    true = float((other.double() - values.double()).norm())
    assert true / 2 < sketch_of(values).distance(sketch_of(other)) < 2 * true


def test_more_tensors_than_are_summed_at_once_keep_their_order() -> None:
    tensors = [_values((1 + index % 5,), torch.float32) * index for index in range(300)]
    buffer = SketchBuffer()
    for index, each in enumerate(tensors):
        assert buffer.add(each, each.shape, Chunk((0,), tuple(each.shape))) == index
    assert buffer.finish() == [sketch_of(each) for each in tensors]
    assert buffer.finish() == []


def test_autocast_does_not_round_sums() -> None:
    values = _values((64, 64), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = sketch_of(values)
    assert cast == sketch_of(values)


def test_rows_whose_factors_are_not_kept_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3000)
    before = sketch_of(values)
    monkeypatch.setattr(sketch, "_KNOWN_ROWS", 2)
    assert sketch_of(values) == before
