"""What Muon is made of: the products, the matrices of a parameter, and who orthogonalizes them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_overlap.optim import newton_schulz
from fsdp_overlap.optim.exchange import plan_rounds
from fsdp_overlap.optim.matrices import divide, part_rows
from fsdp_overlap.optim.newton_schulz import COEFFICIENTS, orthogonalize, polynomials

# The products


@pytest.mark.parametrize(
    ("name", "steps", "low", "high"),
    [
        ("quintic", 5, 0.65, 1.21),
        ("polar_express", 5, 0.84, 1.13),
        ("polar_express", 8, 0.999, 1.001),
    ],
)
def test_presets_bring_singular_values_to_one(
    name: str, steps: int, low: float, high: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 20, 50, dtype=torch.float64, generator=generator)
    left, _, right = torch.linalg.svd(wide, full_matrices=False)
    result = orthogonalize(wide.clone(), polynomials(name, steps))
    found = torch.linalg.svdvals(result)
    assert low < found.min()
    assert found.max() < high
    # The singular vectors stay, so it is the nearest orthogonal matrix that is approached.
    torch.testing.assert_close(
        left.mT @ result @ right.mT,
        torch.diag_embed(torch.diagonal(left.mT @ result @ right.mT, dim1=1, dim2=2)),
    )


def test_polar_express_is_optimal_in_its_first_step() -> None:
    """The error is the same, and largest, at both ends of [0.001, 1] and at the extrema."""
    a, b, c = (
        k * 1.01**n for k, n in zip(COEFFICIENTS["polar_express"][0], (1, 3, 5), strict=True)
    )
    x = torch.linspace(1e-3, 1, 100_001, dtype=torch.float64)
    error = (1 - (a * x + b * x**3 + c * x**5)).abs()
    for end in (error[0], error[-1]):
        torch.testing.assert_close(end, error.max(), rtol=1e-6, atol=0)


def test_a_batch_is_as_its_matrices_one_by_one_and_zeros_stay() -> None:
    batch = torch.randn(3, 4, 6, dtype=torch.float64)
    batch[1] = 0
    steps = polynomials("quintic", 5)
    expected = torch.cat([orthogonalize(one[None].clone(), steps) for one in batch])
    torch.testing.assert_close(orthogonalize(batch.clone(), steps), expected)
    assert not expected[1].any()


def test_gram_matrices_are_not_trusted_with_coarse_products() -> None:
    wide = torch.randn(1, 8, 40)
    steps = polynomials("quintic", 5)
    segments = []

    def spy(x: torch.Tensor, segment: Any) -> torch.Tensor:
        segments.append(len(segment))
        return x

    with patch.object(newton_schulz, "_advance", spy):
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            orthogonalize(wide.clone(), steps)
        torch.set_float32_matmul_precision("highest")
        orthogonalize(wide.bfloat16(), steps)
        orthogonalize(wide[:, :, :10].contiguous(), steps)
    assert segments == [5] + [1] * 20


# Plans


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Any, tuple[tuple[int, int, int], ...]]:
    """A shape, how its matrices are split, and how ranks hold it."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    shape = (*draw(st.lists(st.integers(1, 3), max_size=2)), rows, columns)
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    split: Any = draw(st.sampled_from(divisors))
    if rows > 2 and draw(st.booleans()):
        split = (1, rows - 2, 1)
    total = torch.Size(shape).numel()
    ends = sorted(draw(st.sets(st.integers(1, total), max_size=4)) | {total})
    starts = [0, *ends[:-1]]
    return shape, split, tuple((r, a, b) for r, (a, b) in enumerate(zip(starts, ends, strict=True)))


@given(cuts())
@settings(deadline=None, max_examples=300)
def test_every_matrix_is_whole_on_one_rank_or_cut(case: Any) -> None:
    shape, split, ranges = case
    division = divide(shape, split, ranges)
    matrices = []
    for rank, stacks in division.whole.items():
        [(start, stop)] = [(a, b) for r, a, b in ranges if r == rank]
        for stack in stacks:
            assert start <= stack.start <= stack.stop <= stop
            size = stack.rows * stack.columns
            matrices += [(stack.start + i * size, stack.rows) for i in range(stack.count)]
    for cut in division.cut:
        assert len(cut.pieces) > 1
        assert sum(last - first for _, first, last in cut.pieces) == cut.stack.numel
        matrices.append((cut.stack.start, cut.stack.rows))
    expected = []
    start = 0
    while start < torch.Size(shape).numel():
        for rows in part_rows(shape, split):
            expected.append((start, rows))
            start += rows * shape[-1]
    assert sorted(matrices) == expected


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 40)), min_size=1, max_size=30),
    st.integers(2, 8),
    st.integers(1, 2000),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=100)
def test_owners_of_cut_matrices_are_balanced(
    shapes: list[tuple[int, int]], world_size: int, round_elements: int, random: Any
) -> None:
    divisions = []
    for rows, columns in shapes:
        # Whole on one rank, then cut over two.
        size = rows * columns
        first = random.randrange(world_size - 1)
        cut = random.randint(size + 1, 2 * size - 1)
        ranges = ((first, 0, cut), (first + 1, cut, 2 * size))
        divisions.append(divide((2, rows, columns), 1, ranges))
    rounds = plan_rounds(tuple(divisions), world_size, round_elements)
    placed = [parcel for parcels in rounds for parcel in parcels]
    assert sorted(parcel.parameter for parcel in placed) == list(range(len(shapes)))
    total = [0] * world_size
    for division in divisions:
        for rank, stacks in division.whole.items():
            total[rank] += sum(stack.work for stack in stacks)
    for parcel in placed:
        total[parcel.owner] += parcel.matrix.stack.work
    # The largest first to the least loaded: nobody who got any is above another by more than one.
    largest = max(parcel.matrix.stack.work for parcel in placed)
    for owner in {parcel.owner for parcel in placed}:
        assert total[owner] - min(total) <= largest
    for parcels in rounds:
        for owner in range(world_size):
            share = [parcel.matrix.stack.numel for parcel in parcels if parcel.owner == owner]
            assert len(share) <= 1 or sum(share) <= round_elements
