"""A user's own all-gathers and reduce-scatters, by FSDP2's interfaces."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fsdp_overlap import FsdpContext, QuantizedCommPolicy, fully_shard
from fsdp_overlap.layout import TensorAtomic
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins


class Keeps:
    """Gives the same memory each time, and counts what travels."""

    def __init__(self) -> None:
        self.memory: dict[object, torch.Tensor] = {}
        self.calls: list[dist.ProcessGroup] = []

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        key = tuple(size), dtype, device
        if key not in self.memory:
            self.memory[key] = torch.empty(*size, dtype=dtype, device=device)
        return self.memory[key]

    def check(self, *tensors: torch.Tensor) -> None:
        mine = {tensor.untyped_storage().data_ptr() for tensor in self.memory.values()}
        assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= mine


class KeepingGather(Keeps, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.check(output_tensor, input_tensor)
        self.calls.append(group)
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class KeepingReduce(Keeps, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.check(output_tensor, input_tensor)
        self.calls.append(group)
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def train(name: str, mesh: tuple[int, ...] | None) -> None:
    twins = Twins.of(name, mesh=mesh)
    gather, reduce = KeepingGather(), KeepingReduce()
    units = [unit.modules[0] for unit in twins.ctx.units]
    for module in units:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
    twins.train(3)
    travels = twins.ctx.groups.gather.size() > 1
    assert len(gather.calls) == twins.ctx.stats.all_gathers * travels
    assert len(reduce.calls) == twins.ctx.stats.reduce_scatters * travels
    assert {id(group) for group in gather.calls} <= {id(twins.ctx.groups.gather)}
    assert {id(group) for group in reduce.calls} <= {id(twins.ctx.groups.reduce)}


@pytest.mark.parametrize("name", ["layers", "nested units", "tied parameters", "checkpointed"])
def test_training_equals_unsharded_training(name: str) -> None:
    run_ranks(train, 2, name, None)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)])
def test_copies_are_reduced_as_ever(mesh: tuple[int, int]) -> None:
    run_ranks(train, mesh[0] * mesh[1], "layers", mesh)


def one_of_them(verb: str, comm: type[Keeps]) -> None:
    """Of one unit, and one kind of collective alone; later changes of mind count."""
    twins = Twins.of("layers")
    twins.train(1)
    first, later = comm(), comm()
    layer = twins.model.layers[1]
    getattr(layer, verb)(first)
    twins.train(2)
    assert first.calls
    assert {tensor.numel() for tensor in first.memory.values()} <= {
        numel
        for param_group in layer._fsdp_unit.param_groups
        for numel in (param_group.plan.numel, *param_group.plan.shard_numels)
    }
    calls = len(first.calls)
    getattr(layer, verb)(later)
    twins.train(1)
    assert len(first.calls) == calls
    assert later.calls
    copied = copy.deepcopy(twins.model)
    assert copied.layers[1]._fsdp_unit.settings.transport == layer._fsdp_unit.settings.transport


@pytest.mark.parametrize(
    ("verb", "comm"),
    [("set_custom_all_gather", KeepingGather), ("set_custom_reduce_scatter", KeepingReduce)],
)
def test_each_is_of_one_unit(verb: str, comm: type[Keeps]) -> None:
    run_ranks(one_of_them, 2, verb, comm)


def divided() -> None:
    """A divisor of the user's makes the op a sum."""
    ops = []

    class Notes(KeepingReduce):
        def __call__(self, *args: Any, op: Any, **kwargs: Any) -> dist.Work | None:
            ops.append(op)
            return super().__call__(*args, op=op, **kwargs)

    model = fully_shard(nn.Linear(8, 2, bias=False), FsdpContext())
    model.set_custom_reduce_scatter(Notes())
    for factor in (None, 8.0):
        if factor:
            model.set_gradient_divide_factor(factor)
        model(torch.ones(1, 8)).sum().backward()
        assert model.weight.grad is not None
        assert (model.weight.grad.full_tensor() == (0.25 if factor else 1.0)).all()
        model.zero_grad()
    assert ops == [dist.ReduceOp.AVG, dist.ReduceOp.SUM]


def test_a_divisor_makes_it_a_sum() -> None:
    run_ranks(divided, 2)


def ragged() -> None:
    model = fully_shard(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), FsdpContext(layout=TensorAtomic())
    )
    numels = model._fsdp_unit.param_groups[0].plan.shard_numels
    assert len(set(numels)) > 1
    for verb in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(
            ValueError, match=r"'Sequential', of which ranks hold .*layout=Flat\(\)"
        ):
            verb(KeepingGather())
    model(torch.ones(1, 64)).sum().backward()


def test_ragged_shards_are_refused() -> None:
    run_on_fake_group(ragged, 2)


def memory_of_others() -> None:
    model = fully_shard(nn.Linear(4, 4), FsdpContext())
    model.set_custom_all_gather(KeepingGather())
    with pytest.raises(ValueError, match=r"custom collectives .* allocate it there"):
        model.set_allocate_memory_from_process_group_for_comm(True)


def test_memory_of_others_is_refused() -> None:
    run_ranks(memory_of_others, 1)


def reduce_in_few_bits() -> None:
    policy = QuantizedCommPolicy(reduce_dtype=torch.int8)
    model = fully_shard(nn.Linear(8, 8, bias=False), FsdpContext(), comm_policy=policy)
    model.set_custom_reduce_scatter(KeepingReduce())
    with pytest.raises(ValueError, match="leave one of the two out"):
        model(torch.ones(1, 8))


def test_a_custom_reduction_beside_one_in_few_bits_is_refused() -> None:
    run_on_fake_group(reduce_in_few_bits, 2)
