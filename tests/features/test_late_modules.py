"""Modules and parameters that are put into a unit after it was made: what nobody would train alike
on all ranks is an error, and everything else is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.layout import Flat, LayoutRule
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks

ADDED = r"parameter '{}' of unit '{}' was added after fully_shard\(\), so no unit owns it"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.ones(2, 4))
        self.b = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def sharded(layout: LayoutRule, **options: Any) -> Any:
    torch.manual_seed(0)
    ctx = FsdpContext(layout=layout)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, ctx, **options)
    return model


def step(model: Any) -> None:
    x = torch.full((2, 4), dist.get_rank() + 1.0)
    parameters = [each for each in model.parameters() if each.requires_grad]
    model(x).sum().backward()
    torch.optim.SGD(parameters, lr=0.1).step()
    model.zero_grad()


def steps(model: Any, count: int) -> None:
    for _ in range(count):
        step(model)


def same_everywhere(model: nn.Module) -> bool:
    for parameter in model.state_dict().values():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        others = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(others, whole.detach().contiguous())
        if not all(torch.equal(each, whole) for each in others):
            return False
    return True


def swap_unit(model: Any) -> None:
    model[2] = nn.Linear(4, 4)


def swap_within_unit(model: Any) -> None:
    model[0].up = nn.Linear(4, 4)


def append(model: Any) -> None:
    model.append(nn.Linear(4, 4))


def add_parameter(model: Any) -> None:
    model[1].gain = nn.Parameter(torch.ones(4))


def adapt(model: Any) -> None:
    model.requires_grad_(False)
    for block in model[:2]:
        block.down = Lora(block.down)


def adapt_a_unit(model: Any) -> None:
    model[2] = Lora(model[2])


def write_to_the_table(model: Any) -> None:
    model[0].up._modules["late"] = nn.Linear(4, 4)


def unfreeze(model: Any) -> None:
    model[1].up.norm = nn.LayerNorm(4).requires_grad_(False)
    step(model)
    model[1].requires_grad_(True)


LATE: dict[Callable[[Any], None], tuple[str, str]] = {
    swap_unit: ("2.weight", "Sequential"),
    swap_within_unit: ("up.weight", "0"),
    append: ("3.weight", "Sequential"),
    add_parameter: ("gain", "1"),
    adapt: ("down.a", "0"),
    adapt_a_unit: ("2.a", "Sequential"),
    write_to_the_table: ("up.late.weight", "0"),
    unfreeze: ("up.norm.weight", "1"),
}


def late(layout: LayoutRule) -> None:
    for change, names in LATE.items():
        model = sharded(layout)
        steps(model, 5)
        change(model)
        with torch.no_grad():
            model(torch.ones(2, 4))  # trains nothing
        with pytest.raises(RuntimeError, match=ADDED.format(*names)):
            steps(model, 2 if change is unfreeze else 1)  # forwards 7 and 8


@pytest.mark.parametrize("layout", [Flat(), PerTensor()], ids=str)
def test_parameters_that_nobody_would_train_alike_are_an_error(layout: LayoutRule) -> None:
    run_ranks(late, 2, layout)


def swapped_values() -> None:
    """A parameter in the place of another, and one that a parametrization moves."""
    model = sharded(Flat())
    step(model)
    model[0].up.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="'weight' of unit '0' was replaced after fully_sha"):
        step(model)
    model = sharded(Flat())
    step(model)
    with pytest.raises(RuntimeError, match="Cannot swap"):
        parametrize.register_parametrization(model[0].up, "weight", nn.Identity())


def test_a_parameter_that_takes_anothers_place_is_an_error() -> None:
    run_on_fake_group(swapped_values, 2)


def harmless() -> None:
    model = sharded(Flat())
    step(model)
    # Frozen, as what quantization puts in the place of a layer.
    model[0].up = nn.Linear(4, 4).requires_grad_(False)
    step(model)
    # Within no parameters of its own, and without any.
    model[1].act = nn.Sequential(nn.Dropout(0.0))
    model[1].register_buffer("seen", torch.ones(1))
    step(model)
    # The same module under a second name.
    model[1].also = model[1].up
    step(model)
    # Removed.
    del model[1].also, model[1].act
    step(model)
    # A unit of its own.
    ctx = model._fsdp_unit.context
    model[2] = fully_shard(nn.Linear(4, 4), ctx)
    model.append(fully_shard(Lora(nn.Linear(4, 4)), ctx))
    step(model)
    assert same_everywhere(model)
    # What torch trains.
    model[0].late = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    step(model)


def ignored() -> None:
    torch.manual_seed(0)
    for device in ("cpu", "meta"):
        block = Block().to(device)
        kept = frozenset(block.up.parameters())
        fully_shard(block, FsdpContext(), ignored_params=set(kept))
        if device == "meta":
            block.to_empty(device="cpu")
            assert not kept & {*block.up.parameters()}
            for parameter in block.parameters():
                nn.init.ones_(parameter)
        block.load_state_dict(block.state_dict(), assign=True)
        block.norm = nn.LayerNorm(4).requires_grad_(False)
        for model in (block, copy.deepcopy(block)):
            step(model)
            model.up.weight = nn.Parameter(torch.ones(4, 4))
            step(model)
            assert type(model.up.weight) is nn.Parameter


def test_what_is_trained_otherwise_or_not_at_all_is_left_alone() -> None:
    run_ranks(harmless, 2)
    run_ranks(ignored, 2)


def looks() -> None:
    model = sharded(Flat())
    unit = model[0]._fsdp_unit
    unowned = unit.unowned
    forwards = []
    find = unowned.find
    unowned.find = lambda *args: forwards.append(unit.forwards) or find(*args)
    for _ in range(20):
        step(model)
    assert forwards == [1, 2, 4, 8, 16]


def test_a_steady_step_does_not_look() -> None:
    run_ranks(looks, 2)
