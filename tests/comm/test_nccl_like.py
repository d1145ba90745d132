"""The collectives for NCCL, on ranks that behave as NCCL's do to their caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap import FsdpContext, PerTensor, QuantizedCommPolicy, fully_shard
from fsdp_overlap.comm import collectives
from fsdp_overlap.layout import BlockAtomic, Flat, LayoutRule, TensorAtomic
from fsdp_overlap.optim import Muon, clip_grad_norm_, exchange
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tools.emulator.nccl_like import (
    BACKEND,
    CollectiveCall,
    NcclLikeGroup,
    checking_nan,
)
from support import experts, layouts, reducing, tensor_parallel
from support.nccl_like import chosen_as_for_nccl
from support.quantized import quantize_twin
from support.ranks import run_ranks
from support.twins import COPIES, Twins
from support.zoo import Model, shard_layers


def ranges() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    # Equal, in place and not.
    whole = torch.zeros(3 * world)
    own = whole[3 * rank : 3 * rank + 3].fill_(rank + 1)
    dist.all_gather_into_tensor(whole, own)
    expected = torch.arange(1.0, world + 1)
    assert torch.equal(whole, expected.repeat_interleave(3))
    dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.AVG)
    assert own.tolist() == [rank + 1.0] * 3
    # Ragged, with a rank that holds nothing.
    sizes = [0, 5, 2, 1][:world]
    parts = [torch.full((size,), -1.0) for size in sizes]
    dist.all_gather(parts, torch.full((sizes[rank],), float(rank)))
    assert [part.tolist() for part in parts] == [[float(r)] * n for r, n in enumerate(sizes)]
    mine = torch.empty(sizes[rank])
    dist.reduce_scatter(mine, parts, dist.ReduceOp.SUM)
    assert mine.tolist() == [float(world * rank)] * sizes[rank]
    # Uneven splits: to rank r go r + 1 elements.
    sent = torch.cat([torch.full((r + 1,), 10.0 * rank + r) for r in range(world)])
    received = torch.empty(world * (rank + 1))
    dist.all_to_all_single(received, sent, [rank + 1] * world, [r + 1 for r in range(world)])
    assert received.tolist() == [10.0 * r + rank for r in range(world) for _ in range(rank + 1)]


def others() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for op, expected in (
        (dist.ReduceOp.SUM, 10.0),
        (dist.ReduceOp.AVG, 2.5),
        (dist._make_nccl_premul_sum(0.5), 5.0),
        (dist.ReduceOp.MAX, 4.0),
        (dist.ReduceOp.MIN, 1.0),
    ):
        values = torch.tensor([rank + 1.0])
        dist.all_reduce(values, op)
        assert values.item() == expected
    values = torch.tensor([torch.nan if rank else 1.0])
    dist.all_reduce(values, dist.ReduceOp.MAX)
    assert values.item() == 1.0
    values = torch.tensor([rank])
    dist.broadcast(values, 2)
    assert values.item() == 2
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, "x" * rank)
    assert objects == ["x" * r for r in range(world)]
    names = [f"of rank {rank}"]
    dist.broadcast_object_list(names, 1)
    assert names == ["of rank 1"]
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        values = torch.zeros(3)
        dist.recv(values, 0)
        assert values.tolist() == [1.0] * 3


def groups() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for dim, ranks in (("a", [rank % 2, rank % 2 + 2]), ("b", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh.get_group(dim)
        assert dist.get_process_group_ranks(group) == ranks
        assert group._get_backend(torch.device("cpu")).name() == BACKEND
        values = torch.tensor([rank])
        dist.all_reduce(values, group=group)
        assert values.item() == sum(ranks)
    flat = mesh._flatten().get_group()
    values = torch.tensor([rank])
    dist.all_reduce(values, group=flat)
    assert values.item() == 6
    mine = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    dist.all_reduce(values, group=mine)
    assert values.item() == 12
    dist.destroy_process_group(mine)


def waits() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, own = torch.zeros(world), torch.tensor([float(rank)])
    work = dist.all_gather_into_tensor(whole, own, async_op=True)
    assert whole.isnan().all()
    work.wait()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]
    # Those of one group run in order, and beside those of others, however they are waited for.
    other = dist.new_group()
    values = [torch.tensor([rank + 1.0]) for _ in range(4)]
    order = [None, other] if rank % 2 else [other, None]
    works = [
        dist.all_reduce(values[2 * index + (group is other)], group=group, async_op=True)
        for index in range(2)
        for group in order
    ]
    for work in reversed(works):
        work.wait()
    assert [value.item() for value in values] == [10.0] * 4
    work = dist.all_gather_into_tensor(whole, own, async_op=True)
    own.fill_(-1.0)
    with pytest.raises(RuntimeError, match="was edited before it was waited for"):
        work.wait()


def refusals() -> None:
    world = dist.get_world_size()
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        with pytest.raises(TypeError, match=f"NCCL has no {dtype}"):
            dist.all_gather_into_tensor(
                torch.zeros(world, dtype=dtype), torch.zeros(1, dtype=dtype)
            )
    group = dist.group.WORLD
    assert group is not None
    shard = torch.zeros(1, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"NCCL has no torch\.complex64"):
        group._allgather_base(shard.repeat(world), shard)
    with pytest.raises(TypeError, match=r"reduces no torch\.float8"):
        dist.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="must be contiguous"):
        dist.all_reduce(torch.zeros(2, 3).t())
    with pytest.raises(ValueError, match="4 times 2 elements are not 9"):
        dist.all_gather_into_tensor(torch.zeros(9), torch.zeros(2))
    with pytest.raises(ValueError, match="own ranges of 1 and 2 elements"):
        dist.all_gather(list(torch.zeros(world).split(1)), torch.zeros(2))
    whole = torch.zeros(2 * world)
    with pytest.raises(ValueError, match="not this rank's range"):
        dist.all_gather_into_tensor(whole, whole[1:3] if dist.get_rank() else whole[4:6])
    with pytest.raises(ValueError, match=r"has only \['SUM'"):
        dist.all_reduce(torch.zeros(1, dtype=torch.int32), dist.ReduceOp.BAND)
    with pytest.raises(RuntimeError, match="something else than"):
        dist.broadcast(torch.zeros(1), dist.get_rank())


def test_the_group_does_what_nccl_does_and_refuses_what_it_refuses() -> None:
    run_ranks(in_turn, 4, [ranges, others, groups, waits, refusals], backend=BACKEND)


# What the library does on it. All memory that nobody has written is NaN, and sending that raises.


def in_turn(claims: list[Callable[[], None]]) -> None:
    with chosen_as_for_nccl():
        for claim in claims:
            claim()


def with_nan_in_memory(claims: list[Callable[[], None]]) -> None:
    allocate = FlatBuffer.allocate

    def fill(buffer: FlatBuffer) -> None:
        allocate(buffer)
        buffer.flat.view(torch.uint8).fill_(0xFF)

    torch.use_deterministic_algorithms(True)  # torch.empty() fills with NaN then
    try:
        with checking_nan(), patch.object(FlatBuffer, "allocate", fill):
            in_turn(claims)
    finally:
        torch.use_deterministic_algorithms(False)


def train(name: str, wanted: str, /, **options: Any) -> None:
    """As unsharded, by the collectives that are `wanted` among others."""
    twins = Twins.of(name, **options)
    twins.train(2)
    param_groups = [param_group for unit in twins.ctx.units for param_group in unit.param_groups]
    assert wanted in {type(param_group.collectives).__name__ for param_group in param_groups}


def watch_ragged() -> None:
    """A collective that hangs is one that the watchdog sees."""
    NcclLikeGroup.unwatched = 0
    layouts.train("whole", "giant")
    assert NcclLikeGroup.unwatched == 0
    with patch.object(collectives, "_GATHER_LIST", collectives.GATHER):
        layouts.train("whole", "giant")
    assert NcclLikeGroup.unwatched > 0


def train_in_few_bits(layout: LayoutRule) -> None:
    policy = QuantizedCommPolicy(torch.float8_e4m3fn)
    twins = Twins(Model, partial(shard_layers, comm_policy=policy), layout=layout)
    quantize_twin(twins, policy).train(2)


def reduce_in_few_bits(layout: LayoutRule) -> None:
    policy = QuantizedCommPolicy(reduce_dtype=torch.int8)
    twins = Twins(Model, partial(shard_layers, comm_policy=policy), layout=layout)
    twins.backward(*next(twins.batches(1)))
    for (name, parameter), twin in twins.pairs():
        assert parameter.grad is not None
        assert twin.grad is not None
        found, most = parameter.grad.full_tensor(), twin.grad.abs().max().item()
        torch.testing.assert_close(found, twin.grad, rtol=0.0, atol=most / 100, msg=name)


class OfManyDtypes(nn.Module):
    """A unit of four param groups: wide and narrow, frozen and not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(7))
        self.narrow = nn.Parameter(torch.ones(9, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(5, 3), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(11, dtype=torch.uint8), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return sum(p.float().sum() for p in self.parameters()) * self.wide[0]


def gather_as_one(layout: LayoutRule) -> None:
    model = OfManyDtypes()
    expected = model().item()
    ctx = FsdpContext(layout=layout)
    fully_shard(model, ctx)
    launch = NcclLikeGroup.allgather_into_tensor_coalesced
    with patch.object(NcclLikeGroup, "allgather_into_tensor_coalesced", autospec=True) as launched:
        launched.side_effect = launch
        assert model().item() == expected
    assert launched.call_count == 1
    assert ctx.stats.all_gathers == 1


def train_copies() -> None:
    log: list[str] = []
    with noted(log):
        Twins.of("layers", mesh=(2, 2)).train(2)
    assert "reduce_scatter AVG of 2" in log
    assert "all_reduce AVG of 2" in log  # a mean is what the backend takes


def train_from_parts(layout: LayoutRule) -> None:
    twins = Twins(Model, partial(shard_layers, reshard_after_forward=2), layout=layout)
    log: list[str] = []
    with noted(log):
        twins.train(2)
    assert any(line.endswith("of 2") for line in log)


def reduced_in_float32(options: dict[str, Any]) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    twins = Twins(Model, partial(shard_layers, mp_policy=policy), **options)
    for _ in range(2):
        twins.backward(*next(twins.batches(1)))
    for (name, parameter), twin in twins.pairs():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.double, name
        assert twin.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), twin.grad, rtol=1e-5, atol=1e-6)


