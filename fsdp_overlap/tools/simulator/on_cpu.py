"""Predict steps on CPUs of one machine: the host computes, and gloo's threads share one link.

The program runs as it would on real ranks, with values, on this process's CPU; the library's lanes,
schedule and collectives are those of a CPU with gloo. Only time is made up: what operations take
comes from a profile, sleeping takes no time, and collectives move nothing and end when their bytes
would have passed the link.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist

from fsdp_overlap.tools.emulator import EmulatedDevice, Operation, active, fake_ranks, running
from fsdp_overlap.tools.emulator.dispatch import tensors_in
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.emulator.ranks import FakeProcessGroup
from fsdp_overlap.tools.simulator.collective_time import GLOO_AT_A_TIME, GLOO_PASSES
from fsdp_overlap.tools.simulator.compute_time import FREE
from fsdp_overlap.tools.simulator.hardware import Fabric
from fsdp_overlap.tools.simulator.profile import Profile
from fsdp_overlap.tools.simulator.simulate import Step

BACKEND = "gloo_in_name_only"
_WARMUP = 2  # steps before those that are predicted: units are not gathered ahead in the first


@dataclass(eq=False)
class Transfer:
    """What one collective of gloo sends, of all ranks together."""

    latency: float
    nbytes: float
    end: float | None = None
    """When it ended, in emulated seconds. ``None`` before that is known."""


@dataclass
class SharedLink:
    """A link that carries ``bandwidth`` bytes a second, in equal shares for all that are under
    way. Each group has two under way at most, in the order in which they were issued."""

    bandwidth: float
    now: float = 0.0
    queues: dict[object, deque[Transfer]] = field(default_factory=dict)

    def add(self, group: object, transfer: Transfer, now: float) -> None:
        self.advance(now)
        self.queues.setdefault(group, deque()).append(transfer)

    def advance(self, until: float) -> None:
        """Let everything happen up to the time ``until``."""
        while self.now < until and self._step(until):
            pass
        self.now = max(self.now, until)

    def end_of(self, transfer: Transfer) -> float:
        """Return when ``transfer`` ends if nothing more is issued before that."""
        while transfer.end is None:
            self._step(float("inf"))
        return transfer.end

    def _step(self, until: float) -> bool:
        """Go on to when the next transfer changes what it does. Return whether there is one."""
        under_way = [
            (queue, transfer)
            for queue in self.queues.values()
            for transfer in list(queue)[:GLOO_AT_A_TIME]
        ]
        if not under_way:
            return False
        sending = sum(not transfer.latency for _, transfer in under_way)
        share = self.bandwidth / max(1, sending)
        seconds = min(
            until - self.now,
            *(transfer.latency or transfer.nbytes / share for _, transfer in under_way),
        )
        self.now += seconds
        for queue, transfer in under_way:
            if transfer.latency:
                transfer.latency = _less(transfer.latency, seconds, 1e-12)
            else:
                transfer.nbytes = _less(transfer.nbytes, seconds * share, 1e-3)
            if not transfer.latency and not transfer.nbytes:
                transfer.end = self.now
                queue.remove(transfer)
        return True


def _less(value: float, other: float, least: float) -> float:
    """Return ``value - other``, or 0 where only rounding is left."""
    left = value - other
    return left if left > least else 0.0


class GlooWork(dist.Work):
    """Work of gloo, for which the host waits in emulated time."""

    def __init__(self, clock: CpuClock, transfer: Transfer) -> None:
        super().__init__()
        self.clock, self.transfer = clock, transfer

    def wait(self, timeout: timedelta | None = None) -> bool:
        host = active().host
        host.ends = max(host.ends, self.clock.link.end_of(self.transfer))
        return True

    def is_completed(self) -> bool:
        self.clock.link.advance(active().host.ends)
        return self.transfer.end is not None


class Gloo(FakeProcessGroup):
    """One of several ranks that send over the clock's link, of which the others do not exist."""

    def name(self) -> str:
        return "gloo"

    def _send(self, nbytes: float) -> dist.Work:
        """Send ``nbytes``, what all ranks of the group send. Groups of the other ranks send as much
        at the same time."""
        clock = active().timing
        assert isinstance(clock, CpuClock)
        groups = dist.get_world_size() / self.size()
        transfer = Transfer(clock.latency, nbytes * groups)
        clock.link.add(self, transfer, active().host.ends)
        return GlooWork(clock, transfer)

    def _issue(self, kind: str, writes: Any, reads: Any = (), opts: object = None) -> dist.Work:
        others = self.size() - 1
        nbytes = max(sum(t.nbytes for t in tensors_in(each)) for each in (writes, reads))
        return self._send(others * nbytes * GLOO_PASSES.get(kind, 1))

    def alltoall_base(self, output: Any, input: Any, *sizes: Any) -> dist.Work:
        own, size = self.rank(), self.size()
        received, sent = (
            list(parts) or [total.numel() / size] * size
            for total, parts in zip((output, input), sizes[:2], strict=True)
        )
        # Each rank is taken to send as much as this one sends and receives, on average.
        elements = (sum(received) - received[own] + sum(sent) - sent[own]) / 2
        return self._send(size * elements * input.element_size())


