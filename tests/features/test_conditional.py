"""Units that only some ranks run train as one process would from the mean of the ranks' losses."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import (
    CPUOffloadPolicy,
    FsdpContext,
    MixedPrecisionPolicy,
    PerTensor,
    QuantizedCommPolicy,
    fully_shard,
)
from fsdp_overlap.comm import process_groups
from fsdp_overlap.comm.comm_streams import DeviceCommStream, DeviceWorkHandle
from fsdp_overlap.comm.optimizer_groups import MESSAGES
from fsdp_overlap.engine.comm_context import SHADOW, CommContext
from fsdp_overlap.features.negotiation.gathers import NegotiatedPrefetcher
from fsdp_overlap.features.uneven import hosts
from fsdp_overlap.layout import Flat, LayoutRule, TensorAtomic
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from fsdp_overlap.tools.emulator import EmulatedDevice, compare_issued, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND, unseen
from support.defects import Defect
from support.extensions import Rounded, with_matrices_of
from support.fake_group import run_on_fake_group
from support.held import held_of
from support.ranks import expect_rank_errors, run_ranks
from support.tensor_parallel import (
    Transformer,
    batches,
    grad,
    loss_of,
    make_mesh,
    mine,
    parallelize,
    same,
)
from support.two_ranks import DEVICES, run_two

WIDTH = 6
Order = Sequence[str] | None
"""The parts that a rank runs, by name, or ``None`` if it shadows the others."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def run(part: Callable[..., Any], x: torch.Tensor, wrap: str) -> torch.Tensor:
    return checkpoint(part, x, use_reentrant=wrap.startswith("reentrant")) if wrap else part(x)


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
        if self.wrap.endswith("pairs"):
            for pair in batched(order, 2):
                x = run(partial(self.run_all, pair), x, self.wrap)
            return self.head(x)
        for name in order:
            part = self.parts[name]
            x = part(x) if name == "tower" else run(part, x, self.wrap)
        return self.head(x)

    def run_all(self, names: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = self.parts[name](x)
        return x


def batched(order: Sequence[str], size: int) -> list[Sequence[str]]:
    return [order[at : at + size] for at in range(0, len(order), size)]


CONDITIONAL = ("tower", "expert", "other")
SAME = ("first", "second")


def shard(model: Model, ctx: FsdpContext, leaves_root_empty: bool = False, **options: Any) -> None:
    if leaves_root_empty:
        fully_shard(model.head, ctx, **options)
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
        tolerance: float | None = None,
        frozen: Sequence[str] = (),
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.tolerance = tolerance
        self.model = Model(wrap).double().to(device)
        for name in frozen:
            self.model.parts[name].requires_grad_(False)
        self.twin = copy.deepcopy(self.model)
        self.ctx = ctx or FsdpContext(init_device_mesh(device, (dist.get_world_size(),)))
        shard(self.model, self.ctx, **options)
        self.optimizer, self.twin_optimizer = (
            Muon(model, lr=0.01) if optimizer is Muon else optimizer(model.parameters(), lr=0.01)
            for model in (self.model, self.twin)
        )

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
                    torch.testing.assert_close(
                        local.flatten().cpu(),
                        rest.cpu(),
                        rtol=self.tolerance,
                        atol=self.tolerance,
                        msg=lambda text, name=name: f"{name}: {text}",
                    )

    def step(self) -> None:
        norm = clip_grad_norm_(self.model.parameters(), 0.1)
        with unseen():
            expected = torch.nn.utils.clip_grad_norm_(self.twin.parameters(), 0.1)
            tolerance = self.tolerance
            torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=tolerance, atol=tolerance)
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
                rtol = atol = self.tolerance
                expected = self.twin(batch, order)
                torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)

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
    if not options:
        whole = get_model_state_dict(pair.model, options=StateDictOptions(full_state_dict=True))
        torch.testing.assert_close(whole, dict(pair.twin.state_dict()))
    if "reshard_after_forward" not in options:
        assert not any(unit.is_gathered for unit in pair.ctx.units if not unit.is_root)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_tower_that_some_ranks_run(world_size: int) -> None:
    run_ranks(towers, world_size)


def steps_in_threads() -> None:
    """Each thread numbers the nodes of autograd's graph by itself."""
    pair = Pair("reentrant pairs", leaves_root_empty=True)
    orders = first_only(("tower", *SAME), SAME)
    pair.train([orders] * 2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pair.train, [orders] * 2).result()


