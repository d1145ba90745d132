"""The first forward of a model: its order is that in which modules register the units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.tools.emulator import EmulatedDevice, Operation, fake_ranks, running
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.simulator.simulate import BACKEND
from support.fake_group import run_on_fake_group

UNITS, WIDTH = 9, 16


class Chain(nn.Module):
    """Layers that run in the order of ``order``, and are registered by their number."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in order)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x).relu()
        return x


class SlowHost:
    """The host takes longer for what comes between products than the device for a product, so it
    never runs ahead. ``exposed`` counts the products that waited for an all-gather."""

    def __init__(self) -> None:
        self.exposed = 0
        self._compute_ends = 0.0

    def on_host(self, operation: Operation) -> float:
        return 4.0 if operation.name == "relu" else 0.0

    def end(self, operation: Operation, stream: Queue, enqueued: float, ready: float) -> float:
        if operation.name == "mm":
            self.exposed += ready > max(enqueued, self._compute_ends)
            self._compute_ends = ready + 3.0
            return self._compute_ends
        return ready + (2.0 if operation.name == "all_gather" else 0.0)


def exposed_gathers(order: list[int]) -> int:
    """Return how many all-gathers a first forward on the emulated device waits for."""
    timing = SlowHost()
    device = EmulatedDevice(timing=timing)
    with fake_ranks(4, BACKEND), running(device):
        model = Chain(order).to("emulated")
        ctx = FsdpContext(init_device_mesh("emulated", (4,)))
        for layer in [*model.layers][::-1]:  # the order of the calls does not matter
            fully_shard(layer, ctx)
        fully_shard(model, ctx)(torch.ones(2, WIDTH, device="emulated"))
    assert not device.findings
    return timing.exposed


def test_all_gathers_but_the_first_are_hidden() -> None:
    assert exposed_gathers([*range(UNITS)]) == 1


def test_another_order_exposes_no_more_than_none_would() -> None:
    assert exposed_gathers([*range(UNITS)][::-1]) == UNITS


def runs_alone(is_trained: bool) -> None:
    model = Chain([0, 1, 2])
    ctx = FsdpContext(init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in model.layers:
        fully_shard(layer, ctx)
    fully_shard(model, ctx)
    if is_trained:
        model(torch.ones(2, WIDTH)).sum().backward()
    for layer in (model.layers[0], model.layers[1]):
        layer.unshard()  # type: ignore[operator]
        ctx.stats.reset()
        layer(torch.ones(2, WIDTH))
        assert ctx.stats.all_gathers == 0
    model.layers[2](torch.ones(2, WIDTH))
    assert ctx.stats.all_gathers == 1


@pytest.mark.parametrize("is_trained", [False, True])
def test_what_one_rank_may_run_alone_gathers_nothing_ahead(is_trained: bool) -> None:
    """A unit that the user unsharded needs no other rank."""
    run_on_fake_group(runs_alone, 2, is_trained)


def trains_after_reset() -> None:
    model = Chain([0, 1, 2])
    ctx = FsdpContext(init_device_mesh("cpu", (2,)))
    for layer in model.layers:
        fully_shard(layer, ctx)
    fully_shard(model, ctx)
    run: Callable[[], object] = lambda: model(torch.ones(2, WIDTH)).sum().backward()  # noqa: E731
    for _ in range(2):
        run()
        ctx.stats.reset()
        ctx.reset()
    run()
    assert ctx.stats.prefetch_misses == 1
    assert ctx.stats.prefetches_unused == 0


def test_a_reset_predicts_it_anew() -> None:
    run_on_fake_group(trains_after_reset, 2)
