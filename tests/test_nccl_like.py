"""The collectives for NCCL, on ranks that behave as NCCL's do to their caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_like import BACKEND
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh


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


def behave(*claims: Callable[[], None]) -> None:
    for claim in claims:
        claim()


def test_the_group_does_what_nccl_does_and_refuses_what_it_refuses() -> None:
    run_ranks(behave, 4, ranges, others, groups, waits, refusals, backend=BACKEND)