def test_steps_may_run_in_another_thread() -> None:
    run_ranks(steps_in_threads, 2)


MODES: dict[str, dict[str, Any]] = {
    "Muon": {"optimizer": Muon},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "bfloat16": {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "tolerance": 0.1,
    },
    "8 bits": {"comm_policy": QuantizedCommPolicy(torch.int8), "tolerance": 0.1},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_tower_in_other_modes(mode: str) -> None:
    run_ranks(partial(towers, **MODES[mode]), 2)


class Skipping(Transformer):
    """Skips its first layer if told to."""

    skips = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers[self.skips :]:
            x = layer(x)
        return self.head(self.norm(x)) * self.temperature


def beside_tensor_parallelism() -> None:
    mesh = make_mesh()
    torch.manual_seed(0)
    twin = Skipping().double()
    model = parallelize(copy.deepcopy(twin), mesh["tp"])
    ctx = FsdpContext(mesh["dp"])
    fully_shard(model.layers[0], ctx, conditional=True)
    fully_shard(model.layers[1], ctx)
    fully_shard(model, ctx)
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for step, (tokens, targets) in enumerate(batches(4, size)):
        skips = [(step + other) % 3 == 0 for other in range(size)]
        model.skips = skips[rank]
        loss_of(model, mine(mesh, tokens), mine(mesh, targets)).backward()
        for twin.skips, some, those in zip(
            skips, tokens.chunk(size), targets.chunk(size), strict=True
        ):
            (loss_of(twin, some, those) / size).backward()
        same(model, twin, "gradient", grad)
        model.zero_grad()
        twin.zero_grad()


def test_a_layer_beside_tensor_parallelism() -> None:
    run_ranks(beside_tensor_parallelism, 4)


class WithExpert(nn.Module):
    runs_for_nothing = False

    def __init__(self) -> None:
        super().__init__()
        self.body, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, runs: bool) -> torch.Tensor:
        x = torch.tanh(self.body(x))
        if self.runs_for_nothing and not runs:
            x = x + 0 * self.expert(x)
        return (self.expert(x) if runs else x).square().mean()


