"""What each step of a job that runs took, and which rank is slow. No profiler runs."""

from __future__ import annotations

import socket
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from weakref import finalize, ref

import torch
import torch.distributed as dist

from fsdp_overlap import meters
from fsdp_overlap.comm.collectives import Issued
from fsdp_overlap.comm.lanes import HostLane, Ticket
from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.comm.step_clocks import Times, make_clock
from fsdp_overlap.comm.store_notes import has_peers
from fsdp_overlap.profiling.names import STEP_LOG
from fsdp_overlap.profiling.slow_ranks import (
    computes_longer,
    in_ms,
    is_slow,
    lags,
    what_to_look_for,
)
from fsdp_overlap.runtime.context import FsdpContext
from fsdp_overlap.torch_internals import is_registered

# A rank is named if it was slow in half of the last steps. One step alone is a hiccup, and of a
# thousand ranks some rank has one in every step. Two ranks that take turns are slow in half each.
_REMEMBERED = 8
# How many messages may be under way. Hosts of a CPU that train together are never so far apart, so
# whoever has more waits for a rank that leaves the log out, and is told so. Where hosts run ahead,
# the device of one that is so far ahead has to wait for the other's anyway.
_MOST_PENDING = 8
# Of how many hosts a line names the slow ranks.
_SHOWN = 3
_WHAT = f"{STEP_LOG}.step()"


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for.

    Args:
        rank: its global rank.
        host: the name of its host.
        lag: how many seconds of this step it worked longer by itself than the median of the others.
        computes: whether most of that is compute.
    """

    rank: int
    host: str
    lag: float
    computes: bool


@dataclass(frozen=True)
class StepTimes:
    """One step of all ranks. As text it is one line.

    Args:
        step: its number.
        seconds: how long it took, the median over the ranks.
        waited: how many of these seconds a rank waited for communication, the median over the
            ranks. A slow rank waits less, and the others wait for it.
        slow: the ranks that are slow, by rank; mostly none.
    """

    step: int
    seconds: float
    waited: float
    slow: tuple[SlowRank, ...]

    def __str__(self) -> str:
        waited = f"{in_ms(self.waited)} of it waiting for communication"
        parts = [f"step {self.step}: {in_ms(self.seconds)}, {waited}"]
        alike: dict[tuple[str, bool], list[SlowRank]] = defaultdict(list)
        for each in sorted(self.slow, key=lambda each: -each.lag):
            alike[each.host, each.computes].append(each)
        groups = list(alike.values())
        parts += [_describe(sorted(ranks, key=lambda each: each.rank)) for ranks in groups[:_SHOWN]]
        if more := sum(map(len, groups[_SHOWN:])):
            parts.append(f"{more} more ranks are slow")
        return "; ".join(parts)


def _describe(ranks: Sequence[SlowRank]) -> str:
    """``ranks`` are of one host, and slow for one reason."""
    first, lag = ranks[0], in_ms(max(each.lag for each in ranks))
    if len(ranks) == 1:
        they = f"rank {first.rank} ({first.host}) is slow: it works {lag} longer by itself"
    else:
        numbers = ", ".join(str(each.rank) for each in ranks)
        they = f"ranks {numbers} ({first.host}) are slow: they work {lag} longer by themselves"
    return f"{they} than the others; look for {what_to_look_for(first.computes)}"


class Stragglers:
    """Which ranks are slow, step by step. ``ranks`` and ``hosts`` name them."""

    def __init__(self, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        self._ranks = ranks
        self._hosts = hosts
        self._history: deque[frozenset[int]] = deque(maxlen=_REMEMBERED)
        """The places of the ranks that were slow in each of the last steps."""

    def of(self, times: Sequence[Times]) -> tuple[SlowRank, ...]:
        """Those that are slow in the next step, which took ``times``, and were so often enough."""
        own = [each.total - each.waited for each in times]
        compute = [mine - each.idle for mine, each in zip(own, times, strict=True)]
        behind = lags(own)
        slow = [k for k, lag in enumerate(behind) if is_slow(lag, times[k].total)]
        self._history.append(frozenset(slow))
        return tuple(
            SlowRank(
                self._ranks[k],
                self._hosts[k],
                behind[k],
                computes_longer(compute[k], compute, behind[k]),
            )
            for k in slow
            if sum(k in before for before in self._history) >= _REMEMBERED / 2
        )


class StepLog:
    """Measures the steps of a model that trains, and says which rank the others wait for.

    Call :meth:`step` once a step, on every rank of the context's mesh, at the same point of the
    step, as after ``optimizer.step()``::

        log = StepLog(ctx)
        for batch in data:
            ...
            optimizer.step()
            for times in log.step():
                if dist.get_rank() == 0:
                    print(times)

    A rank is slow if it works longer by itself than the median of the others, by more than a tenth
    of the step: the rule of the overlap report. It is named in a step in which it is slow, if it
    was so in at least four of the last eight. Time by itself is the step without the waits for the
    library's communication. Collectives of your own count as work of the rank that waits in them.

    Steps are measured as long as the object exists. The ranks tell each other their times by one
    message a step of a few numbers, between hosts. No rank waits for it in the step, and so the
    times of a step are there at the next one or later. :meth:`finish` waits for the last ones.

    Args:
        context: the context of the model, after its ``fully_shard()`` calls.
        steps_done: the number of steps before the first that is measured, as of a run that goes on.

    Collective over the context's mesh.

    Raises:
        ValueError: no module was given to ``fully_shard()`` with this context.
        RuntimeError: a rank did not come.
    """

    def __init__(self, context: FsdpContext, steps_done: int = 0) -> None:
        if not context.domains:
            raise ValueError("StepLog of a context without units: call fully_shard() first")
        self._context = context
        self._steps_ended = self._steps_told = steps_done
        mesh = context.mesh
        self._ranks: list[int] = mesh.mesh.flatten().tolist()
        if not has_peers(mesh.get_group(mesh.ndim - 1)):
            self._ranks = [dist.get_rank()]
        self._clock = make_clock(context.device)
        self._points: deque[int] = deque()
        """Where in the program the steps ended that were not sent yet."""
        self._lane = HostLane()
        self._pending: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._group: ref[dist.ProcessGroup] | None = None
        hosts = [socket.gethostname()]
        if len(self._ranks) > 1:
            hosts = gather_objects(hosts[0], self._connected(), torch.device("cpu"), STEP_LOG)
        self._stragglers = Stragglers(self._ranks, hosts)
        meters.present.append(self._clock)
        finalize(self, meters.present.remove, self._clock).atexit = False

    def step(self) -> list[StepTimes]:
        """Ends a step, and returns those whose times have come since the last call: mostly one, the
        step before. Every rank gets the same ones, perhaps at another call. Must be called on every
        rank. Waits for a rank only if that is eight steps behind. A reset of the context forgets
        the steps that were not returned.

        Raises:
            RuntimeError: another rank did not call this, or called it at another point of its step;
                or a rank failed.
        """
        self._steps_ended += 1
        self._clock.step()
        # Of other domains, as those of experts, a rank may leave a backward out.
        domains = (each for each in self._context.domains if each.mesh == self._context.mesh)
        self._points.append(sum(each.order_check.progress[0] for each in domains))
        group = self._connected() if len(self._ranks) > 1 else None
        if group is not None:
            self._context.faults.begins(_WHAT, group)
        return self._told(group, waits=False)

    def finish(self) -> list[StepTimes]:
        """Returns the steps that were not returned yet, as when training is over. Collective; the
        host waits for the other ranks and for the device.

        Raises:
            RuntimeError: as :meth:`step`.
        """
        return self._told(self._connected() if len(self._ranks) > 1 else None, waits=True)

    def _told(self, group: dist.ProcessGroup | None, waits: bool) -> list[StepTimes]:
        for times in self._clock.measured(waits):
            self._send(times, self._points.popleft(), group)
        told = []
        while self._pending:
            ticket, table = self._pending[0]
            if not (waits or ticket.done() or len(self._pending) > _MOST_PENDING):
                break
            ticket.wait()
            self._pending.popleft()
            told.append(self._read(table))
        return told

    def _connected(self) -> dist.ProcessGroup:
        """The group of the messages. A reset, which all ranks call, ends it: then a new one."""
        group = None if self._group is None else self._group()
        if group is None or not is_registered(group):
            # Some ranks may have sent these, and others not.
            self._clock.skip()
            self._points.clear()
            self._pending.clear()
            self._steps_told = self._steps_ended
            cache, mesh = self._context.domains[0].group_cache, self._context.mesh
            like = mesh.get_group(mesh.ndim - 1)
            group = cache.connect_hosts(self._ranks, like, mesh.device_type)
            self._group = ref(group)
        return group

    def _send(self, times: Times, point: int, group: dist.ProcessGroup | None) -> None:
        """Tells the ranks of ``group`` of a step, which ended at ``point``."""
        values = [point, times.total, times.waited, times.idle]
        # On the host, whatever device is the default.
        sent = torch.tensor(values, dtype=torch.float64, device="cpu")
        table = sent.new_empty(len(self._ranks), sent.numel())

        def issue() -> Issued:
            if group is None:
                table[0] = sent
                return Issued((), lambda: table)
            work = dist.all_gather(list(table.unbind()), sent, group, async_op=True)
            return Issued([work], lambda: table, group)

        self._pending.append((self._lane.enqueue(STEP_LOG, "", issue), table))

    def _read(self, table: torch.Tensor) -> StepTimes:
        """What ranks told of the next step."""
        self._steps_told += 1
        points, totals, waited, idle = table.T.tolist()
        for rank, point in zip(self._ranks, points, strict=True):
            if point != points[0]:
                raise RuntimeError(
                    f"{_WHAT} number {self._steps_told} came after {points[0]:.0f} backwards on "
                    f"rank {self._ranks[0]} and after {point:.0f} on rank {rank}: call it once a "
                    "step, on every rank and at the same point"
                )
        times = [Times(*each) for each in zip(totals, waited, idle, strict=True)]
        return StepTimes(
            self._steps_told, median(totals), median(waited), self._stragglers.of(times)
        )
