"""Run a training program as one rank of many, and predict what its steps take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.tools.emulator import Operation, fake_ranks, running, torch_module
from fsdp_overlap.tools.emulator.ranks import FakeProcessGroup
from fsdp_overlap.tools.profiling import RankReport, read_report
from fsdp_overlap.tools.simulator.clock import Clock
from fsdp_overlap.tools.simulator.costs import Costs
from fsdp_overlap.tools.simulator.fusion import Fusion
from fsdp_overlap.tools.simulator.hardware import Device, Fabric
from fsdp_overlap.tools.simulator.observed import (
    HostBoundStretch,
    MemoryKind,
    ObservedCollective,
    ObservedDevice,
    Usage,
    counters,
    traffic,
)
from fsdp_overlap.tools.simulator.partitioner import Partitioner
from fsdp_overlap.tools.simulator.trace import TracedRange, marking, trace_of

Step = Callable[[], object]
"""A training step: forwards, backwards and the optimizer's step."""

BACKEND = "nccl_in_name_only"


class Nccl(FakeProcessGroup):
    """Ranks that name themselves NCCL, which the library has collectives of their own for."""

    def name(self) -> str:
        return "nccl"


dist.Backend.register_backend(
    BACKEND, lambda store, rank, size, timeout: Nccl(rank, size), devices=["cpu", "emulated"]
)


@dataclass(frozen=True)
class Prediction:
    """What a step of training takes once the schedule has learned the order of units.

    Args:
        world_size: the number of ranks, of which each has a device.
        seconds: between the ends of two steps, if the host may run ahead.
        compute: seconds that compute would take in it if nothing else ran.
        stretches: when compute waited for the host in it.
        memory: the most bytes that tensors had at once after the model was built.
        reserved: the most that the allocator had taken from the device for them.
        peak: what held these bytes of ``memory``.
        usage: what memory held over the step of ``trace``. A change counts when compute has come
            to where the host made it.
        collectives: what was enqueued in the step of ``trace``.
        trace: a step that began when the device was idle, as torch's profiler would have traced it.
    """

    world_size: int
    seconds: float
    compute: float
    stretches: Sequence[HostBoundStretch]
    memory: int
    reserved: int
    peak: Mapping[MemoryKind, int]
    usage: Sequence[Usage]
    collectives: Sequence[ObservedCollective]
    trace: dict[str, Any]

    @cached_property
    def report(self) -> RankReport:
        """What was exposed, and why."""
        return read_report(self.trace, steps=1).ranks[0]

    @property
    def host_bound(self) -> float:
        """Seconds of a step in which compute waits for the host."""
        return sum(stretch.waited for stretch in self.stretches)

    def fits(self, device: Device) -> bool:
        """Return whether the device has the memory."""
        return self.reserved <= device.memory_size

    def traffic(self, fabric: Fabric) -> dict[str, float]:
        """Return the bytes that come to a rank in a step, over each link."""
        return traffic(fabric, self.collectives)

    def cost(self, price: float) -> float:
        """Return what a step costs, if a device costs ``price`` an hour."""
        return self.world_size * self.seconds / 3600 * price


def simulate(program: Callable[[], Step], world_size: int, costs: Costs) -> Prediction:
    """Predict a step of ``program`` once the order of units is recorded.

    Args:
        program: builds and shards a model on the device ``"emulated"``, and returns what makes a
            training step of it. It runs once, as the first of ``world_size`` ranks and on the
            slowest of their devices. Tensors that it makes on the device have no values.
        world_size: the number of ranks, of which each has a device.
        costs: how long everything takes, and how memory is allocated.
    """
    clock = Clock(costs, pace=costs.slowest(world_size))
    device = ObservedDevice(clock, costs.expandable_segments)
    ledger = device.allocator
    with fake_ranks(world_size, BACKEND), running(device), marking(device) as marks:
        step = program()
        if costs.compiles:
            step = _compiled(step, device, clock)
        torch_module.empty_cache()
        torch_module.reset_peak_memory_stats()
        ledger.phase, built = "training", ledger.position
        with device.watching_optimizers():
            step()  # units are not gathered ahead in the first one
            start, computed = device.default.ends, clock.computed
            device.stretches.clear()
            step()
            seconds, compute = device.default.ends - start, clock.computed - computed
            stretches = list(device.stretches)
            torch.accelerator.synchronize()
            for noted in (marks, clock.ran, device.backwards, device.collectives):
                noted.clear()
            start, begun = device.host.ends, ledger.position
            step()
            marks.append(TracedRange("ProfilerStep#0", start, device.host.ends))
        usage = ledger.usage(begun)
        trace = trace_of(clock.ran, marks, device.backwards, world_size)
        trace["traceEvents"] += counters(usage)
        return Prediction(
            world_size=world_size,
            seconds=seconds,
            compute=compute,
            stretches=stretches,
            memory=ledger.peak_allocated,
            reserved=ledger.peak_reserved,
            peak=ledger.peak(built),
            usage=usage,
            collectives=device.collectives,
            trace=trace,
        )


def _compiled(step: Step, device: ObservedDevice, clock: Clock) -> Step:
    """Return ``step``, whose kernels are its own and in which autograd keeps what it would of a
    compiled model."""
    partitioner = Partitioner(device)

    def watch(operation: Operation) -> None:
        partitioner.record(operation, clock.is_fused(operation))

    device.watchers.append(watch)
    device.allocator.defers = True
    clock.fusion = Fusion(device.allocator.allocate)

    def run() -> None:
        with partitioner.saving():
            step()
        clock.fusion.end()

    return run
