"""The commonest mistakes of those who begin, and what they read: what was given, and what to do.

What else happens after such an error stands in the tests of arguments, faults, disagreement and
stale optimizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard, register_fsdp_forward_method
from support.fake_group import run_on_fake_group
from support.ranks import expect_rank_errors

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def shard(model: Net) -> Net:
    ctx = FsdpContext()
    for layer in model.layers:
        fully_shard(layer, ctx)
    return fully_shard(model, ctx)


def x() -> torch.Tensor:
    return torch.ones(2, WIDTH)


# ---- a forward that is passed by ----


def calls_forward_by_name() -> None:
    shard(Net()).forward(x()).sum().backward()


def calls_another_method() -> None:
    shard(Net()).features(x()).sum().backward()


def calls_a_module_within() -> None:
    shard(Net()).layers[0].norm(x())


def gives_a_function_the_weight() -> None:
    nn.functional.linear(x(), shard(Net()).layers[0].up.weight)


def stacks_weights() -> None:
    model = shard(Net())
    with torch.no_grad():
        torch.stack([layer.up.weight for layer in model.layers])


PASSED_BY = (
    r"{op} is not supported on a RaggedDTensor: parameter '{name}' of {unit} is sharded except "
    r"while {unit}, its unit, runs, and this rank holds only a range of it\. To compute with it, "
    r"call the whole {unit}, as in module\(x\), not module\.forward\(x\) or a module within it; "
    r"name another method that computes to register_fsdp_forward_method\(\); or call unshard\(\) "
    r"before, once for each backward\. To read it, use full_tensor\(\), on every rank of the mesh, "
    r"or to_local\(\) for this rank's range$"
)


@pytest.mark.parametrize(
    ("mistake", "op", "name", "unit"),
    [
        (calls_forward_by_name, "linear", "head.weight", "Net"),
        (calls_another_method, "linear", "head.weight", "Net"),
        (calls_a_module_within, "layer_norm", "norm.weight", "Block"),
        (gives_a_function_the_weight, "linear", "up.weight", "Block"),
        (stacks_weights, "stack", "up.weight", "Block"),
    ],
)
def test_a_forward_that_is_passed_by(
    mistake: Callable[[], None], op: str, name: str, unit: str
) -> None:
    said = PASSED_BY.format(op=op, name=re.escape(name), unit=unit)
    with pytest.raises(RuntimeError, match=f"^{said}"):
        run_on_fake_group(mistake, 2)


def call_what_was_named() -> None:
    model = shard(Net())
    register_fsdp_forward_method(model, "features")
    model.features(x()).sum().backward()
    assert model.head.weight.grad is not None


def test_a_method_that_is_named_computes() -> None:
    run_on_fake_group(call_what_was_named, 2)


# ---- the others ----


def makes_the_optimizer_first() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model)(x()).sum().backward()
    optimizer.step()


def ties_weights_after_sharding() -> None:
    model = Net()
    shard(model)
    model.layers[1].up.weight = model.layers[0].up.weight
    model(x())


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("planned")


def forgets_to_reset() -> None:
    model = shard(Net())
    with pytest.raises(ArithmeticError, match="planned"):
        model.layers[1](Raises.apply(model.layers[0](x()))).sum().backward()
    model(x())


def runs_units_in_another_order() -> None:
    model = shard(Net())
    first = dist.get_rank()
    hidden = model.layers[first](x())
    model.layers[1 - first](hidden).sum().backward()


def evaluates_on_one_rank() -> None:
    model = shard(Net())
    model(x()).sum().backward()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(x())
    model(x()).sum().backward()


LOOK_FOR = (
    r": every rank must run the same units in the same order\. Look for a forward or backward that "
    r"only some ranks run, such as an evaluation under `if rank == 0`, or a branch on data\. "
    r"To allow it, use fully_shard\(conditional=True\) or ctx\.uneven\(\)"
)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (
            makes_the_optimizer_first,
            r"RuntimeError: AdamW was made before fully_shard\(\), which put another parameter in "
            r"the place of 'up\.weight' of Block: this step would change nothing that the model "
            r"computes with; make the optimizer afterwards, from model\.parameters\(\)$",
        ),
        (
            ties_weights_after_sharding,
            r"RuntimeError: parameter 'weight' of unit 'layers\.1' was replaced after "
            r"fully_shard\(\) by another, and either its unit has run or weights are tied, which "
            r"would not be trained: assign and tie parameters before, ",
        ),
        (
            forgets_to_reset,
            r"RuntimeError: the last backward did not finish \(did it raise, and was the error "
            r"caught\?\); after an error call ctx\.reset\(\), or model\.reset_iter_state\(\), "
            r"which is the same, and optimizer\.zero_grad\(\) on every rank before the next "
            r"forward$",
        ),
        (
            runs_units_in_another_order,
            r"rank 0: all_gather of unit 'layers\.0'; rank 1: all_gather of unit 'layers\.1'"
            + LOOK_FOR,
        ),
        (
            evaluates_on_one_rank,
            r"rank 0: all_gather of unit 'Net'; rank 1: all_gather of unit 'layers\.0'" + LOOK_FOR,
        ),
    ],
)
def test_a_mistake_is_explained(mistake: Callable[[], None], said: str) -> None:
    expect_rank_errors(mistake, 2, match=said)
