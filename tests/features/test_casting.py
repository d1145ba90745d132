"""A sharded model that is cast or moved, as ``model.to(...)`` does, beside FSDP2's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_overlap import (
    FsdpContext,
    MixedPrecisionPolicy,
    PerTensor,
    RaggedDTensor,
    TensorAtomic,
    fully_shard,
)
from fsdp_overlap.features.rows.row_tensor import RowTensor
from fsdp_overlap.layout import Flat
from support.ranks import run_ranks
from support.rows import tokens
from support.zoo import Model, shard_layers

BF16 = torch.bfloat16
UPCAST = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)


class Counting(Model):
    """A model with buffers, one of which no unit's module has."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.register_buffer("scale", torch.ones(13))
        self.outside = nn.BatchNorm1d(2, affine=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


def build(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    torch.manual_seed(1)
    with torch.device(device):
        return Counting().to(dtype)


def train(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        model(tokens()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def same_as(its: torch.Tensor, mine: torch.Tensor) -> None:
    """Sums in 16 bits are rounded in another order where one rank has a whole parameter."""
    tolerance = {"rtol": 0.02, "atol": 5e-4} if mine.dtype == BF16 else {}
    torch.testing.assert_close(mine, its, **tolerance)


def cast_and_train(layout: Any, begin: torch.dtype, end: torch.dtype, options: Any) -> None:
    for is_made_before in (True, False):
        found = []
        for shard in (partial(fully_shard, ctx=FsdpContext(layout=layout)), torchs_fully_shard):
            model = build(begin)
            for module in (*model.layers, model):
                shard(module, **options)
            early = optimizer_of(model)
            objects = list(map(id, model.parameters()))
            model.to(end)
            assert list(map(id, model.parameters())) == objects
            late = optimizer_of(model)
            train(model, early if is_made_before else late)
            state = model.state_dict()
            assert {value.dtype for name, value in state.items() if "batches" not in name} == {end}
            assert all(p.grad is None for p in model.parameters())
            found.append([parameter.full_tensor() for parameter in model.parameters()])
        for mine, its in zip(*found, strict=True):
            same_as(its, mine)
        start = build(begin).to(end)
        for parameter, its_start in zip(found[0], start.parameters(), strict=True):
            assert not torch.equal(parameter, its_start)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", [Flat(), PerTensor(), TensorAtomic()])
@pytest.mark.parametrize(
    ("begin", "end", "options"),
    [
        (torch.float32, torch.float64, {}),
        (torch.float32, BF16, {}),
        (BF16, torch.float32, {"mp_policy": UPCAST}),  # as accelerate does
    ],
    ids=["double", "bfloat16", "upcast"],
)
def test_a_model_that_is_cast_before_it_runs_trains_as_fsdp2s(
    layout: Any, begin: torch.dtype, end: torch.dtype, options: Any
) -> None:
    run_ranks(cast_and_train, 2, layout, begin, end, options)


def growing() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 40))


def cast_between_units() -> None:
    """Units of whole matrices, which the outermost unit would plan anew."""
    model, ctx = growing(), FsdpContext(layout=TensorAtomic())
    for layer in model:
        fully_shard(layer, ctx)
    model.double()
    fully_shard(model, ctx)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.double}
    x = torch.ones(2, 8, dtype=torch.double)
    torch.testing.assert_close(model(x), growing().double()(x))


def test_units_may_be_cast_before_the_unit_around_them_is_made() -> None:
    run_ranks(cast_between_units, 2)


def cast_on_meta() -> None:
    model = build(device="meta")
    shard_layers(model, FsdpContext())
    model.double()
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(build().double().state_dict())
    torch.testing.assert_close(model(tokens()), build().double()(tokens()))


def test_a_model_without_memory_may_be_cast() -> None:
    run_ranks(cast_on_meta, 2)


def gradients_follow() -> None:
    model = build()
    shard_layers(model, FsdpContext())
    bias = model.head.bias
    bias.grad = torch.ones_like(bias)
    model.double()
    assert bias.grad is not None
    assert bias.grad.dtype == torch.double
    assert torch.equal(bias.grad.full_tensor(), torch.ones(13, dtype=torch.double))


def test_gradients_are_cast_too() -> None:
    run_ranks(gradients_follow, 2)


def half(model: nn.Module) -> nn.Module:
    return model.half()


def to_integers(model: nn.Module) -> nn.Module:
    return model._apply(lambda tensor: tensor.int())


def to_eight_bits(model: nn.Module) -> nn.Module:
    return model._apply(lambda tensor: tensor.to(torch.float8_e5m2))


def to_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


def refused(change: Callable[[nn.Module], nn.Module], runs: bool, match: str) -> None:
    model = build()
    shard_layers(model, FsdpContext())
    model.head.weight.requires_grad_(False)
    if runs:
        model(tokens())
    before = {name: value.dtype for name, value in model.state_dict().items()}
    for module in (model, model.layers[0]):
        with pytest.raises(RuntimeError, match=match):
            change(module)
    after = model.state_dict()
    assert {name: value.dtype for name, value in after.items()} == before
    assert all(value.device.type == "cpu" for value in after.values())
    torch.testing.assert_close(model(tokens()), build()(tokens()))
    assert model.to("cpu").float() is model


@pytest.mark.parametrize(
    ("change", "runs", "match"),
    [
        (half, True, r"float32 and cannot become .*float16 when it has run: cast it before"),
        (to_integers, False, "parameters stay floating"),
        (to_eight_bits, False, "a dtype in which gradients can be summed"),
        (to_meta, False, r"on cpu and cannot move to meta: move a module before fully_shard\(\)"),
    ],
)
def test_what_cannot_be_right_is_refused_and_changes_nothing(
    change: Callable[[nn.Module], nn.Module], runs: bool, match: str
) -> None:
    run_ranks(refused, 2, change, runs, match)


def buffers_stay() -> None:
    """The root has no parameters, and its buffers are the first that would be cast."""
    model: Any = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4))
    ctx = FsdpContext()
    fully_shard(model[1], ctx)
    fully_shard(model, ctx)
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="cannot become"):
        model.double()
    assert model[0].running_mean.dtype == torch.float32


