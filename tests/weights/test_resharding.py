"""Weights move from any placement to any other, and no more of them than must."""

from __future__ import annotations

import copy
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.tensor.boxes import boxes
from fsdp_overlap.torch_internals import StridedShard
from fsdp_overlap.weights import WeightResharder
from fsdp_overlap.weights.chunks import Chunk, full_chunk, slab, slab_count
from fsdp_overlap.weights.transfer_plan import (
    Layouts,
    Messages,
    TensorLayout,
    TransferRound,
    plan_rounds,
    plan_transfers,
)
from support.layouts import LAYOUTS
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import Model, shard_layers

SMALL = 256  # bytes of a piece, so that there are many

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@given(shapes, st.integers(1, 40))
def test_slabs_follow_each_other_and_are_small(shape: tuple[int, ...], most: int) -> None:
    values = torch.arange(prod(shape)).view(shape)
    found = [slab(shape, most, number) for number in range(slab_count(shape, most))]
    flat = torch.cat([chunk.of(full_chunk(shape), values).reshape(-1) for chunk in found])
    assert flat.tolist() == list(range(prod(shape)))
    assert all(chunk.numel <= most for chunk in found)


@st.composite
def divided(draw: Any, shape: tuple[int, ...], ranks: int) -> list[list[Chunk]]:
    """Which chunks of a tensor each rank has: ranges, of all of it or of halves along the last
    dimension, chunks along a dimension, or copies."""
    kind = draw(st.sampled_from(["ranges", "halves", "chunks", "copies"]))
    numel = prod(shape)
    if kind == "halves" and len(shape) > 1:
        half = shape[-1] // 2
        left = draw(divided((*shape[:-1], half), ranks))
        right = draw(divided((*shape[:-1], shape[-1] - half), ranks))
        offsets = (*(0,) * (len(shape) - 1), half)
        return [
            [*first, *(chunk.moved(offsets) for chunk in others)]
            for first, others in zip(left, right, strict=True)
        ]
    if kind == "ranges" or not shape:
        cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1)))
        ends = zip([0, *cuts], [*cuts, numel], strict=True)
        found = [[Chunk(b.offsets, b.sizes) for b in boxes(shape, *end)] for end in ends]
        return draw(st.permutations(found))
    if kind == "copies":
        has = draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks).filter(any))
        return [[full_chunk(shape)] if numel and each else [] for each in has]
    dim = draw(st.integers(0, len(shape) - 1))
    step = -(-shape[dim] // ranks)
    found = []
    for rank in range(ranks):
        first, last = (min(shape[dim], k * step) for k in (rank, rank + 1))
        chunk = Chunk(
            tuple(first if d == dim else 0 for d in range(len(shape))),
            tuple(last - first if d == dim else size for d, size in enumerate(shape)),
        )
        found.append([chunk] if chunk.numel else [])
    return found


@st.composite
def exchanges(draw: Any) -> tuple[int, Layouts, Layouts, int]:
    ranks = draw(st.integers(1, 4))
    has: dict[str, Any] = {}
    wants: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        for sides in (has, wants):
            dtype = draw(st.sampled_from([torch.float32, torch.float64]))
            lies = dict(enumerate(map(tuple, draw(divided(shape, ranks)))))
            if draw(st.booleans()):  # all ranks tell the same, or each what it has
                told = [(TensorLayout(shape, dtype, lies), [*range(ranks)])]
            else:
                told = [(TensorLayout(shape, dtype, {rank: lies[rank]}), [rank]) for rank in lies]
            sides[f"w{number}"] = told
    return ranks, has, wants, draw(st.integers(1, 400))


def chunks_on(rank: int, sides: Layouts, name: str) -> tuple[Chunk, ...]:
    return tuple(
        chunk
        for side, ranks in sides[name]
        for _, chunks in side.on([rank] if rank in ranks else [])
        for chunk in chunks
    )


@given(exchanges())
def test_everyone_gets_what_it_wants_and_messages_are_small(
    exchange: tuple[int, Layouts, Layouts, int],
) -> None:
    ranks, has, wants, most = exchange
    tensors = plan_transfers(has, wants, ranks, strict=True, unique_names=True)
    got: list[dict[str, list[Chunk]]] = [{name: [] for name in has} for _ in range(ranks)]
    rounds = plan_rounds(tensors, most)
    for each in rounds:
        messages = [each.messages(me) for me in range(ranks)]
        check_messages(each, messages, has, most)
        for rank, mine in enumerate(messages):
            for part in [*mine.own, *(part for parts in mine.receives.values() for part in parts)]:
                got[rank][part.name].append(part.chunk)
    for name in has:
        shape = has[name][0][0].shape
        values = torch.arange(prod(shape), dtype=torch.float64).view(shape)
        for rank in range(ranks):
            target, expected = torch.full_like(values, -1), torch.full_like(values, -1)
            for wanted in chunks_on(rank, wants, name):
                wanted.of(full_chunk(shape), expected).copy_(wanted.of(full_chunk(shape), values))
            for chunk in got[rank][name]:
                assert bool((chunk.of(full_chunk(shape), target) == -1).all()), "came twice"
                chunk.of(full_chunk(shape), target).copy_(chunk.of(full_chunk(shape), values))
            assert torch.equal(target, expected)
    assert [name for each in rounds for name in each.completes] == list(has)


def check_messages(each: TransferRound, messages: list[Messages], has: Layouts, most: int) -> None:
    """What one sends is what the other expects, and what it has. Bytes are bounded."""
    ranks = len(messages)
    for source, mine in enumerate(messages):
        for target, its in enumerate(messages):
            sent = mine.sends.get(source if each.gathered else target, [])
            assert sent == its.receives.get(source, [])
        for part in [*mine.own, *(part for parts in mine.sends.values() for part in parts)]:
            held = chunks_on(source, has, part.name)
            assert any(part.chunk & chunk == part.chunk for chunk in held)
        assert each.gathered or source not in mine.sends
        # A piece has a part of each chunk, and of the least one a row, or an element.
        chunks = sum(len(chunks_on(rank, has, name)) for rank in range(ranks) for name in has)
        for by_rank in (mine.sends, mine.receives):
            parts = [part for message in by_rank.values() for part in message]
            nbytes = sum(part.chunk.numel * part.dtype.itemsize for part in parts)
            assert nbytes <= most + 8 * ranks * chunks


def placed(model: nn.Module, mesh: DeviceMesh) -> dict[str, DTensor]:
    """Empty tensors for the weights of ``model``, each placed in another way over ``mesh``."""
    found = {}
    for number, (name, weight) in enumerate(model.state_dict().items()):
        dim = number % (weight.ndim + 1)
        placement = Shard(dim) if dim < weight.ndim else Replicate()
        empty = torch.full_like(weight, -1.0)
        found[name] = distribute_tensor(empty, mesh, [placement], src_data_rank=None)
    return found


def same(target: dict[str, DTensor], twin: nn.Module, exactly: bool) -> None:
    close = {"rtol": 0, "atol": 0} if exactly else {}
    for name, weight in twin.state_dict().items():
        torch.testing.assert_close(target[name].full_tensor(), weight, **close, msg=name)


def _to_other_ranks(layout: str, piece_bytes: int) -> None:
    training, inference = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    torch.manual_seed(7)
    model = Model()
    twin = copy.deepcopy(model)
    trains = dist.get_rank() < 2
    target = None if trains else placed(twin, inference)
    if trains:
        ctx = FsdpContext(training, layout=LAYOUTS[layout])
        for layer in model.layers:
            fully_shard(layer, ctx)
        fully_shard(model, ctx)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    resharding = WeightResharder(model if trains else None, target, piece_bytes=piece_bytes)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    tokens = torch.arange(10).view(2, 5)
    for step in range(3):
        resharding.run()
        if target is not None:
            same(target, twin, exactly=not step)
            held = sum(each.to_local().nbytes for each in target.values())
            assert (resharding.sent_bytes, resharding.received_bytes) == (0, held)
        else:
            assert resharding.received_bytes == 0
        twin(tokens).square().mean().backward()
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        if trains:
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("piece_bytes", [SMALL, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_move_to_the_ranks_of_tensor_parallelism(layout: str, piece_bytes: int) -> None:
    run_ranks(_to_other_ranks, 4, layout, piece_bytes)


def _way_back(layout: str, holders: list[int]) -> None:
    twins = Twins(Model, shard_layers, layout=LAYOUTS[layout])
    twins.model.set_reshard_after_forward(False)
    batch = next(twins.batches(1))
    twins.backward(*batch)  # full buffers are kept, and would be stale
    twins.optimizer.zero_grad()
    twins.twin_optimizer.zero_grad()
    for parameter in twins.twin.parameters():
        parameter.data.mul_(1.5).add_(0.1)
    weights = twins.twin.state_dict() if twins.rank in holders else None
    resharding = WeightResharder(weights, twins.model, piece_bytes=SMALL)
    resharding.run()
    twins.check_parameters()
    if twins.rank in holders:
        assert resharding.received_bytes == 0
    twins.train(2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("holders", [[0], [0, 1, 2]], ids=["one", "all"])
@pytest.mark.parametrize("layout", ["flat", "whole", "rows"])
def test_whole_weights_move_into_a_running_model(layout: str, holders: list[int]) -> None:
    run_ranks(_way_back, 3, layout, holders)


def _between_layouts() -> None:
    models = []
    for layout in LAYOUTS.values():
        torch.manual_seed(len(models))
        model = Model()
        shard_layers(model, FsdpContext(layout=layout))
        models.append(model)
    torch.manual_seed(0)
    twin = Model().state_dict()
    for source, target in pairwise(models):
        WeightResharder(source, target, piece_bytes=SMALL).run()
        for name, parameter in target.named_parameters():
            assert torch.equal(parameter.full_tensor(), twin[name]), name


def test_weights_move_from_each_layout_to_the_next() -> None:
    run_ranks(_between_layouts, 2)


def _changed() -> None:
    torch.manual_seed(0)
    model = Model()
    for parameter in model.layers.parameters():
        parameter.requires_grad_(False)
    shard_layers(model, FsdpContext())
    target = {name: torch.empty(weight.shape) for name, weight in model.state_dict().items()}
    resharding = WeightResharder(model, target)
    resharding.run(changed=True)
    everything = resharding.received_bytes
    resharding.run(changed=True)
    assert resharding.sent_bytes == resharding.received_bytes == 0
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)
    model(torch.arange(10).view(2, 5)).square().mean().backward()
    optimizer.step()
    resharding.run(changed=True)
    trainable = sum(p.numel() - p.to_local().numel() for p in model.parameters() if p.requires_grad)
    assert 0 < resharding.received_bytes == trainable * 4 < everything
    for name, parameter in model.named_parameters():
        assert torch.equal(target[name], parameter.full_tensor()), name
    with torch.no_grad():
        model.layers[1].up.weight.add_(1) if dist.get_rank() else None
    resharding.run(changed=True)  # an edit on one rank is one on all
    name = "layers.1.up.weight"
    assert torch.equal(target[name], model.get_parameter(name).full_tensor())


def test_what_was_not_edited_stays_if_asked() -> None:
    run_ranks(_changed, 2)


def _fused() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, rows, bias=False) for name, rows in SIZES.items()})
    whole_weights = torch.cat([layer.weight.detach() for layer in model.values()])
    ctx = FsdpContext()
    for layer in model.values():
        fully_shard(layer, ctx)
    fused = torch.empty(10, 6, dtype=torch.bfloat16)
    starts = {"q": 0, "k": 6, "v": 8}
    target = {f"attn.{name}": fused[at : at + SIZES[name]] for name, at in starts.items()}
    WeightResharder(model, target, names=lambda name: f"attn.{name.removesuffix('.weight')}").run()
    assert torch.equal(fused, whole_weights.bfloat16())