def on_a_mesh_of_its_own() -> None:
    """Ranks 0 and 1 share an expert, 2 and 3 another one."""
    torch.manual_seed(0)
    twin, rank = WithExpert().double(), dist.get_rank()
    model = copy.deepcopy(twin)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ctx = FsdpContext(init_device_mesh("cpu", (4,)))
    fully_shard(model.expert, ctx, mesh=grid["inner"], conditional=True)
    fully_shard(model, ctx)
    for step, runs in enumerate([(1, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 0), (0, 0, 0, 0)]):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 3, WIDTH, dtype=torch.double, generator=generator)
        model(x[rank], runs[rank]).backward()
        neighbors = copy.deepcopy(twin)
        for module, ranks in ((twin, range(4)), (neighbors, (rank // 2 * 2, rank // 2 * 2 + 1))):
            for other in ranks:
                (module(x[other], runs[other]) / len(ranks)).backward()
        for part, whole in ((model.body, twin.body), (model.expert, neighbors.expert)):
            for parameter, other in zip(part.parameters(), whole.parameters(), strict=True):
                assert (parameter.grad is None) == (other.grad is None)
                if other.grad is not None:
                    expected = held_of(other.grad, parameter)
                    torch.testing.assert_close(parameter.grad.to_local().flatten(), expected)
        model.zero_grad()
        twin.zero_grad()


def test_a_unit_on_a_mesh_of_its_own() -> None:
    run_ranks(on_a_mesh_of_its_own, 4)


def with_extensions() -> None:
    """As a model that is not conditional, whose ranks run the expert for nothing."""
    torch.manual_seed(0)
    built = with_matrices_of(Rounded, WithExpert)
    model, other = built, copy.deepcopy(built)
    other.runs_for_nothing = True
    for each, conditional in ((model, True), (other, False)):
        ctx = FsdpContext(layout=PerTensor())
        fully_shard(each.expert, ctx, conditional=conditional)
        fully_shard(each, ctx)
    for step, runs in enumerate([(1, 0), (0, 1), (1, 1), (1, 0)]):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = runs[dist.get_rank()]
        loss = model(x, mine)
        loss.backward()
        expected = other(x, mine)
        expected.backward()
        assert torch.equal(loss, expected)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad.to_local(), two.grad.to_local())
        model.zero_grad()
        other.zero_grad()


def test_tensor_extensions() -> None:
    run_ranks(with_extensions, 2)


class Heads(nn.Module):
    """Two modules that are one unit, of which each rank runs both, one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        x = torch.tanh(self.body(x))
        return sum((self.heads[head](x) for head in heads), start=x.sum(-1, keepdim=True))


def heads_of_one_unit() -> None:
    torch.manual_seed(0)
    twin = Heads().double()
    model = copy.deepcopy(twin)
    ctx = FsdpContext()
    fully_shard(list(model.heads), ctx, conditional=True)
    fully_shard(model, ctx)
    runs = [[[0, 1], []], [[], [1]], [[0], [0, 1]], [[], []], [[1, 0], [0]]]
    for step, by_rank in enumerate(runs):
        x = torch.randn(2, 3, WIDTH, dtype=torch.double, generator=torch.manual_seed(step))
        model(x[dist.get_rank()], by_rank[dist.get_rank()]).square().mean().backward()
        for rows, heads in zip(x, by_rank, strict=True):
            (twin(rows, heads).square().mean() / 2).backward()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            if other.grad is not None:
                expected = held_of(other.grad, parameter)
                torch.testing.assert_close(parameter.grad.to_local().flatten(), expected)
        model.zero_grad()
        twin.zero_grad()


def test_modules_of_one_unit() -> None:
    run_ranks(heads_of_one_unit, 2)


def several_backwards(
    ways: Sequence[str], device: str = "cpu", accumulates: int = 1, **options: Any
) -> None:
    """Of one forward: again, of two losses, or of a loss and the gradients of inputs."""
    pair = Pair(device=device, **options)
    image, text = ("tower", "expert", *SAME), (*SAME, "other")

    def backward(
        model: nn.Module, x: torch.Tensor, order: Sequence[str], way: str, scale: float
    ) -> None:
        x = x.clone().requires_grad_()
        out = model(x, order)
        if way == "again":
            (out.square().mean() * scale).backward(retain_graph=True)
            (out.square().mean() * scale).backward()
        elif way == "two losses":
            (out[:, 0].square().mean() * scale).backward(retain_graph=True)
            (out[:, 1].exp().mean() * scale).backward()
        elif way == "of inputs":
            torch.autograd.grad(out.square().mean(), x, retain_graph=True)
            (out.square().mean() * scale).backward()
        else:
            [slope] = torch.autograd.grad(out.square().mean(), x, create_graph=True)
            ((out.mean() + slope.abs().sum()) * scale).backward()

    for step, way in enumerate(ways):
        orders = first_only(*((image, text), (text, image), (image, None))[step % 3])
        x, order = pair.inputs(step), orders[dist.get_rank()]
        if order is None:
            pair.ctx.shadow()
            pair.ctx.shadow()
        else:
            backward(pair.model, x[dist.get_rank()], order, way, 1.0)
        with unseen():
            for rows, other in zip(x, orders, strict=True):
                if other is not None:
                    backward(pair.twin, rows, other, way, 1 / len(orders))
        pair.check()
        if step % accumulates == accumulates - 1:
            pair.step()


WAYS = ("again", "two losses", "of inputs", "gradients of gradients")


@pytest.mark.parametrize("way", WAYS)
def test_several_backwards_of_one_forward(way: str) -> None:
    run_ranks(several_backwards, 2, [way] * 6)


@pytest.mark.parametrize("leaves_root_empty", [False, True])
def test_what_some_ranks_hold_is_kept_for_graphs_by_all(leaves_root_empty: bool) -> None:
    """Nothing is edited for three backwards, so that graphs keep what they read."""
    options = {"reshard_after_forward": False, "leaves_root_empty": leaves_root_empty}
    backwards = partial(several_backwards, accumulates=3, **options)
    run_ranks(backwards, 2, ["gradients of gradients", "again"] * 3)


# Ranks that run different numbers of forwards


def until_all_done(device: str = "cpu") -> None:
    """No unit is conditional. A rank without a batch adds zero."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    twin = Model().double().to(device)
    model = copy.deepcopy(twin)
    ctx = FsdpContext(init_device_mesh(device, (world_size,)))
    for part in (*model.parts["tower"].blocks, *model.parts.values(), model):
        fully_shard(part, ctx)
    optimizer, twin_optimizer = (AdamW(each.parameters(), lr=0.01) for each in (model, twin))
    generator = torch.Generator().manual_seed(1)
    loaders = [
        torch.randn(2 + 2 * other, 4, WIDTH, dtype=torch.double, generator=generator).to(device)
        for other in range(world_size)
    ]
    steps = 0
    for batch in ctx.until_all_done(loaders[rank]):
        if batch is None:
            ctx.shadow()
        else:
            model(batch, ("tower", *SAME)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with unseen():
            for loader in loaders:
                if steps < len(loader):
                    loss = twin(loader[steps], ("tower", *SAME)).square().mean()
                    (loss / world_size).backward()
            twin_optimizer.step()
            twin_optimizer.zero_grad()
        steps += 1
    assert steps == 2 * world_size
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        with unseen():
            held = held_of(other, parameter)
            torch.testing.assert_close(parameter.to_local().flatten(), held)
    with patch.object(type(ctx.comm_context), "exchange", forbidden):
        model(loaders[0][0], ("tower", *SAME)).square().mean().backward()


def forbidden(*_: object) -> None:
    raise AssertionError("a message was sent")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loader_that_runs_out(world_size: int) -> None:
    run_ranks(until_all_done, world_size)


def different_numbers_of_forwards() -> None:
    pair = Pair()
    counts = [3, 0, 5][: dist.get_world_size()]
    for _ in range(2):
        with pair.ctx.uneven(), torch.no_grad():
            x = twin = pair.inputs(0)[dist.get_rank()]
            for _ in range(counts[dist.get_rank()]):
                x = pair.model(x, ("expert", *SAME)).repeat(1, WIDTH // 3)
                with unseen():
                    twin = pair.twin(twin, ("expert", *SAME)).repeat(1, WIDTH // 3)
                    torch.testing.assert_close(x, twin)
        pair.train([first_only(("tower", *SAME), SAME)])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_leave_at_different_times(world_size: int) -> None:
    run_ranks(different_numbers_of_forwards, world_size)


def serves_alone() -> None:
    pair = Pair()
    for _ in range(2):
        pair.train([first_only(("tower", "expert", *SAME), None)])
    if dist.get_rank() == 1:
        assert pair.ctx.stats.all_gathers > 20
        assert pair.ctx.stats.peak_full_buffers == 1


def test_a_rank_that_only_serves_holds_one_full_buffer() -> None:
    run_ranks(serves_alone, 2)


class Towers(nn.Module):
    """Several forwards of units that no unit is around."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.text = (nn.Sequential(Block(), Block()) for _ in range(2))


def without_a_root() -> None:
    torch.manual_seed(0)
    twin = Towers().double()
    model = copy.deepcopy(twin)
    ctx = FsdpContext()
    for block in (*model.tower, *model.text):
        fully_shard(block, ctx)
    fully_shard(model.tower, ctx, conditional=True)
    fully_shard(model.text, ctx)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(2, 3, WIDTH, dtype=torch.double, generator=generator)

        def loss(part: Towers, rank: int, step: int = step, x: torch.Tensor = batches) -> Any:
            has_image = (rank + step) % 2 == 0
            return part.text(part.tower(x[rank]) if has_image else x[rank]).square().mean()

        loss(model, dist.get_rank()).backward()
        sum(loss(twin, rank) / 2 for rank in range(2)).backward()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            expected = held_of(other.grad, parameter)
            torch.testing.assert_close(parameter.grad.to_local().flatten(), expected)
        model.zero_grad()
        twin.zero_grad()


def test_units_that_no_unit_is_around() -> None:
    run_ranks(without_a_root, 2)


# Errors


def refused() -> None:
    model = Model().double()
    ctx = FsdpContext()
    for part in model.parts.values():
        fully_shard(part, ctx)
    fully_shard(model, ctx)
    with pytest.raises(RuntimeError, match=r"within `with ctx.uneven\(\):` on all ranks"):
        ctx.shadow()


def test_what_cannot_be_right_is_refused() -> None:
    run_on_fake_group(refused, 2)


class Stop(Exception):
    pass


def stops(*_: object) -> None:
    raise Stop


def an_error_in_forward(part: str) -> None:
    """Where one rank alone raises, the others are told when it calls ``reset()``."""
    pair = Pair()
    orders = first_only(("expert", "tower", *SAME), ("expert", *SAME))
    pair.train([orders] * 2)
    handle = pair.model.parts[part].register_forward_pre_hook(stops)
    raises_here = part in (orders[dist.get_rank()] or ())
    with pytest.raises(Stop if raises_here else RuntimeError, match="" if raises_here else "reset"):
        pair.backward(0, orders)
    handle.remove()
    pair.optimizer.zero_grad()
    pair.twin_optimizer.zero_grad()
    pair.ctx.reset()
    pair.train([orders, orders[::-1], orders])


@pytest.mark.parametrize("part", ["second", "tower"])
def test_training_goes_on_after_an_error(part: str) -> None:
    run_ranks(an_error_in_forward, 2, part)


def in_a_grid(check: Callable[..., None], *args: Any) -> None:
    """Hosts exchange messages within rows and columns of two."""
    with patch.object(hosts, "MAX_PEERS", 1):
        check(*args)


def an_error_on_one_rank(raises_on: int) -> None:
    """The rank across is in another row and another column than the one that raises."""
    pair = Pair()
    orders = first_only(("expert", "tower", *SAME), ("expert", *SAME))
    pair.train([orders] * 2)
    groups = [row for (purpose, row) in pair.ctx._groups.groups if purpose == MESSAGES]
    assert [len(group) for group in groups] == [2, 2]
    handle = None
    if dist.get_rank() == raises_on:
        handle = pair.model.parts["expert"].register_forward_pre_hook(stops)
    with pytest.raises(Stop if handle else RuntimeError, match="" if handle else "reset"):
        pair.backward(0, orders)
    if handle:
        handle.remove()
    pair.optimizer.zero_grad()
    pair.twin_optimizer.zero_grad()
    pair.ctx.reset()
    pair.train([orders, orders[::-1], orders])


@pytest.mark.parametrize("raises_on", [0, 3])
def test_training_in_a_grid_goes_on_after_an_error(raises_on: int) -> None:
    run_ranks(in_a_grid, 4, an_error_on_one_rank, raises_on)


def one_rank_is_late() -> None:
    """It says nothing until the others have given up."""
    with patch.object(process_groups, "group_timeout", lambda *_: timedelta(seconds=2)):
        pair = Pair()
        orders = first_only(("tower", *SAME), SAME)
        pair.train([orders])
    if dist.get_rank() == 3:
        time.sleep(5)
    pair.backward(0, orders)


def test_messages_in_a_grid_time_out() -> None:
    """On all ranks, also on the one that does not wait for the late rank itself."""
    expect_rank_errors(partial(in_a_grid, one_rank_is_late), 4, match="negotiation .* failed: ")


def test_ranks_in_a_grid() -> None:
    run_ranks(in_a_grid, 4, towers)
    run_ranks(in_a_grid, 4, until_all_done)


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
    # What a forward saves is looked at in the 1st, 2nd, 4th ... forward alone.
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
        "wrap": choose(("", *WRAPS)),
        "optimizer": choose((torch.optim.AdamW, AdamW)),
        "reshard_after_forward": choose(kept),
        "leaves_root_empty": choose((False, True)),
        "frozen": choose(((), (), ("tower",), ("expert", "first"))),
    }


WRAPS = ("reentrant", "not reentrant", "reentrant pairs", "not reentrant pairs")
"""The kinds of checkpoints: each around one part, or around two and what is within them."""


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


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "programs"), [(2, 60), (3, 25), (4, 15)])
def test_random_programs_train_as_unsharded(world_size: int, programs: int) -> None:
    run_ranks(random_programs, world_size, programs, "suite", timeout=150)


# On the emulated device, where the host runs ahead.

EMULATED: dict[str, dict[str, Any]] = {
    "": {},
    "reentrant checkpoints": {"wrap": "reentrant"},
    "checkpoints": {"wrap": "not reentrant"},
    "reentrant checkpoints of pairs": {"wrap": "reentrant pairs"},
    "checkpoints of pairs": {"wrap": "not reentrant pairs"},
    "kept until backward": {"reshard_after_forward": False},
}


def held_by_one_and_needed_by_the_other() -> None:
    """What a rank keeps until backward is gathered again, in place, when the other runs it."""
    pair = Pair(device="emulated", reshard_after_forward=False)
    pair.train([first_only(("expert", *SAME), (*SAME, "expert"))] * 3)


def stepped_in_backward() -> None:
    """By hooks, as soon as a gradient is reduced: also where this rank only served the gathers."""
    pair = Pair(device="emulated")

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    for parameter in pair.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        order = first_only(("tower", *SAME), SAME)[dist.get_rank()]
        batch = pair.inputs(number)[dist.get_rank()]
        pair.model(batch, order).square().mean().backward()


def on_the_device(defect: str) -> tuple[list[str], Any]:
    with running(EmulatedDevice()) as device, DEFECTS[defect]():
        for options in EMULATED.values():
            towers(device="emulated", **options)
        held_by_one_and_needed_by_the_other()
        stepped_in_backward()
        several_backwards(WAYS, "emulated")
    return list(dict.fromkeys(map(str, device.findings))), device.issued


def written_while_it_is_read() -> AbstractContextManager[object]:
    """What this rank holds is gathered again for others, and compute does not wait."""
    return patch.object(NegotiatedPrefetcher, "_gather_agreed", gather_without_waits)


def gather_without_waits(
    self: NegotiatedPrefetcher, unit: Any, gather: Any, shadow: bool = False
) -> None:
    gather.is_issued = True
    if unit.is_up_to_date:
        self._comm.gather(unit, again=True)
    else:
        self._gather(unit, shadow)


ALLOCATES, SERVES = "with self._device_module.stream(self.stream):", "a gather that is served"
DEFECTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "": nullcontext,
    "written while it is read": written_while_it_is_read,
    "memory that compute uses next": Defect(
        DeviceCommStream, "allocate", ALLOCATES, SERVES, new="if True:"
    ).plant,
    "edited after a pass": Defect(CommContext, "wait_for_unread", "last.wait()", SERVES).plant,
    "edited in backward": Defect(
        CommContext,
        "reduce",
        "self.reduce_scatter_stream.after_work(self._unread[param_group])",
        SERVES,
    ).plant,
}


def waits_of_each_rank() -> tuple[int, int]:
    """Return how many gathers for other ranks this one enqueues in a step, and for how many its
    compute waits."""
    enqueue, wait = DeviceCommStream.enqueue, DeviceWorkHandle.wait
    served: list[object] = []
    waited: list[object] = []

    def enqueued(self: Any, kind: str, label: str, *rest: Any, **options: Any) -> Any:
        handle = enqueue(self, kind, label, *rest, **options)
        served.extend([handle] if label.endswith(SHADOW) else [])
        return handle

    with running(EmulatedDevice()):
        pair = Pair(device="emulated")
        pair.train([first_only(("tower", *SAME), SAME)] * 2)
        comm_streams = [each.stream for each in pair.ctx.comm_context.comm_streams]

        def waits(self: Any) -> None:
            is_compute = self._device_module.current_stream() not in comm_streams
            waited.extend([self] if is_compute and self in served else [])
            wait(self)

        with (
            patch.object(DeviceCommStream, "enqueue", enqueued),
            patch.object(DeviceWorkHandle, "wait", waits),
        ):
            pair.train([first_only(("tower", *SAME), SAME)])
    return len(served), len(waited)


def test_compute_does_not_wait_for_what_its_rank_only_serves() -> None:
    """But at the end of a pass, after which it may edit shards."""
    runs, serves = run_ranks(waits_of_each_rank, 2, backend=BACKEND)
    assert runs == (0, 0)
    assert serves == (6, 2)


@pytest.mark.slow
def test_nothing_is_left_unordered_on_a_device() -> None:
    seen = run_ranks(on_the_device, 2, "", backend=BACKEND, timeout=150)
    assert [findings for findings, _ in seen] == [[], []]
    assert compare_issued([issued for _, issued in seen]) is None


@pytest.mark.slow
@pytest.mark.parametrize("defect", [name for name in DEFECTS if name])
def test_a_planted_defect_is_found(defect: str) -> None:
    seen = run_ranks(on_the_device, 2, defect, backend=BACKEND, timeout=150)
    assert any(findings for findings, _ in seen)


# On two ranks of a GPU

ON_TWO = {"towers": lambda device: towers(device=device), "a loader that runs out": until_all_done}


def on_two(device: str, name: str) -> None:
    ON_TWO[name](device)


@pytest.mark.two_ranks
@DEVICES
@pytest.mark.parametrize("name", ON_TWO)
def test_uneven_ranks_that_are_nccls(device: str, name: str) -> None:
    run_two(on_two, device, name)
