"""Runs a training program as one rank of many, and predicts what its steps take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fsdp_overlap.modelled import ModelledDevice, fake_ranks, running, torch_module
from fsdp_overlap.profiling import RankReport, read_report
from fsdp_overlap.simulating.clock import Clock, Costs
from fsdp_overlap.simulating.trace import Mark, marking, trace_of

Step = Callable[[], object]
"""A training step: forwards, backwards and the optimizer's step."""


@dataclass(frozen=True)
class Prediction:
    """What a step of training takes once the schedule has learned the order of units.

    seconds: between the ends of two steps, if the host may run ahead. memory: the most bytes that
    tensors had at once after the model was built; reserved: the most that the allocator had taken
    from the device for them. trace: a step that began when the device was idle, as torch's profiler
    would have traced it.
    """

    seconds: float
    memory: int
    reserved: int
    trace: dict[str, Any]

    @cached_property
    def report(self) -> RankReport:
        """What was exposed, and why."""
        return read_report(self.trace, steps=1).ranks[0]


def simulate(
    program: Callable[[], Step], world_size: int, costs: Costs, warmup: int = 1
) -> Prediction:
    """Predicts a step of ``program``.

    Args:
        program: builds and shards a model on the device ``"modelled"``, and returns what makes a
            training step of it. It runs once, as the first of ``world_size`` ranks and on the
            slowest of their devices. Tensors that it makes on the device have no values.
        world_size: the number of ranks, of which each has a device.
        costs: how long everything takes.
        warmup: steps before the one that is predicted. Units are not gathered ahead in the first.
    """
    clock = Clock(costs, pace=costs.slowest(world_size))
    device = ModelledDevice(timing=clock, values=False)
    with fake_ranks(world_size), running(device), marking(device) as marks:
        step = program()
        torch_module.empty_cache()
        torch_module.reset_peak_memory_stats()
        for _ in range(warmup):
            step()
        start = device.default.ends
        step()
        seconds = device.default.ends - start
        torch.accelerator.synchronize()
        for noted in (marks, clock.ran, device.backwards):
            noted.clear()
        start = device.host.ends
        step()
        marks.append(Mark("ProfilerStep#0", start, device.host.ends))
        return Prediction(
            seconds=seconds,
            memory=device.allocator.allocated_most,
            reserved=device.allocator.reserved_most,
            trace=trace_of(clock.ran, marks, device.backwards, world_size),
        )
