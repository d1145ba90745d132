"""Ranks that start from different weights hear of it at the first forward, by the parameter's name,
or all take what the first rank has."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_overlap import FsdpContext, fully_shard, patch_fsdp2
from fsdp_overlap.desync.order_check import OrderCheck
from fsdp_overlap.engine.param import hash_tensor
from support.ranks import expect_rank_errors, run_ranks
from support.zoo import Model, shard_layers

TOKENS = torch.zeros(2, 3, dtype=torch.int64)


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))


def differs(name: str, first: int, second: int, others: int = 0) -> str:
    more = rf"\(and {others} others?\) differ" if others else "differs"
    return rf"^Parameter {name} {more} across ranks {first} and {second} at fully_shard\(\)\. "


def seeds() -> None:
    torch.manual_seed(dist.get_rank())
    model = Model()
    ctx = FsdpContext()
    shard_layers(model, ctx)
    for _ in range(2):  # until it is mended
        with pytest.raises(
            RuntimeError,
            match=differs("'up.weight' of unit 'layers.0'", 0, 1, others=14)
            + r"Seed or load .*sync_module_states=True\)\.$",
        ):
            model(TOKENS)
    torch.manual_seed(0)
    model.load_state_dict(Model().state_dict())
    model(TOKENS).sum().backward()


def test_ranks_of_different_seeds_hear_of_it() -> None:
    run_ranks(seeds, 2)


def seeds_of_fsdp2() -> None:
    """Within patch_fsdp2() each rank keeps its own part, and the first is warned."""
    with patch_fsdp2():
        torch.manual_seed(dist.get_rank())
        model: Any = Model()
        mine = copy.deepcopy(model)
        fsdp2.fully_shard(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(TOKENS).sum().backward()
        told = [str(each.message) for each in caught if "differ across ranks" in str(each.message)]
        assert len(told) == (dist.get_rank() == 0)
        for one, other in zip(model.parameters(), mine.parameters(), strict=True):
            chunks = other.chunk(2)
            part = chunks[dist.get_rank()] if len(chunks) > dist.get_rank() else other[:0]
            assert torch.equal(one.to_local(), part)
        replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fsdp2.fully_shard(mine, mesh=replicas)
        is_first = dist.get_rank() == 0
        with pytest.warns(match="different copies") if is_first else contextlib.nullcontext():
            mine(TOKENS)


def test_ranks_of_different_seeds_keep_their_parts_as_with_fsdp2() -> None:
    run_ranks(seeds_of_fsdp2, 2)


def one_of_four() -> None:
    """Ranks along neither dimension of the mesh alone see it."""
    for shard_optimizer_over_replicas in (False, True):
        model = Model()
        if dist.get_rank() == 3:
            model.layers[1].up.weight.data = model.layers[1].up.weight.data.flip(0)
        shard_layers(
            model, FsdpContext(grid(), shard_optimizer_over_replicas=shard_optimizer_over_replicas)
        )
        match = differs("'up.weight' of unit 'layers.1'", 2, 3)
        with pytest.raises(RuntimeError, match=match):
            model(TOKENS)


def experts() -> None:
    """Each pair of ranks has an expert of its own."""
    rank = dist.get_rank()
    for wrong in (False, True):
        mesh = grid()
        torch.manual_seed(0)
        model = Model()
        expert = model.layers[1]
        torch.manual_seed(10 + rank // 2)
        expert.down.reset_parameters()
        if wrong and rank == 1:
            expert.up.reset_parameters()
        ctx = FsdpContext(mesh._flatten("all"))
        fully_shard(expert, ctx, mesh=mesh["second"])
        fully_shard(model, ctx)
        if not wrong:
            model(TOKENS).sum().backward()
            continue
        match = differs("'up.weight' of unit 'layers.1'", 0, 1, others=1)
        with pytest.raises(
            RuntimeError, match=match if rank < 2 else "^other ranks, as they tell, were given"
        ):
            model(TOKENS)


def tiles() -> None:
    """Of tensor parallelism differ between its ranks."""
    mesh = grid()
    for wrong in (False, True):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
        cut = distribute_tensor(model[0].weight.data, mesh["second"], [Shard(0)])
        if wrong and dist.get_rank() == 3:
            cut.to_local().add_(1)
        model[0].weight = nn.Parameter(cut)
        fully_shard(model, FsdpContext(mesh["first"]))
        ctx: FsdpContext = model._fsdp_unit.context
        if wrong and dist.get_rank() % 2:
            with pytest.raises(RuntimeError, match=differs("'0.weight' of unit .*", 1, 3)):
                ctx.lazy_init()
        else:
            ctx.lazy_init()


def another_model() -> None:
    """On one rank of four is told as ever, not by its weights."""
    model = Model()
    if dist.get_rank() == 1:
        model.head = nn.Linear(6, 14)
    shard_layers(model, FsdpContext(grid()))
    model(TOKENS)


@pytest.mark.slow
def test_only_ranks_of_one_mesh_are_compared_and_all_of_them() -> None:
    run_ranks(one_of_four, 4)
    run_ranks(experts, 4)
    run_ranks(tiles, 4)
    expect_rank_errors(another_model, 4, match="planned unit 'Model' differently")


class Asked:
    """Counts how often ranks compare what they start from."""

    def __init__(self) -> None:
        self.times = 0

    def run(self, model: nn.Module) -> int:
        before = self.times
        with patch.object(OrderCheck, "exchange", self.exchange):
            model(TOKENS).sum().backward()
        return self.times - before

    original = OrderCheck.exchange

    @property
    def exchange(self) -> Any:
        def exchange(check: OrderCheck, *args: Any) -> Any:
            self.times += 1
            return Asked.original(check, *args)

        return exchange


def not_compared() -> None:
    rank = dist.get_rank()
    asked = Asked()
    model = Model()
    ctx = FsdpContext()
    shard_layers(model, ctx)
    assert [asked.run(model) for _ in range(3)] == [1, 0, 0]
    ctx.reset()
    assert asked.run(copy.deepcopy(model)) == 1
    later = fully_shard(nn.Linear(3, 3), ctx)
    assert asked.run(model) == 1
    assert asked.run(model) == 0
    later(torch.zeros(1, 3))

    torch.manual_seed(rank)
    edited = Model()
    shard_layers(edited, FsdpContext())
    for unit in edited._fsdp_unit.context.units:
        if rank == unit.index % 2:  # what nobody knows of one rank is not compared
            with torch.no_grad():
                unit.param_groups[0].sharded_parameters[0].to_local().add_(0)
    assert asked.run(edited) == 1

    with torch.device("meta" if rank else "cpu"):  # rank 0 alone has memory, and weights
        empty = Model()
    shard_layers(empty, FsdpContext())
    if rank:
        empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        nn.init.zeros_(parameter)
    assert asked.run(empty) == 1


def test_ranks_compare_once_what_they_still_hold() -> None:
    run_ranks(not_compared, 2)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.norm.running_mean.normal_()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        self.short = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.register_buffer("turned", torch.randn(3, 4).t())
        self.register_buffer("mask", torch.rand(7) > 0.5, persistent=False)
        self.register_buffer("count", torch.randint(9, ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.scale


def taken_from_first() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Everything()
    fully_shard(model, FsdpContext(grid(), sync_module_states=True))
    torch.manual_seed(0)
    first = Everything()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), first.get_parameter(name)), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, first.get_buffer(name)), name
    model(torch.randn(4, 5)).sum().backward()
    duplicate = copy.deepcopy(model)  # is not collective
    assert torch.equal(duplicate.scale.full_tensor(), first.scale)


def experts_from_the_first_of_their_mesh() -> None:
    rank = dist.get_rank()
    mesh = grid()
    torch.manual_seed(rank)
    model = Model()
    ctx = FsdpContext(mesh._flatten("all"), sync_module_states=True)
    fully_shard(model.layers[1], ctx, mesh=mesh["second"])
    fully_shard(model, ctx)
    model(TOKENS).sum().backward()
    torch.manual_seed(0)
    first = Model()
    torch.manual_seed(rank // 2 * 2)
    of_pair = Model()
    for name, parameter in model.named_parameters():
        source = of_pair if name.startswith("layers.1.") else first
        assert torch.equal(parameter.full_tensor(), source.get_parameter(name)), name
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="is on the meta device, and sync_module_states=True"):
        fully_shard(empty, ctx)
    assert type(empty) is nn.Linear


def test_all_ranks_take_what_the_first_of_the_mesh_has() -> None:
    run_ranks(taken_from_first, 4)
    run_ranks(experts_from_the_first_of_their_mesh, 4)


DTYPES = [torch.float32, torch.bfloat16, torch.complex128, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_tells_values_and_their_order(dtype: torch.dtype) -> None:
    for shape in ((0,), (), (1,), (7,), (3, 5), (16, 16), (512, 512), (1000, 33)):
        values = torch.randint(256, shape)
        values = values.remainder(2).to(dtype) if dtype == torch.bool else values.to(dtype)
        variants = [values, torch.zeros_like(values), torch.ones_like(values)]
        flat = values.reshape(-1)
        if flat.numel() and (flat != flat[0]).any():
            one, other = flat.clone(), int((flat != flat[0]).nonzero()[-1])
            one[0] = flat[other]
            swapped = one.clone()
            swapped[other] = flat[0]
            variants += [one, swapped, flat.flip(0)]
        if values.dim() == 2:
            variants += [values.flip(0), values.flip(1)]
        different = {v.reshape(-1).view(torch.uint8).numpy().tobytes() for v in variants}
        assert len({int(hash_tensor(v)) for v in variants}) == len(different), shape
        assert int(hash_tensor(values)) == int(hash_tensor(values.clone()))


def test_a_digest_of_part_of_a_tensor_and_of_a_conjugate() -> None:
    values = torch.randn(9, dtype=torch.complex64)
    assert int(hash_tensor(values.conj())) == int(hash_tensor(values.conj().resolve_conj().clone()))
    halves = torch.randn(9).to(torch.bfloat16)
    assert int(hash_tensor(halves[1:])) == int(hash_tensor(halves[1:].clone()))
