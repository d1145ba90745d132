"""Units that only some ranks run train as one process would from the mean of the ranks' losses."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.emulator import EmulatedDevice, compare_issued, running
from fsdp_overlap.layout import Flat, LayoutRule, PerTensor, TensorAtomic
from fsdp_overlap.optim import AdamW
from fsdp_overlap.schedule.prefetch import Prefetcher
from support.held import held_of
from support.nccl_like import BACKEND, unseen
from support.ranks import run_ranks

WIDTH = 6
Order = Sequence[str] | None
"""The parts that a rank runs, by name, or ``None`` if it shadows the others."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def run(part: nn.Module, x: torch.Tensor, wrap: str) -> torch.Tensor:
    return checkpoint(part, x, use_reentrant=wrap == "reentrant") if wrap else part(x)


class Tower(nn.Module):
    """Blocks that are units of their own, and a parameter beside them."""

    def __init__(self, wrap: str) -> None:
        super().__init__()
        self.wrap = wrap
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = run(block, x, self.wrap)
        return x * self.scale


class Model(nn.Module):
    """Runs what it is told to: its parts by name, among them the layers that all ranks run."""

    def __init__(self, wrap: str = "") -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "tower": Tower(wrap),
                "expert": Block(),
                "other": Block(),
                "first": Block(),
                "second": Block(),
            }
        )
        self.head = nn.Linear(WIDTH, 3)
        self.wrap = wrap

    def forward(self, x: torch.Tensor, order: Sequence[str]) -> torch.Tensor:
        x = x + x.new_zeros(()).requires_grad_()  # for reentrant checkpoints
        for name in order:
            part = self.parts[name]
            x = part(x) if name == "tower" else run(part, x, self.wrap)
        return self.head(x)


CONDITIONAL = ("tower", "expert", "other")
SAME = ("first", "second")


def shard(model: Model, ctx: FsdpContext, **options: Any) -> None:
    for block in model.parts["tower"].blocks:
        fully_shard(block, ctx, **options)
    for name, part in model.parts.items():
        fully_shard(part, ctx, conditional=name in CONDITIONAL, **options)
    fully_shard(model, ctx, **options)