SIZES = {"q": 6, "k": 2, "v": 2}


def test_weights_that_are_fused_elsewhere_are_views_of_one() -> None:
    run_ranks(_fused, 2)


def _refused() -> None:
    model = Model()
    shard_layers(model, FsdpContext())
    rank = dist.get_rank()
    good = {name: torch.empty(w.shape) for name, w in Model().state_dict().items()}
    first, *others = good
    cases: list[tuple[dict[str, Any], str]] = [
        ({**good, "more": torch.empty(2)}, "nobody has 'more'"),
        ({name: good[name] for name in others}, f"nobody wants '{first}'"),
        ({**good, first: torch.empty(3)}, rf"'{first}' has not the same shape .*on rank"),
    ]
    for target, message in cases:
        with pytest.raises(ValueError, match=message):
            WeightResharder(model, target if rank else None)

    def names(name: str) -> str:
        if rank:
            raise ArithmeticError("planned")
        return name

    expected = (
        (ArithmeticError, "planned") if rank else (RuntimeError, r"rank 1 raised Arith.*planned")
    )
    with pytest.raises(expected[0], match=expected[1]):
        WeightResharder(model, good, names=names)
    WeightResharder(model, good).run()
    assert all(torch.equal(good[n], p.full_tensor()) for n, p in model.named_parameters())
    with pytest.raises(ValueError, match="rank 0 gave piece_bytes=1, and"):
        WeightResharder(model, good, piece_bytes=1 + rank)


