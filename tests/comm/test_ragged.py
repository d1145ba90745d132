"""Ragged shards of which some are empty: only ranks that hold something are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap.comm import collectives
from fsdp_overlap.comm.collectives import (
    OwnerCollectives,
    RaggedTensorCollectives,
    TensorCollectives,
    choose,
)
from fsdp_overlap.layout import ParamGroupPlan, ParamSpec, TensorAtomic, plan_units
from fsdp_overlap.tools.emulator import EmulatedDevice, fake_ranks, running
from fsdp_overlap.tools.emulator.graphs import CUDAGraph
from fsdp_overlap.tools.emulator.graphs import graph as capture
from fsdp_overlap.tools.emulator.nccl_like import BACKEND, NcclLikeGroup
from fsdp_overlap.tools.emulator.ranks import FakeProcessGroup
from fsdp_overlap.tools.simulator.simulate import BACKEND as NCCL_IN_NAME_ONLY
from support.defects import Defect
from support.nccl_like import chosen_as_for_nccl
from support.ranks import expect_rank_errors, run_ranks

HERE = "emulated"
HELD = {
    "the first": (6, 0, 0, 0),
    "the last": (0, 0, 0, 4),
    "two": (0, 3, 0, 5),
    "two alike": (3, 0, 3, 0),
    "three": (1, 0, 2, 4),
    "all": (1, 2, 3, 4),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn)


def planned(numels: tuple[int, ...]) -> ParamGroupPlan:
    return ParamGroupPlan((), (), numels)


def group_of_all() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def chosen(numels: tuple[int, ...]) -> Any:
    with chosen_as_for_nccl():
        return choose(group_of_all(), HERE, planned(numels))


# ---- values and order ----


def gather_and_reduce(held: tuple[int, ...], dtype: torch.dtype) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_rank = [torch.full((n,), r + 1.0).to(dtype) for r, n in enumerate(held)]
    made, whole = chosen(held), torch.cat(of_rank)
    shard, full = of_rank[rank].to(HERE), torch.zeros(len(whole), dtype=dtype, device=HERE)
    gathered = made.all_gather(full, shard, group_of_all()).finish()
    assert torch.equal(gathered.cpu().view(torch.uint8), whole.view(torch.uint8))
    if dtype.itemsize == 1:
        return
    for divisor, total in ((None, 2.5), (8.0, 1.25)):
        gradients = torch.full((len(whole),), rank + 1.0, device=HERE).to(dtype)
        own = made.reduce_scatter(gradients, group_of_all(), divisor).finish()
        assert own.cpu().tolist() == [total] * held[rank]
        assert own.untyped_storage().nbytes() <= max(512, own.nbytes)
    assert ranks == 4


def travel(held: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        NcclLikeGroup.unwatched = 0
        with running(EmulatedDevice()) as device:
            gather_and_reduce(held, dtype)
            assert not device.findings, device.findings[0]
        assert NcclLikeGroup.unwatched == 0
        owners, kinds = sum(map(bool, held)), Counter(each.kind for each in device.issued)
        assert all(kind.startswith(("broadcast from", "reduce to")) for kind in kinds)
        assert len(device.issued) == owners * (1 if dtype.itemsize == 1 else 3)


@pytest.mark.parametrize("held", HELD)
def test_ranges_that_ranks_hold_travel(held: str) -> None:
    run_ranks(travel, 4, HELD[held], backend=BACKEND)


DEFECTS = {
    "nobody waits for the launch": Defect(collectives, "_launch", "end(work)", ""),
    "calls are synchronous": Defect(
        OwnerCollectives, "_gather", "is_async = len(self._owned) > 1", "", "is_async = False"
    ),
    "a rank that holds nothing is called": Defect(
        collectives, "_owned", "if numel", "", "if numel or rank == 0"
    ),
}


def travel_with(defect: str) -> None:
    with DEFECTS[defect].plant():
        travel(HELD["two"])


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str) -> None:
    expect_rank_errors(travel_with, 4, defect, backend=BACKEND, match="AssertionError")


def captured() -> None:
    """A replay gathers and reduces again what is in memory then."""
    rank, held, group = dist.get_rank(), HELD["two"], group_of_all()
    made = chosen(held)
    with running(EmulatedDevice()) as device:
        shard = torch.zeros(held[rank], device=HERE)
        full, gradients = torch.zeros(8, device=HERE), torch.zeros(8, device=HERE)
        graph = CUDAGraph()
        with capture(graph):
            made.all_gather(full, shard, group).finish()
            own = made.reduce_scatter(gradients, group).finish()
        shard.fill_(rank + 1.0)
        gradients.fill_(rank)
        graph.replay()
        assert full.cpu().tolist() == [2.0] * 3 + [4.0] * 5
        assert own.cpu().tolist() == [1.5] * held[rank]
        assert not device.findings, device.findings[0]


def test_a_captured_launch_is_replayed() -> None:
    run_ranks(captured, 4, backend=BACKEND)


# ---- how many calls ----

CALLS = ("broadcast", "reduce", "allgather", "reduce_scatter", "_end_coalescing")


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of the backend."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(FakeProcessGroup, name)

        @wraps(method)
        def call(*args: Any) -> Any:
            calls[name] += 1
            return method(*args)

        return call

    with patch.multiple(FakeProcessGroup, **{name: counted(name) for name in CALLS}):
        yield calls


def a_block(ranks: int) -> ParamGroupPlan:
    """One of 16 blocks of a transformer, whose matrices are whole."""
    shapes = [(512, 512)] * 4 + [(512, 1536)] * 3 + [(512,)] * 2
    blocks = [
        [ParamSpec(f"{k}.{i}", shape, torch.float32) for i, shape in enumerate(shapes)]
        for k in range(16)
    ]
    return plan_units(blocks, ranks, TensorAtomic())[7]


@pytest.mark.parametrize("ranks", [64, 1024])
def test_calls_are_as_many_as_ranks_that_hold_something(ranks: int) -> None:
    plan = a_block(ranks)
    owners = sum(map(bool, plan.shard_numels))
    assert 1 < owners < 10
    with fake_ranks(ranks, NCCL_IN_NAME_ONLY), counting() as calls:
        group = group_of_all()
        made = choose(group, "cuda", plan)
        shard, full = torch.zeros(plan.shard_numels[0]), torch.zeros(plan.numel)
        made.all_gather(full, shard, group).finish()
        assert calls == {"broadcast": owners, "_end_coalescing": 1}
        calls.clear()
        made.reduce_scatter(full, group).finish()
        assert calls == {"reduce": owners, "_end_coalescing": 1}


def test_one_owner_takes_one_call_and_all_owners_one_list() -> None:
    held = {rank: tuple(7 * (rank == each) for each in range(64)) for rank in (0, 63)}
    plans = [planned(numels) for numels in held.values()]
    plans.append(planned(tuple(range(1, 65))))
    for plan, names in zip(plans, [("broadcast", "reduce")] * 2 + [CALLS[2:4]], strict=True):
        with fake_ranks(64, NCCL_IN_NAME_ONLY), counting() as calls:
            group = group_of_all()
            made = choose(group, "cuda", plan)
            full = torch.zeros(plan.numel)
            made.all_gather(full, full[: plan.shard_numels[0]], group).finish()
            made.reduce_scatter(full, group).finish()
            assert calls == dict.fromkeys(names, 1)


def test_a_launch_is_one_operation_of_a_simulated_device() -> None:
    plan = a_block(64)
    with fake_ranks(64, NCCL_IN_NAME_ONLY), running(EmulatedDevice()) as device:
        group = group_of_all()
        full = torch.zeros(plan.numel, device=HERE)
        shard = torch.zeros(plan.shard_numels[0], device=HERE)
        choose(group, HERE, plan).all_gather(full, shard, group).finish()
        assert [each.kind for each in device.issued] == ["broadcast"]
        full.sum()
        assert not device.findings


@pytest.mark.parametrize(
    ("name", "of_one", "of_two"),
    [
        ("nccl", OwnerCollectives, OwnerCollectives),
        ("nccl2", OwnerCollectives, RaggedTensorCollectives),
        ("other", RaggedTensorCollectives, RaggedTensorCollectives),
    ],
)
def test_calls_are_coalesced_where_they_are_one_launch(
    name: str, of_one: type, of_two: type
) -> None:
    with fake_ranks(4), patch.object(collectives, "backend_name", lambda *_: name):
        for held, kind in (("the last", of_one), ("two", of_two)):
            assert type(choose(group_of_all(), "cuda", planned(HELD[held]))) is kind


def test_other_plans_of_the_same_collectives() -> None:
    """As those of what is sent in 8 bits have."""
    made = OwnerCollectives(planned(HELD["two"]))
    for numels, kind in (
        ((2, 2, 2, 2), TensorCollectives),
        ((0, 1, 2, 0), OwnerCollectives),
        ((1, 1, 2, 2), RaggedTensorCollectives),
    ):
        assert type(made.for_plan(planned(numels))) is kind