class Pair:
    """A sharded model and its unsharded twin."""

    def __init__(
        self,
        wrap: str = "",
        ctx: FsdpContext | None = None,
        device: str = "cpu",
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Model(wrap).double().to(device)
        self.twin = copy.deepcopy(self.model)
        self.ctx = ctx or FsdpContext(init_device_mesh(device, (dist.get_world_size(),)))
        shard(self.model, self.ctx, **options)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.twin_optimizer = torch.optim.AdamW(self.twin.parameters(), lr=0.01)

    def inputs(self, step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        size = dist.get_world_size(), 4, WIDTH
        return list(torch.randn(size, generator=generator, dtype=torch.float64).to(self.device))

    def backward(self, step: int, orders: Sequence[Order]) -> None:
        """Run this rank's order of ``orders``, and all of them on the twin."""
        batches = self.inputs(step)
        order = orders[dist.get_rank()]
        if order is None:
            self.ctx.shadow()
        else:
            self.model(batches[dist.get_rank()], order).square().mean().backward()
        with unseen():
            losses = [
                self.twin(batch, order).square().mean() / len(batches)
                for batch, order in zip(batches, orders, strict=True)
                if order is not None
            ]
            if losses:
                sum(losses).backward()

    def check(self) -> None:
        for (name, parameter), twin in zip(
            self.model.named_parameters(), self.twin.parameters(), strict=True
        ):
            assert (parameter.grad is None) == (twin.grad is None), name
            if twin.grad is not None:
                local, rest = parameter.grad.to_local(), held_of(twin.grad, parameter)
                with unseen():
                    torch.testing.assert_close(local.flatten(), rest, msg=name)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        with unseen():
            self.twin_optimizer.step()
            self.twin_optimizer.zero_grad()

    def evaluate(self, step: int, orders: Sequence[Order]) -> None:
        batch, order = self.inputs(step)[dist.get_rank()], orders[dist.get_rank()]
        if order is None:
            self.ctx.shadow()
            return
        with torch.no_grad():
            found = self.model(batch, order)
            with unseen():
                torch.testing.assert_close(found, self.twin(batch, order))

    def train(self, steps: Sequence[Sequence[Order]]) -> None:
        for number, orders in enumerate(steps):
            self.backward(number, orders)
            self.check()
            self.step()


def first_only(*orders: Order) -> list[Order]:
    """On rank 0 the first order, on the others in turn."""
    world_size = dist.get_world_size()
    return [orders[rank % len(orders)] for rank in range(world_size)]


def towers(**options: Any) -> None:
    pair = Pair(**options)
    image, text = ("tower", *SAME), SAME
    pair.train(
        [
            first_only(image, text),
            first_only(text, image),
            first_only(text, text),
            first_only(image, image),
            first_only(image, text),
            first_only(image, None),
            first_only(None, text),
            first_only(None, None),
        ]
    )
    pair.evaluate(7, first_only(text, image))
    pair.evaluate(8, first_only(None, image))
    pair.train([first_only(image, text)])
    if "reshard_after_forward" not in options:
        assert not any(unit.is_gathered for unit in pair.ctx.units if not unit.is_root)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_tower_that_some_ranks_run(world_size: int) -> None:
    run_ranks(towers, world_size)


class TowerAlone(nn.Module):
    """Trains its tower and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.rest = Block(), Block().requires_grad_(False)

    def forward(self, x: torch.Tensor, has_image: bool) -> torch.Tensor:
        return self.rest(self.tower(x) if has_image else x).square().mean()


def losses_without_gradients() -> None:
    torch.manual_seed(0)
    model = TowerAlone().double()
    twin = copy.deepcopy(model)
    ctx = FsdpContext(init_device_mesh("cpu", (2,)))
    fully_shard(model.tower, ctx, conditional=True)
    fully_shard(model.rest, ctx)
    fully_shard(model, ctx)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    # What a forward saves is looked at in some alone, the 1st, 2nd, 4th ..., and holds for others.
    for images in [(0, 0), (1, 0), (0, 1), (1, 1), (1, 0), (1, 0), (0, 1), (0, 0), (0, 1)]:
        model.zero_grad()
        twin.zero_grad()
        loss = model(x[dist.get_rank()], images[dist.get_rank()])
        if loss.requires_grad:
            loss.backward()
        else:
            ctx.shadow()
        for rank, has_image in enumerate(images):
            if has_image:
                (twin(x[rank], True) / 2).backward()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            if other.grad is not None:
                local, rest = parameter.grad.to_local(), held_of(other.grad, parameter)
                torch.testing.assert_close(local.flatten(), rest)


def test_ranks_without_gradients_shadow_the_backward() -> None:
    run_ranks(losses_without_gradients, 2)


def an_order(generator: random.Random) -> list[str]:
    """Any of the conditional parts, in any order, around those that all ranks run."""
    order = list(SAME)
    for name in generator.choices(CONDITIONAL, k=generator.randint(0, 3)):
        order.insert(generator.randint(0, len(order)), name)
    return order


def some_options(generator: random.Random) -> dict[str, Any]:
    choose = generator.choice
    world_size = dist.get_world_size()
    layouts: list[LayoutRule] = [Flat(), TensorAtomic(), PerTensor()]
    divides, mesh = False, init_device_mesh("cpu", (world_size,))
    if world_size == 4 and choose((False, True)):
        divides = choose((False, True))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ctx = FsdpContext(
        mesh,
        prefetch=choose((0, 1, 2)),
        layout=choose(layouts[:2] if divides else layouts),
        validate_layouts=choose((False, True)),
        shard_optimizer_over_replicas=divides,
    )
    kept: list[bool | int | None] = [None, True, False]
    if world_size == 4 and mesh.ndim == 1:
        kept.append(2)
    return {
        "ctx": ctx,
        "wrap": choose(("", "reentrant", "not reentrant")),
        "optimizer": choose((torch.optim.AdamW, AdamW)),
        "reshard_after_forward": choose(kept),
    }


def random_programs(count: int, seed: str) -> None:
    for number in range(count):
        generator = random.Random(f"{seed} {number}")
        try:
            run_program(generator)
        except Exception as error:
            error.add_note(f"program {number} of {seed!r}")
            raise


def run_program(generator: random.Random) -> None:
    pair = Pair(**some_options(generator))
    stage = generator.choice((3, 3, 2, 1))
    if stage < 3:
        pair.model.set_zero_stage(stage)
    for step in range(generator.randint(2, 5)):
        orders = [an_order(generator) for _ in range(dist.get_world_size())]
        for rank in range(len(orders)):
            if generator.random() < 0.1:
                orders[rank] = None
        if generator.random() < 0.2:
            orders = [orders[0]] * len(orders)
        kind = generator.choice(("train", "train", "train", "accumulate", "evaluate", "reset"))
        if kind == "evaluate":
            pair.evaluate(step, orders)
        elif kind == "reset":
            pair.ctx.reset()
        else:
            if kind == "accumulate":
                if generator.random() < 0.5:
                    pair.model.set_requires_gradient_sync(False)
                pair.backward(step + 100, orders)
                pair.model.set_requires_gradient_sync(True)
                orders = [an_order(generator) for _ in orders]
            pair.backward(step, orders)
            pair.check()
            pair.step()


@pytest.mark.parametrize(("world_size", "programs"), [(2, 60), (3, 25), (4, 15)])
def test_random_programs_train_as_unsharded(world_size: int, programs: int) -> None:
    run_ranks(random_programs, world_size, programs, "suite", timeout=100)


# On the emulated device, where the host runs ahead.

EMULATED: dict[str, dict[str, Any]] = {
    "": {},
    "reentrant checkpoints": {"wrap": "reentrant"},
    "checkpoints": {"wrap": "not reentrant"},
    "kept until backward": {"reshard_after_forward": False},
}


def held_by_one_and_needed_by_the_other() -> None:
    """What a rank keeps until backward is gathered again, in place, when the other runs it."""
    pair = Pair(device="emulated", reshard_after_forward=False)
    pair.train([first_only(("expert", *SAME), (*SAME, "expert"))] * 3)


def on_the_device(defect: str) -> tuple[list[str], Any]:
    with running(EmulatedDevice()) as device, DEFECTS[defect]():
        for options in EMULATED.values():
            towers(device="emulated", **options)
        held_by_one_and_needed_by_the_other()
    return list(dict.fromkeys(map(str, device.findings))), device.issued


def written_while_it_is_read() -> AbstractContextManager[object]:
    """What this rank holds is gathered again for others, and compute does not wait."""
    return patch.object(Prefetcher, "_gather_agreed", gather_without_waits)


def gather_without_waits(self: Prefetcher, unit: Any, gather: Any) -> None:
    gather.is_issued = True
    if unit.is_unsharded:
        self._comm.gather(unit, again=True)
    else:
        self._gather(unit)


DEFECTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "": nullcontext,
    "written while it is read": written_while_it_is_read,
}


def test_nothing_is_left_unordered_on_a_device() -> None:
    seen = run_ranks(on_the_device, 2, "", backend=BACKEND, timeout=100)
    assert [findings for findings, _ in seen] == [[], []]
    assert compare_issued([issued for _, issued in seen]) is None


@pytest.mark.parametrize("defect", [name for name in DEFECTS if name])
def test_a_planted_defect_is_found(defect: str) -> None:
    seen = run_ranks(on_the_device, 2, defect, backend=BACKEND, timeout=100)
    assert any(findings for findings, _ in seen)
