"""How long this rank's steps take, and what part of them it waits for communication."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdp_overlap.comm.streams import has_streams, streams_of
from fsdp_overlap.meters import Meter


@dataclass(frozen=True)
class Times:
    """One step of one rank, in seconds.

    Args:
        total: from the end of the step before to the end of this one.
        waited: the part of it in which compute waited for the library's communication, and so
            perhaps for other ranks.
        idle: the part of the rest in which nothing was computed, as far as is known. On a CPU the
            thread slept, as while it reads data. On a device with streams no kernel was there
            before the first wait of the step; what is idle later is not known.
    """

    total: float
    waited: float
    idle: float


class StepClock(Meter, Protocol):
    """Measures the steps of this process. It is one of :data:`fsdp_overlap.meters.present`."""

    def step(self) -> None:
        """A step ends. The host does not wait."""
        ...

    def measured(self, waits: bool) -> Iterator[Times]:
        """The steps whose times are known by now and were not returned before, in order. With
        ``waits`` the host waits until all are known."""
        ...

    def skip(self) -> None:
        """Forgets the steps whose times were not returned yet."""
        ...


def make_clock(device: torch.device) -> StepClock:
    """A clock of compute on ``device``, which begins now."""
    return StreamClock(device) if has_streams(device) else HostClock()


class HostClock:
    """A clock of steps that run on the host, in the thread that makes the clock. Other threads, as
    those that save, hold up no compute when they wait."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._known: list[Times] = []
        self._waited = 0.0
        self._start, self._ran = time.perf_counter(), _ran()

    def begin(self) -> float | None:
        return time.perf_counter() if threading.get_ident() == self._thread else None

    def end(self, begun: float | None) -> None:
        if begun is not None:
            self._waited += time.perf_counter() - begun

    def step(self) -> None:
        now, ran = time.perf_counter(), _ran()
        total = now - self._start
        idle = total - self._waited - (ran - self._ran)
        self._known.append(Times(total, self._waited, max(0.0, idle)))
        self._start, self._ran, self._waited = now, ran, 0.0

    def measured(self, waits: bool) -> Iterator[Times]:
        known, self._known = self._known, []
        return iter(known)

    def skip(self) -> None:
        self._known.clear()


def _ran() -> float:
    """For how many seconds this thread has run, or was ready to. A thread whose core another
    program has taken wants to compute, and is not idle."""
    ran = time.thread_time()
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as counts:
            on_core, in_queue, _ = counts.read().split()
    except (OSError, ValueError):
        return ran  # a kernel without these counts
    return max(ran, (int(on_core) + int(in_queue)) / 1e9)


class StreamClock:
    """A clock of steps that run on the stream of ``device`` that is the current one when the clock
    is made. It reads events when they are past, so the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.get_ident()
        self._device = device
        self._streams = streams_of(device)
        self._compute = self._streams.current_stream(device)
        self._spare: list[Any] = []
        self._waits: list[tuple[Any, Any]] = []
        """Events before and after each wait of the step under way."""
        self._ended: deque[tuple[Any, list[tuple[Any, Any]], Any]] = deque()
        """The start, the waits and the end of steps that the device may not have done yet."""
        self._start = self._record()

    def begin(self) -> Any:
        # A lane that waits for another lane holds up no compute.
        is_mine = threading.get_ident() == self._thread
        if is_mine and self._streams.current_stream(self._device) == self._compute:
            return self._record()
        return None

    def end(self, begun: Any) -> None:
        if begun is not None:
            self._waits.append((begun, self._record()))

    def step(self) -> None:
        end = self._record()
        self._ended.append((self._start, self._waits, end))
        self._start, self._waits = end, []

    def measured(self, waits: bool) -> Iterator[Times]:
        if waits and self._ended:
            self._ended[-1][2].synchronize()
        while self._ended and self._ended[0][2].query():
            start, waited, end = self._ended.popleft()
            yield Times(
                _seconds(start, end),
                sum(_seconds(*wait) for wait in waited),
                # Where the host runs ahead, the first wait follows at once.
                _seconds(start, waited[0][0]) if waited else 0.0,
            )
            self._spare += [start, *(event for wait in waited for event in wait)]

    def skip(self) -> None:
        self._ended.clear()

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else self._streams.Event(enable_timing=True)
        event.record(self._compute)
        return event


def _seconds(start: Any, end: Any) -> float:
    seconds: float = start.elapsed_time(end) / 1e3
    return seconds