def train_with_tensor_parallelism(layout: LayoutRule) -> None:
    mesh = tensor_parallel.make_mesh()
    model = tensor_parallel.parallelize(tensor_parallel.plain(), mesh["tp"])
    tensor_parallel.shard(model, FsdpContext(mesh["dp"], layout=layout))
    # Clips too, and compares by full_tensor().
    twin = tensor_parallel.plain()
    tensor_parallel.train(mesh, model, twin, tensor_parallel.adamw, steps=1)


def exchange_matrices() -> None:
    log: list[str] = []
    with patch.object(exchange, "ROUND_ELEMENTS", 60):  # several rounds
        twins = Twins.of(
            "layers", optimizer=Muon, layout=BlockAtomic(rows=2), ns_dtype=torch.double
        )
        with noted(log):
            twins.train(2)
    assert sum(line.startswith("all_to_all") for line in log) > 4


def clip_and_reduce() -> None:
    twins = Twins.of("layers", layout=BlockAtomic(rows=1))
    twins.backward(*next(twins.batches(1)))
    for (_, parameter), twin in twins.pairs():
        assert parameter.grad is not None
        assert twin.grad is not None
        for order in (2.0, 1.0, torch.inf):
            norm = torch.linalg.vector_norm(parameter.grad, order)
            expected = torch.linalg.vector_norm(twin.grad, order)
            torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(parameter.grad.sum(), twin.grad.sum())
        torch.testing.assert_close(parameter.grad.amin(), twin.grad.amin())
    expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(twins.model.parameters(), 0.1), expected)
    twins.check_gradients()