def test_a_refusal_comes_before_any_module_is_changed() -> None:
    run_ranks(buffers_stay, 1)


def list_of_modules() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([model[0], model[1]], FsdpContext())
    with pytest.raises(RuntimeError, match="as one of several modules of a unit: cast it before"):
        model.double()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_lists_of_modules_are_cast_before() -> None:
    run_ranks(list_of_modules, 1)


def cast_on_one_rank() -> None:
    model = build()
    shard_layers(model, FsdpContext())
    if torch.distributed.get_rank() == 0:
        model.double()
    with pytest.raises(RuntimeError, match=r"float64|different|other"):
        model(tokens())


def test_a_cast_on_some_ranks_alone_is_an_error() -> None:
    run_ranks(cast_on_one_rank, 2)


def parts(layout: Any) -> None:
    model = build()
    shard_layers(model, FsdpContext(layout=layout))
    linear = model.layers[0].up
    for change in (half, to_meta, nn.Module.float):
        with pytest.raises(RuntimeError, match=r"before fully_shard\(\), or cast a unit"):
            change(linear)
    assert isinstance(linear.weight, (RaggedDTensor, RowTensor))
    assert linear.weight.dtype == torch.float32
    torch.testing.assert_close(model(tokens()), build()(tokens()))


@pytest.mark.parametrize("layout", [Flat(), PerTensor()])
def test_a_part_of_a_unit_is_not_cast_or_moved_alone(layout: Any) -> None:
    run_ranks(parts, 2, layout)


def assigned(layout: Any, device: str) -> None:
    state = build(BF16).state_dict()
    found = []
    for shard in (partial(fully_shard, ctx=FsdpContext(layout=layout)), torchs_fully_shard):
        model = build(device=device)
        for module in (*model.layers, model):
            shard(module)
        given = {}
        for name, value in state.items():
            mine = model.state_dict()[name]
            is_theirs = type(mine) is DTensor
            given[name] = (
                distribute_tensor(value, mine.device_mesh, mine.placements) if is_theirs else value
            )
        model.load_state_dict(given, assign=True)
        assert {parameter.dtype for parameter in model.parameters()} == {BF16}
        train(model, optimizer_of(model))
        found.append([parameter.full_tensor() for parameter in model.parameters()])
        if shard is not torchs_fully_shard:
            later = {name: value.half() for name, value in state.items()}
            with pytest.raises(RuntimeError, match=r"as torch\.float16, and it is sharded as"):
                model.load_state_dict(later, assign=True)
    for mine, its in zip(*found, strict=True):
        same_as(its, mine)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layout", [Flat(), PerTensor()])
def test_a_state_dict_in_another_dtype_is_assigned_as_in_fsdp2(layout: Any, device: str) -> None:
    run_ranks(assigned, 2, layout, device)
