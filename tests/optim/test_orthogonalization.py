"""What Muon is made of: the products, the matrices of a parameter, and who orthogonalizes them."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_overlap.optim import Muon, exchange, newton_schulz
from fsdp_overlap.optim.exchange import Exchange, plan_rounds, round_elements
from fsdp_overlap.optim.matrices import (
    ShardRange,
    Split,
    flops_of,
    part_rows,
    partition_matrices,
    uncut_part_rows,
)
from fsdp_overlap.optim.newton_schulz import COEFFICIENTS, orthogonalize, polynomials
from fsdp_overlap.optim.orthogonalization import chunk_views
from fsdp_overlap.tensor.tiles import Tile
from fsdp_overlap.tools.emulator import fake_ranks
from support.emulated import run, trained

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_of_any_size_are_orthogonalized(dtype: torch.dtype) -> None:
    """Each by its own size, to the bit that of ordinary size, down to subnormal numbers."""
    steps = polynomials("quintic", 5)
    ordinary = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    [expected] = orthogonalize(ordinary[None].clone(), steps)
    [rank_one] = orthogonalize(torch.ones(1, 4, 6, dtype=dtype), steps)
    finfo = torch.finfo(dtype)
    span = int(math.log2(finfo.max)) - 2
    scales = [2.0**power for power in range(4 - span, span, 7)]
    batch = torch.stack([ordinary * scale for scale in scales])
    least = torch.full((1, 4, 6), finfo.tiny * finfo.eps, dtype=dtype)
    found = orthogonalize(torch.cat([batch, 0 * least, -least]), steps)
    assert torch.equal(found[:-2], expected.expand_as(batch))
    assert not found[-2].any()
    assert torch.equal(found[-1], -rank_one)


@pytest.mark.parametrize("eps", [1e-35, 1e-7, 1e-3, 1e25])
def test_a_norm_below_eps_is_divided_by_eps(eps: float) -> None:
    steps = polynomials("quintic", 5)
    wide = torch.randn(7, 4, 6, generator=torch.Generator().manual_seed(0))
    wide *= eps * 10.0 ** torch.arange(-3, 4).view(-1, 1, 1)
    norm = wide.double().norm(dim=(1, 2), keepdim=True)
    expected = orthogonalize(wide / norm.clamp(min=eps), steps, 1.0)
    torch.testing.assert_close(orthogonalize(wide, steps, eps), expected.float())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_that_are_not_finite_stay_in_their_matrix(value: float) -> None:
    batch = torch.ones(2, 3, 4)
    batch[0, 0, 0] = value
    found = orthogonalize(batch, polynomials("quintic", 5))
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


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
def held_matrices(draw: st.DrawFn) -> tuple[tuple[int, ...], Split, tuple[ShardRange, ...]]:
    """A parameter in tiles over its rows or columns, each cut into ranges, each of these copied."""
    shape = (
        *draw(st.sampled_from([(), (1,), (3,)])),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 8)),
    )
    rows = shape[-2]
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=3))) if rows > 1 else []
    split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True))
    dim, parts = draw(st.sampled_from([-1, -2])), draw(st.integers(1, 4))
    chunk = -(-shape[dim] // parts)
    held = []
    for number in range(parts):
        start = min(number * chunk, shape[dim])
        sizes, offsets = list(shape), [0] * len(shape)
        sizes[dim], offsets[dim] = min(chunk, shape[dim] - start), start
        tile = Tile(tuple(offsets), tuple(sizes))
        ends = sorted(draw(st.lists(st.integers(0, tile.numel), max_size=3)))
        held += [
            ShardRange(tile, a, b) for a, b in zip([0, *ends], [*ends, tile.numel], strict=True)
        ]
    copies = draw(st.integers(1, 3))
    return shape, split, tuple(held * copies)


@given(held_matrices())
@settings(max_examples=300)
def test_every_element_is_in_one_matrix_and_with_all_who_hold_it(
    held: tuple[tuple[int, ...], Split, tuple[ShardRange, ...]],
) -> None:
    shape, split, ranges = held
    whole = torch.arange(math.prod(shape)).view(shape)
    partition = partition_matrices(shape, split, ranges)
    local = [h.tile.of(whole).flatten() for h in ranges]
    parts = part_rows(shape, split)
    expected = sorted(
        tuple(part.flatten().tolist())
        for matrix in whole.view(-1, *shape[-2:])
        for part in matrix.split(parts)
    )
    found = []
    for rank, batches in partition.unshared.items():
        for batch in batches:
            assert ranges[rank].start <= batch.start <= batch.stop <= ranges[rank].stop
            values = local[rank][batch.start : batch.stop].view(batch.shape)
            found += [tuple(matrix.flatten().tolist()) for matrix in values]
    for shared in partition.shared:
        together = torch.full((shared.count * shared.rows, shared.columns), -1)
        for chunk in shared.chunks:
            for holder in chunk.ranks:
                assert ranges[holder].start <= chunk.first < chunk.last <= ranges[holder].stop
            for place, first, last in chunk_views(together, chunk):
                values = local[chunk.ranks[0]][chunk.first : chunk.last][first:last]
                assert (place == -1).all()
                place.copy_(values.view(place.shape))
        found += [tuple(m.flatten().tolist()) for m in together.view(shared.count, -1)]
    assert sorted(found) == expected


def test_a_tile_that_keeps_whole_matrices_is_whole() -> None:
    tile = Tile((0, 4, 0), (3, 4, 5))
    assert uncut_part_rows((3, 8, 5), 4, tile) == (2, 2)
    assert uncut_part_rows((3, 8, 5), (4, 3, 1), tile) == (3, 1)
    assert uncut_part_rows((3, 8, 5), 1, tile) is None
    assert uncut_part_rows((6, 4, 5), 1, Tile((3, 0, 0), (3, 4, 5))) == (4,)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 40)), min_size=1, max_size=30),
    st.integers(2, 8),
    st.integers(1, 2000),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_owners_of_cut_matrices_are_balanced(
    shapes: list[tuple[int, int]], world_size: int, round_elements: int, random: Any
) -> None:
    partitions = []
    for rows, columns in shapes:
        # Whole on one rank, then cut over two.
        size = rows * columns
        first = random.randrange(world_size - 1)
        cut = random.randint(size + 1, 2 * size - 1)
        held = [(0, 0)] * world_size
        held[first : first + 2] = (0, cut), (cut, 2 * size)
        whole = Tile((0, 0, 0), (2, rows, columns))
        ranges = tuple(ShardRange(whole, start, stop) for start, stop in held)
        partitions.append(partition_matrices((2, rows, columns), 1, ranges))
    rounds = plan_rounds(tuple(partitions), world_size, round_elements)
    placed = [assignment for assignments in rounds for assignment in assignments]
    assert sorted(assignment.parameter for assignment in placed) == list(range(len(shapes)))
    total = [0] * world_size
    for partition in partitions:
        for rank, batches in partition.unshared.items():
            total[rank] += sum(map(flops_of, batches))
    for assignment in placed:
        total[assignment.owner] += flops_of(assignment.matrices)
    # The largest first to the least loaded: nobody who got any is above another by more than one.
    largest = max(flops_of(assignment.matrices) for assignment in placed)
    for owner in {assignment.owner for assignment in placed}:
        assert total[owner] - min(total) <= largest
    for assignments in rounds:
        for owner in range(world_size):
            share = [
                assignment.matrices.numel for assignment in assignments if assignment.owner == owner
            ]
            assert len(share) <= 1 or sum(share) <= round_elements


def test_ranks_plan_rounds_by_the_type_of_their_devices() -> None:
    devices = [torch.device(name) for name in ("cuda:0", "cuda:7", "cuda")]
    assert {round_elements(device) for device in devices} == {exchange.ACCELERATOR_ROUND_ELEMENTS}
    assert round_elements(torch.device("cpu")) == exchange.ROUND_ELEMENTS
    rounds = []
    for elements in (60, exchange.ACCELERATOR_ROUND_ELEMENTS):
        with (
            fake_ranks(4),
            patch.object(exchange, "ACCELERATOR_ROUND_ELEMENTS", elements),
            patch.object(Exchange, "start", autospec=True, side_effect=Exchange.start) as start,
        ):
            run(trained(steps=1, optimizer=Muon))
        rounds.append(start.call_count)
    assert rounds[0] > rounds[1] == 1