def save_and_load(folder: str) -> None:
    saved = Twins.of("layers", layout=TensorAtomic())
    saved.train(1)
    model, optimizer = get_state_dict(saved.model, saved.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    loaded = Twins.of("layers", layout=BlockAtomic(rows=1))
    model, optimizer = get_state_dict(loaded.model, loaded.optimizer)
    wanted = {"model": model, "optimizer": optimizer}
    dcp.load(wanted, checkpoint_id=folder)
    set_state_dict(
        loaded.model,
        loaded.optimizer,
        model_state_dict=wanted["model"],
        optim_state_dict=wanted["optimizer"],
    )
    full = StateDictOptions(full_state_dict=True)
    states = [get_model_state_dict(twins.model, options=full) for twins in (saved, loaded)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def run_other_units() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ctx = FsdpContext()
    for layer in (*model, model):
        fully_shard(layer, ctx)
    first, second = model if dist.get_rank() else reversed(model)
    with pytest.raises(RuntimeError, match=r"rank 0: .* of unit '1'; rank .* of unit '0'"):
        second(first(torch.ones(1, 4))).sum().backward()
    ctx.reset()
    model(torch.ones(1, 4)).sum().backward()


@contextmanager
def noted(log: list[str]) -> Iterator[None]:
    """Notes what is issued, as "kind of ranks"."""
    run = NcclLikeGroup._run

    def noting(group: NcclLikeGroup, collective: CollectiveCall, *rest: Any) -> Any:
        log.append(f"{collective.kind} of {group.size()}")
        return run(group, collective, *rest)

    with patch.object(NcclLikeGroup, "_run", noting):
        yield


EQUAL, RAGGED = "NcclCollectives", "RaggedTensorCollectives"
TRAINING = [
    partial(train, "layers", EQUAL),
    partial(train, "layers", RAGGED, layout=TensorAtomic()),
    partial(train, "unused on some ranks", RAGGED, layout=BlockAtomic(rows=3)),
    partial(layouts.train, "whole", "giant"),  # ranks that hold nothing
    *(
        partial(claim, layout)
        for claim in (train_in_few_bits, reduce_in_few_bits)
        for layout in (Flat(), TensorAtomic(), PerTensor())
    ),
    partial(train_from_parts, Flat()),
    partial(train_from_parts, TensorAtomic()),
    partial(train_from_parts, PerTensor()),
    *(partial(gather_as_one, layout) for layout in (Flat(), PerTensor())),
    train_copies,
    partial(train, "layers", RAGGED, layout=BlockAtomic(rows=5), **COPIES),
    partial(train, "layers", EQUAL, shard_optimizer_over_replicas=True, **COPIES),
    partial(
        train,
        "layers",
        RAGGED,
        layout=BlockAtomic(rows=5),
        shard_optimizer_over_replicas=True,
        **COPIES,
    ),
    *(
        partial(reduced_in_float32, options)
        for options in (
            {},
            {"layout": TensorAtomic()},
            COPIES,
            {"shard_optimizer_over_replicas": True, **COPIES},
        )
    ),
    partial(experts.train, True, False),
    partial(experts.train, False, True),
    partial(train_with_tensor_parallelism, BlockAtomic(rows=1)),
    exchange_matrices,
    clip_and_reduce,
    partial(reducing.as_fsdp2, reducing.divided, (4,)),
    partial(reducing.as_fsdp2, reducing.only_sums, (2, 2)),
    partial(reducing.sees_means, (2, 2)),
    partial(reducing.in_half_precision, (4,)),
    run_other_units,
]


@pytest.mark.slow
def test_training_equals_unsharded_training_and_sends_nothing_that_nobody_wrote(
    tmp_path: Path,
) -> None:
    claims = [*TRAINING, partial(save_and_load, str(tmp_path))]
    run_ranks(with_nan_in_memory, 4, claims, backend=BACKEND, timeout=200)


def test_ragged_collectives_are_not_done_before_they_are() -> None:
    run_ranks(in_turn, 2, [watch_ragged], backend=BACKEND)


def test_ranks_that_are_no_power_of_two() -> None:
    claims = [partial(layouts.train, layout, "giant") for layout in ("flat", "mixed")]
    run_ranks(with_nan_in_memory, 3, [*claims, exchange_matrices], backend=BACKEND, timeout=200)