def test_what_does_not_go_together_is_an_error_on_all_ranks() -> None:
    run_ranks(_refused, 2)


def _plain_sources() -> None:
    """Edits of plain tensors may go unnoticed, so they are always sent."""
    source = {"w": torch.ones(4)} if dist.get_rank() == 0 else None
    target = {"w": torch.zeros(4)} if dist.get_rank() else None
    resharding = WeightResharder(source, target)
    for value in (1, 2):
        if source:
            source["w"].data.fill_(value)
        resharding.run(changed=True)
        assert target is None or target["w"].tolist() == [value] * 4


def test_plain_tensors_always_travel() -> None:
    run_ranks(_plain_sources, 2)


def _odd_dtensors() -> None:
    mesh, other = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0])
    alone, _ = dist.new_subgroups(1)
    rank = dist.get_rank()
    strided = StridedShard(0, split_factor=4)  # as a view of columns, flattened
    folded = DTensor.from_local(
        torch.ones(16), mesh, [strided], shape=torch.Size([32]), stride=(1,), run_check=False
    )
    rows = torch.ones(1 + rank, 8)
    uneven = DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size([3, 8]), stride=(8, 1))
    for source in (folded, uneven):
        target = {"w": torch.zeros(source.shape)}
        with pytest.raises((TypeError, RuntimeError), match="redistribute"):
            WeightResharder({"w": source}, target)
    if rank:
        nothing, shape = torch.ones(0, 8), torch.Size([4, 8])
        nowhere = DTensor.from_local(nothing, other, [Shard(0)], shape=shape, stride=(8, 1))
        with pytest.raises(ValueError, match="of 'w' ranks have 0 elements, and it has 32"):
            WeightResharder({"w": nowhere}, {"w": torch.zeros(4, 8)}, group=alone)


def test_dtensors_that_are_cut_in_other_ways_are_refused() -> None:
    run_ranks(_odd_dtensors, 2)