@dataclass
class CpuClock:
    """The host's time, and the link's.

    latency: of a collective. slower: how many times as long operations take as in the profile.
    unknown: the operators that were not measured; they are taken to need no more than their call.
    """

    profile: Profile
    link: SharedLink
    latency: float
    slower: float = 1.0
    unknown: set[str] = field(default_factory=set)

    def on_host(self, operation: Operation) -> float:
        return self.slower * (self.profile.host_seconds + self._measured(operation))

    def _measured(self, operation: Operation) -> float:
        call = operation.call
        if call is None or call.func.is_view or call.func._schema.name in FREE:
            return 0.0
        seconds = self.profile.seconds_of(call.func, call.args, call.kwargs)
        if seconds is None:
            self.unknown.add(call.func._schema.name)
        return seconds or 0.0

    def end(self, operation: Operation, stream: Queue, enqueued: float, ready: float) -> float:
        raise RuntimeError(
            f"{operation.name} on the emulated device, in a program that is to run on a CPU: make "
            'its tensors and its mesh on "cpu"'
        )


class CpuPrediction(NamedTuple):
    """What a step takes on a CPU.

    Attributes:
        seconds: of a step, from the end of the one before, on average.
        memory: the most bytes that tensors had in a step beyond those that they had before it.
        unknown: operators that the profile has not, which were taken to need no time.
    """

    seconds: float
    memory: int
    unknown: set[str]


def simulate_on_cpu(
    program: Callable[[], Step],
    world_size: int,
    profile: Profile,
    fabric: Fabric,
    cores: int,
    steps: int = 1,
) -> CpuPrediction:
    """Predict ``steps`` steps of ``program``, one after the other.

    Args:
        program: builds and shards a model on the CPU, and returns what makes a training step of it.
            It runs once, as the first of ``world_size`` ranks on one machine.
        world_size: the number of ranks. All of them compute at the same time.
        profile: how long operations take where each rank has a core.
        fabric: the link that all ranks share.
        cores: of the machine. Where ranks are more, what they compute takes so much longer.
        steps: how many are predicted.

    Raises:
        ValueError: the fabric is not gloo's, or has not so many ranks on one machine.
    """
    if fabric.library != "gloo" or world_size > fabric.ranks_a_node:
        raise ValueError(
            f"{fabric.name}: {world_size} ranks on one machine's CPUs need a fabric with "
            f'library = "gloo" and ranks_a_node = {world_size} or more'
        )
    bandwidth = fabric.within.bandwidth * fabric.within.efficiency.at(world_size)
    slower = max(1.0, world_size / cores)
    clock = CpuClock(profile, SharedLink(bandwidth), fabric.within.latency, slower)
    device = EmulatedDevice(timing=clock)
    with fake_ranks(world_size, BACKEND), running(device), _sleeping(device):
        step = program()
        for _ in range(_WARMUP):
            step()
        clock.unknown.clear()
        start, before = device.host.ends, device.on_host
        device.peak_on_host = before
        for _ in range(steps):
            step()
        seconds = (device.host.ends - start) / steps
        return CpuPrediction(seconds, device.peak_on_host - before, clock.unknown)


@contextmanager
def _sleeping(device: EmulatedDevice) -> Iterator[None]:
    """Let ``time.sleep`` pass emulated time."""

    def sleep(seconds: float) -> None:
        device.host.ends += seconds

    with patch.object(time, "sleep", sleep):
        yield


dist.Backend.register_backend(
    BACKEND, lambda store, rank, world_size, timeout: Gloo(rank, world_size), devices=["cpu"]
)
