"""What sharded parameters can do, and that the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp_overlap import (
    FsdpContext,
    RaggedDTensor,
    RaggedShard,
    distribute_tensor,
    fully_shard,
)
from support.pointwise import POINTWISE
from support.ranks import run_ranks


def sharded(rows: int = 5, columns: int = 3) -> tuple[Any, torch.Tensor]:
    """A sharded weight cut within rows, and the same unsharded."""
    torch.manual_seed(1)
    module = nn.Linear(columns, rows)
    whole = module.weight.detach().clone()
    fully_shard(module, FsdpContext())
    # The context's comm streams are not needed, the parameter outlives the module.
    return module.weight, whole


def identity() -> None:
    weight, whole = sharded()
    assert isinstance(weight, (nn.Parameter, DTensor, RaggedDTensor)[dist.get_rank() % 3])
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert (weight.shape, weight.dtype, weight.numel()) == (whole.shape, whole.dtype, 15)
    assert weight.device_mesh.size() == dist.get_world_size()
    assert weight.requires_grad
    assert weight.is_leaf
    assert torch.equal(weight.full_tensor(), whole)
    start, stop = weight.local_range
    assert torch.equal(weight.to_local(), whole.flatten()[start:stop])
    assert f"rank {dist.get_rank()} of" in repr(weight)
    assert f"holds {start}:{stop} of 15: [" in f"{weight}"
    assert "requires_grad=True" in repr(weight)
    assert {weight: 1}[weight] == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_sharded_parameter_is_a_parameter_and_a_dtensor(world_size: int) -> None:
    run_ranks(identity, world_size)


def point_wise() -> None:
    weight, whole = sharded()
    with torch.no_grad():
        for name, run in POINTWISE.items():
            result, expected = run(weight), run(whole)
            assert isinstance(result, RaggedDTensor), name
            assert result.dtype == expected.dtype, name
            assert result.shape == expected.shape, name
            assert torch.equal(result.full_tensor(), expected), name


def with_replicated() -> None:
    weight, whole = sharded()
    mesh = weight.device_mesh
    row, factor = torch.arange(3.0), torch.tensor(0.5)
    copied = [DTensor.from_local(value, mesh, [Replicate()]) for value in (row, factor, whole)]
    with torch.no_grad():
        for value, plain in zip(copied, (row, factor, whole), strict=True):
            assert torch.equal((weight * value).full_tensor(), whole * plain)
            assert torch.equal((value * weight).full_tensor(), whole * plain)
        [halved] = torch._foreach_mul([weight], copied[1])
        assert torch.equal(halved.full_tensor(), whole * 0.5)
        for placement in (Shard(0), Partial()):
            divided = DTensor.from_local(row, mesh, [placement])
            with pytest.raises(RuntimeError, match=r"full_tensor\(\) on the DTensor"):
                weight * divided
            with pytest.raises(RuntimeError, match=r"_foreach_mul_ with one tensor of shape"):
                torch._foreach_mul_([weight], DTensor.from_local(factor, mesh, [Partial()]))


def test_a_dtensor_that_every_rank_holds_all_of_is_a_whole_tensor() -> None:
    run_ranks(with_replicated, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_point_wise_ops_equal_those_of_the_whole(world_size: int) -> None:
    run_ranks(point_wise, world_size)


NORMS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: torch.norm(x, p=1),
    "vector norm": lambda x: torch.linalg.vector_norm(x, 3),
    "inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "-inf": lambda x: torch.linalg.vector_norm(x, float("-inf")),
    "0": lambda x: torch.linalg.vector_norm(x, 0),
    "foreach": lambda x: torch._foreach_norm([x, x * 2], 2)[1],
}


def norms() -> None:
    weight, whole = sharded()
    with torch.no_grad():
        for name, run in NORMS.items():
            result = run(weight)
            assert type(result) is torch.Tensor, name
            torch.testing.assert_close(result, run(whole), msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_norms_are_of_the_whole_tensor(world_size: int) -> None:
    run_ranks(norms, world_size)


REDUCED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(),
    "mean of columns": lambda x: x.mean(dim=0),
    "mean in bfloat16": lambda x: x.bfloat16().mean(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(0),
    "any": lambda x: (x > 0.3).any(),
    "all": lambda x: (x > -9).all(1),
    "isnan": lambda x: x.isnan().any(),
    "norm of rows": lambda x: x.norm(dim=1),
    "norm of columns": lambda x: torch.linalg.vector_norm(x, 3, 0, keepdim=True),
    "linalg.norm of rows": lambda x: torch.linalg.norm(x, 1, 1),
    "std": lambda x: x.std(),
    "var of rows": lambda x: x.var(1, correction=0),
    "median": lambda x: x.median(),
    "times another": lambda x: x.view(15, 1) @ x[2:3],
    "Kronecker product": lambda x: torch.kron(x, torch.ones(2, 2)),
    "dot": lambda x: torch.dot(x.flatten(), x.ravel() + 1),
    "item": lambda x: torch.tensor([x[4, 1].item(), x[:1, :1].tolist()[0][0], float(x.max())]),
    "equal": lambda x: torch.tensor(torch.equal(x, x * 1)),
    "not equal": lambda x: torch.tensor(torch.equal(x, x * 2)),
    "into a whole tensor": lambda x: torch.ones(5, 3).add_(x),
    "copied into a whole tensor": lambda x: torch.ones(5, 3).copy_(x),
    "new_ones": lambda x: x.new_ones(2, 2),
    "assigned to rows of a whole tensor": lambda x: filled(torch.zeros(6, 3), [0, 2, 3, 4, 5], x),
    "plain to": lambda x: torch.arange(4).to(x),
    "plain type_as": lambda x: torch.arange(4).type_as(x),
}


def filled(target: torch.Tensor, rows: list[int], values: Any) -> torch.Tensor:
    target[rows] = values
    return target


def reductions() -> None:
    weight, whole = sharded()
    with torch.no_grad():
        for name, run in REDUCED.items():
            result, expected = run(weight), run(whole)
            assert type(result) is torch.Tensor, name
            assert result.dtype == expected.dtype, name
            torch.testing.assert_close(result, expected, msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_reductions_are_of_the_whole_tensor(world_size: int) -> None:
    run_ranks(reductions, world_size)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: nn.functional.linear(torch.ones(2, 3), x),
    "index of columns": lambda x: x[:, :2],
    "index by a list": lambda x: x[[0, 2]],
    "T": lambda x: x.T,
    "times a batch": lambda x: torch.ones(2, 5) @ x,
    "cat": lambda x: torch.cat([x, x]),
    "numpy": lambda x: x.numpy(),
    "softmax": lambda x: x.softmax(0),
    "with a tensor that does not fit": lambda x: x + torch.ones(5),
    "with a larger tensor": lambda x: x + torch.ones(2, 5, 3),
    "max along": lambda x: x.max(0),
    "spectral norm": lambda x: torch.linalg.norm(x, 2),
    "nuclear norm": lambda x: torch.norm(x, "nuc"),
    "where": lambda x: torch.where(x > 0),
    "wrong copy": lambda x: x.copy_(torch.zeros(4)),
    "set data": lambda x: setattr(x, "data", torch.zeros(5, 1)),
    "aten": lambda x: torch.ops.aten.t.default(x),
    "unique": torch.unique,
    "cumsum": lambda x: x.cumsum(0),
}


def refused() -> None:
    weight, _ = sharded()
    before = weight.full_tensor()
    with torch.no_grad():
        for name, run in REFUSED.items():
            with pytest.raises(RuntimeError, match=r"full_tensor\(\)|RaggedDTensor|to_local\(\)"):
                pytest.fail(f"{name} returned {run(weight)}")
    assert torch.equal(weight.full_tensor(), before)


def test_every_other_op_raises_and_says_what_to_do() -> None:
    run_ranks(refused, 2)


def outside_no_grad() -> None:
    """What code around a trainer does with parameters, where gradients are recorded."""
    weight, whole = sharded()
    twin = nn.Parameter(whole)
    found: list[list[Any]] = []
    for p in (weight, twin):
        torch.manual_seed(3)
        average = p.clone()
        kept = p.detach().clone()
        kept.mul_(0.9).add_(p, alpha=0.1)
        average.lerp_(p * 2, 0.5)
        plain = torch.zeros(5, 3).copy_(p)
        [scaled] = torch._foreach_mul([p], 2.0)
        rows = p.detach() * torch.ones(3, requires_grad=True)
        noise = torch.rand_like(p) * p.std()
        p.data = p.detach() + 1
        found.append([average, kept, plain, scaled, rows, noise, p[2], p.norm(), p.bfloat16(), p])
        assert not torch.isnan(p).any()
        assert (p == 1e9).sum() == 0
    for mine, its in zip(*found, strict=True):
        assert mine.requires_grad == its.requires_grad
        mine = mine.full_tensor() if isinstance(mine, RaggedDTensor) else mine
        assert torch.equal(mine, its)


def test_code_around_a_trainer_needs_no_no_grad() -> None:
    run_ranks(outside_no_grad, 2)


WITH_GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda x: x.norm(),
    "sum": lambda x: x.square().sum(),
    "full_tensor": lambda x: x.full_tensor(),
    "to_local": lambda x: x.to_local(),
    "matmul": lambda x: x.view(15, 1) @ x.view(1, 15),
    "clone": lambda x: torch.zeros(5, 3).add_(x.clone()),
    "redistribute": lambda x: x.redistribute(placements=[Shard(0)]).to_local(),
    "add_": lambda x: x.detach().clone().add_(x).mean(),
    "_foreach_mul": lambda x: torch._foreach_mul([x], 2.0)[0].sum(),
}


def gradients_do_not_flow() -> None:
    weight, whole = sharded()
    other = torch.ones(2, requires_grad=True)
    for name, run in WITH_GRADIENTS.items():
        loss = run(weight).sum() + other.sum()
        with pytest.raises(
            RuntimeError, match=r"on parameter 'weight' of Linear: gradients do not flow"
        ):
            pytest.fail(f"{name} returned {loss.backward(retain_graph=True)}")
        assert torch.autograd.grad(loss, other)[0].tolist() == [1, 1], name
        assert not run(weight.detach()).requires_grad, name
    edits = (lambda: weight.add_(1), lambda: weight[1].zero_(), lambda: weight.copy_(whole))
    for edit in (*edits, weight.normal_, lambda: torch._foreach_add_([weight], 1)):
        with pytest.raises(RuntimeError, match=r"parameter 'weight' of Linear.*torch\.no_grad\(\)"):
            edit()
    assert torch.equal(weight.full_tensor(), whole)


def test_gradients_through_a_sharded_parameter_are_refused_in_backward() -> None:
    run_ranks(gradients_do_not_flow, 2)


def redistributed() -> None:
    weight, whole = sharded()
    mesh = weight.device_mesh
    for placement in (Replicate(), Shard(0), Shard(1)):
        standard = weight.redistribute(placements=[placement])
        assert type(standard) is DTensor
        assert standard.placements == (placement,)
        assert torch.equal(standard.full_tensor(), whole)
        back = distribute_tensor(standard, mesh, weight.placements)
        assert back.placement == weight.placement
        assert torch.equal(back.to_local(), weight.to_local())
        with torch.no_grad():
            weight.copy_(standard * 2)
            assert torch.equal(weight.full_tensor(), whole * 2)
            weight.copy_(whole)
    mine = [RaggedShard(((mesh.size() - 1, 0, 15),))]
    moved = weight.redistribute(placements=mine)
    assert isinstance(moved, RaggedDTensor)
    assert torch.equal(moved.full_tensor(), whole)
    with pytest.raises(RuntimeError, match=r"use Replicate\(\), Shard\(dim\) or RaggedShard"):
        weight.redistribute(placements=[Partial()])
    with torch.no_grad():
        assert torch.equal(moved.add_(weight).full_tensor(), whole * 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_redistribute_and_back(world_size: int) -> None:
    run_ranks(redistributed, world_size)


def distributed() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(20.0).view(5, 4) + 100 * dist.get_rank()
    first = torch.arange(20.0).view(5, 4)
    assert torch.equal(distribute_tensor(whole, mesh).full_tensor(), first)
    transposed = distribute_tensor(whole.t(), mesh, src_data_rank=1)
    assert torch.equal(transposed.full_tensor(), first.t() + 100)
    own = distribute_tensor(whole, mesh, src_data_rank=None)
    assert torch.equal(own.to_local(), whole.flatten()[own.local_range[0] : own.local_range[1]])
    assert distribute_tensor(torch.tensor(2.0), mesh).full_tensor() == 2.0
    with pytest.raises(ValueError, match="do not make a RaggedDTensor"):
        distribute_tensor(whole, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="places 20 elements, not the 10"):
        distribute_tensor(whole.view(-1)[:10], mesh, own.placements)
    whole.zero_()
    assert own.full_tensor().sum() > 0


def test_a_whole_tensor_is_distributed() -> None:
    run_ranks(distributed, 2)


def different_layouts() -> None:
    first, _ = sharded(5, 3)
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    fully_shard(module, FsdpContext())
    second = module[1].weight
    assert first.shape == second.shape
    assert first.placement != second.placement
    with torch.no_grad():
        wholes = first.full_tensor(), second.full_tensor()
        total = first + second
        assert total.placement == first.placement
        assert torch.equal(total.full_tensor(), sum(wholes))
        assert torch.equal((first * second[2:3]).full_tensor(), wholes[0] * wholes[1][2:3])
        assert torch.equal((second[2:3] - first).full_tensor(), wholes[1][2:3] - wholes[0])
        assert not torch.equal(first, second)
        torch._foreach_lerp_([first], [second], 0.5)
        assert torch.equal(first.full_tensor(), wholes[0].lerp(wholes[1], 0.5))


def test_a_tensor_of_another_layout_is_gathered() -> None:
    run_ranks(different_layouts, 2)
