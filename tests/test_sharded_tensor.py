"""What sharded parameters can do, and that the rest is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from zoo import Model, shard_layers

from fsdp_overlap import FsdpContext, ShardedTensor, fully_shard


def sharded(rows: int = 5, columns: int = 3) -> tuple[Any, torch.Tensor]:
    """A sharded weight cut within rows, and the same unsharded."""
    torch.manual_seed(1)
    module = nn.Linear(columns, rows)
    whole = module.weight.detach().clone()
    fully_shard(module, FsdpContext())
    # The context's lanes are not needed, the parameter outlives the module.
    return module.weight, whole


def identity() -> None:
    weight, whole = sharded()
    assert isinstance(weight, (nn.Parameter, DTensor, ShardedTensor)[dist.get_rank() % 3])
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert (weight.shape, weight.dtype, weight.numel()) == (whole.shape, whole.dtype, 15)
    assert weight.device_mesh.size() == dist.get_world_size()
    assert weight.requires_grad
    assert weight.is_leaf
    assert torch.equal(weight.full_tensor(), whole)
    start, stop = weight.local_range
    assert torch.equal(weight.to_local(), whole.flatten()[start:stop])
    assert f"here={start}-{stop} of 15" in repr(weight)
    assert {weight: 1}[weight] == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_sharded_parameter_is_a_parameter_and_a_dtensor(world_size: int) -> None:
    run_ranks(identity, world_size)


POINTWISE: dict[str, Callable[[Any], Any]] = {
    "mul": lambda x: x * 2.5,
    "rsub": lambda x: 1.0 - x,
    "torch.add": lambda x: torch.add(x, x, alpha=3),
    "sqrt": lambda x: x.abs().sqrt(),
    "addcdiv": lambda x: x.addcdiv(x, x.abs() + 1.0, value=0.5),
    "lerp": lambda x: x.lerp(x * 2, 0.25),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "eq": lambda x: x == x,
    "zeros_like": torch.zeros_like,
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.bfloat16),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "scalar tensor": lambda x: x * torch.tensor(3.0),
    "foreach": lambda x: torch._foreach_add(torch._foreach_mul([x], 2.0), [x])[0],
    "aten": lambda x: torch.ops.aten.mul.Tensor(x, x),
    "in place": lambda x: x.clone().mul_(3).add_(1).clamp_(min=0),
    "in place operator": lambda x: operator_in_place(x.clone()),
    "out": lambda x: torch.maximum(x, x * 2, out=x.clone()),
}


def operator_in_place(x: Any) -> Any:
    x += 2
    x /= 4
    return x


def point_wise() -> None:
    weight, whole = sharded()
    with torch.no_grad():
        for name, run in POINTWISE.items():
            result, expected = run(weight), run(whole)
            assert isinstance(result, ShardedTensor), name
            assert result.dtype == expected.dtype, name
            assert result.shape == expected.shape, name
            assert torch.equal(result.full_tensor(), expected), name


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


REFUSED: dict[str, Callable[[Any], Any]] = {
    "mm": lambda x: x @ x,
    "linear": lambda x: nn.functional.linear(torch.ones(2, 3), x),
    "sum": lambda x: x.sum(),
    "view": lambda x: x.view(-1),
    "index": lambda x: x[0],
    "T": lambda x: x.T,
    "item": lambda x: x.item(),
    "reshape": lambda x: x.reshape(15),
    "cat": lambda x: torch.cat([x, x]),
    "numpy": lambda x: x.numpy(),
    "softmax": lambda x: x.softmax(0),
    "into plain": lambda x: torch.zeros(5, 3).add_(x),
    "copy into plain": lambda x: torch.zeros(5, 3).copy_(x),
    "with plain": lambda x: x + torch.ones(5, 3),
    "broadcast": lambda x: x * torch.ones(3),
    "random": lambda x: x.normal_(),
    "norm of rows": lambda x: x.norm(dim=1),
    "redistribute": lambda x: x.redistribute(),
    "wrong copy": lambda x: x.copy_(torch.zeros(3)),
    "set data": lambda x: setattr(x, "data", torch.zeros(5, 3)),
    "aten": lambda x: torch.ops.aten.t.default(x),
    "unique": torch.unique,
    "cumsum": lambda x: x.cumsum(0),
}


def refused() -> None:
    weight, _ = sharded()
    before = weight.full_tensor()
    with torch.no_grad():
        for name, run in REFUSED.items():
            with pytest.raises(RuntimeError, match=r"full_tensor\(\)|ShardedTensor"):
                pytest.fail(f"{name} returned {run(weight)}")
    assert torch.equal(weight.full_tensor(), before)


def test_every_other_op_raises_and_says_what_to_do() -> None:
    run_ranks(refused, 2)


def gradients_do_not_flow() -> None:
    weight, _ = sharded()
    for run in (lambda: weight * 2, lambda: weight.norm(), lambda: weight.add_(1)):
        with pytest.raises(RuntimeError, match=r"gradients do not flow.*torch\.no_grad\(\)"):
            run()


def test_gradients_through_a_sharded_parameter_are_refused() -> None:
    run_ranks(gradients_do_not_flow, 2)


def different_layouts() -> None:
    first, _ = sharded(5, 3)
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    fully_shard(module, FsdpContext())
    second = module[1].weight
    assert first.shape == second.shape
    with torch.no_grad(), pytest.raises(RuntimeError, match="lie differently over the ranks"):
        first + second


def test_tensors_of_different_layouts_do_not_mix() -> None:
    run_ranks(different_layouts, 2)


def save(folder: str) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = Model()
    whole = [value.clone() for value in model.state_dict().values()]
    shard_layers(model, FsdpContext())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return whole


def load(folder: str) -> list[torch.Tensor]:
    model = Model()
    ctx = FsdpContext()
    fully_shard(model.layers[0], ctx)
    fully_shard(model, ctx)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return [value.full_tensor() for value in model.state_dict().values()]


def load_into_kept(folder: str) -> None:
    """Ranks that hold nothing of a parameter notice the load like the others."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    ctx = FsdpContext()
    fully_shard(model[1], ctx)
    fully_shard(model, ctx)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    x = torch.ones(1, 1)
    expected = model(x).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    loss = model(x)  # the root is kept
    dcp.save(model.state_dict(), checkpoint_id=folder + "/other")
    loss.sum().backward()  # saving edits nothing
    model(x)
    dcp.load(model.state_dict(), checkpoint_id=folder)
    assert torch.equal(model(x), expected)


def test_a_load_is_noticed_on_every_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(load_into_kept, 2, folder)


def test_checkpoints_load_at_another_world_size_and_grouping() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(save, 3, folder)[0]
        for world_size in (1, 2, 4):
            for loaded in run_ranks(load, world_size, folder):
                assert all(map(torch.equal, loaded, expected))
