"""Hang reports on devices with streams: where every rank stands, within seconds.

There the host waits nowhere, so nobody notices until the backend's timeout, ten minutes with NCCL.
A CPU's host waits for each collective, and polls meanwhile: see :mod:`~fsdp_overlap.comm.watchdog`.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.comm_streams import REPLAY, CommStream, DeviceCommStream, LaunchedCollective
from fsdp_overlap.comm.store_mailbox import ANSWER_SECONDS, in_barrier
from fsdp_overlap.comm.threads import make_thread
from fsdp_overlap.desync.error_monitor import ErrorMonitor, Fault
from fsdp_overlap.features.cuda_graphs.graphs import querying

POLLS = 5
"""How often a rank looks at itself within the timeout."""

READERS = 4
"""How many ranks of a group read what all others post. The rest read what these have found: a
thousand ranks that read a thousand statuses each would keep the store busy. Ranks that do not wait
do not read, so with time more of those that do read all."""

PACKAGES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])

# What ends the threads of monitors.
_threads: WeakKeyDictionary[threading.Thread, threading.Event] = WeakKeyDictionary()


@dataclass(frozen=True)
class RankPosition:
    """Where a rank stands still. ``state``: it "waits" in a collective that its device has begun,
    "computes" before one that it has not, or is "idle": its device has nothing to do. ``what``:
    that collective, or the last one, or a replay of a graph. ``number``: how many of these have
    ended on its device. ``host``: where its main thread is. ``since``: seconds."""

    state: str
    what: str
    number: int
    host: str
    since: float

    def where(self) -> str:
        """Return the position in words, without its time, which differs on every rank."""
        text = {
            "waits": f"waiting in {self.what}",
            "computes": f"computing, before {self.what}",
            "idle": f"idle since {self.what}",
        }[self.state]
        return f"{text} ({self.number} done); host {self.host}"


def describe_hang(positions: Mapping[int, RankPosition], silent: Sequence[int]) -> str | None:
    """Return where ranks stand, and who waits for whom. ``None`` if no rank waits for another, as
    far as that can be told: all may be in the same replay of a graph, which takes its time.

    Args:
        positions: of the ranks that have not moved for a while, by rank.
        silent: the ranks that have posted nothing.
    """
    waiting = [rank for rank, each in positions.items() if each.state == "waits"]
    if not waiting:
        return None
    furthest = max(positions[rank].number for rank in waiting)
    late = [
        rank for rank, each in positions.items() if each.state != "waits" or each.number < furthest
    ]
    causes = [*late, *silent]
    if all(positions[rank].what == REPLAY for rank in waiting) and not (
        silent or any(positions[rank].number <= furthest for rank in late)
    ):
        return None
    # Thousands of ranks stand at a few places.
    places: dict[str, list[int]] = {}
    for rank in sorted(positions):
        places.setdefault(positions[rank].where(), []).append(rank)
    lines = []
    for where, ranks in places.items():
        seconds = max(positions[rank].since for rank in ranks)
        lines.append(f"{_ranks(ranks)}: for {seconds:.0f} s {where}")
    if silent:
        lines.append(f"{_ranks(silent)}: no answer; died, or the process is stopped")
    if causes:
        rest = [rank for rank in waiting if rank not in causes] or waiting
        end = f"{_ranks(rest)} wait{'' if len(rest) > 1 else 's'} for {_ranks(causes)}"
    else:
        end = "all ranks are in the same collective: the network, or the backend, does not move"
    return "\n  ".join(["no progress:", *lines, end])


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``ranks`` in words: "ranks 0-511, 513"."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    listed = ", ".join("-".join(map(str, ends)) for ends in ranges)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


class DesyncMonitor:
    """A thread that watches the comm streams of one context.

    While collectives end, or replays of graphs, it only counts them. When none was launched or
    ended for ``timeout`` seconds, it posts where this rank stands. If this rank waits for one that
    does the same, it prints once where all are. If ranks have issued different collectives, or one
    gave up, the groups are closed, and the next forward raises. Otherwise it goes on watching: a
    rank that writes a checkpoint for a minute is waited for.

    Args:
        comm_streams: returns the comm streams that exist.
        timeout: seconds.
        on_fault: is called on its thread when this rank must not go on.
    """

    def __init__(
        self,
        device: torch.device,
        comm_streams: Callable[[], Iterable[CommStream]],
        error_monitor: ErrorMonitor,
        timeout: float,
        on_fault: Callable[[], None],
    ) -> None:
        self.timeout = timeout
        self.report: Callable[[str], object] = _print
        self._comm_streams = comm_streams
        self._error_monitor = error_monitor
        self._on_fault = on_fault
        self._main = threading.current_thread().ident
        self._ended = threading.Event()
        self._progress: tuple[int, ...] = ()
        self._since = time.monotonic()
        self._last = "its last collective"
        self._rounds = 0
        """For how many timeouts this rank has stood still when it posted where."""
        self._has_reported = False
        run = partial(_run, ref(self), self._ended, timeout / POLLS)
        thread = make_thread(run, "fsdp_overlap_monitor", device)
        _threads[thread] = self._ended
        thread.start()

    def end(self) -> None:
        self._ended.set()

    def poll(self) -> None:
        """Look at this rank, and if it stands still, at the others."""
        if in_barrier():
            self._since = time.monotonic()  # ranks that reset wait for each other, and say so
            return
        if not querying.acquire(blocking=False):
            return  # within the capture of a graph
        try:
            comm_streams = [
                comm_stream
                for comm_stream in self._comm_streams()
                if isinstance(comm_stream, DeviceCommStream)
            ]
            pending = [_pending(comm_stream) for comm_stream in comm_streams]
            for launched in filter(None, pending):
                self._last = _name(*launched[-1][:2])
            position = self._position(comm_streams, pending)
        finally:
            querying.release()
        progress = (*(comm_stream.count for comm_stream in comm_streams), *map(len, pending))
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._since = progress, now
            self._has_reported = False
            if self._rounds:
                self._rounds = 0
                self._post("")
        elif (rounds := int((now - self._since) / self.timeout)) and position is not None:
            if rounds > self._rounds:
                self._rounds = rounds
                self._post(json.dumps(asdict(position)))
            if position.state == "waits" and not self._has_reported:
                self._find_reason(position, rounds)

    def _post(self, position: str, hang_report: str = "") -> None:
        self._error_monitor.position = position
        self._error_monitor.hang_report = hang_report
        self._error_monitor.post()

    def _find_reason(self, position: RankPosition, rounds: int) -> None:
        """Look for a reason among the others, ``rounds`` timeouts after this rank moved last."""
        me = dist.get_rank()
        readers = READERS * max(1, rounds - 2)
        if not any(me in ranks[:readers] for ranks in self._error_monitor.ranks()):
            for statuses in self._error_monitor.statuses(READERS):
                for status in statuses.values():
                    if status.hang_report:
                        return self._report(status.hang_report)
            return None
        try:
            self._error_monitor.poll()
        except Fault as fault:
            self._on_fault()
            return self._report(str(fault))
        monitor = self._error_monitor
        for ranks, statuses in zip(monitor.ranks(), monitor.statuses(), strict=True):
            positions = {
                rank: RankPosition(**json.loads(status.position))
                for rank, status in statuses.items()
                if status.position
            }
            positions[me] = position
            silent = [rank for rank in ranks if rank not in positions]
            if silent and (rounds < 2 or in_barrier()):
                continue
            if (text := describe_hang(positions, silent)) is not None:
                self._report(text)
                self._post(json.dumps(asdict(position)), text)

    def _report(self, text: str) -> None:
        self._has_reported = True
        self.report(f"[rank {dist.get_rank()}] fsdp_overlap: {text}")

    def _position(
        self,
        comm_streams: Sequence[DeviceCommStream],
        pending: Sequence[Sequence[LaunchedCollective]],
    ) -> RankPosition | None:
        """Return where this rank stands. ``None`` before its first collective."""
        number = sum(comm_stream.count for comm_stream in comm_streams)
        ended = number - sum(map(len, pending))
        oldest = [launched[0] for launched in pending if launched]
        begun = [each for each in oldest if all(event.query() for event in each.waits)]
        state = "waits" if begun else "computes" if oldest else "idle"
        if not number:
            return None
        what = self._last if not oldest else _name(*(begun or oldest)[0][:2])
        return RankPosition(state, what, ended, self._host(), time.monotonic() - self._since)

    def _host(self) -> str:
        """Return where the main thread is: the innermost frame that is not torch's or this
        library's."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
            frame = frame.f_back
        if frame is None:
            return "in no frame of the program"
        file = Path(frame.f_code.co_filename).name
        return f"at {file}:{frame.f_lineno} in {frame.f_code.co_name}"


def _pending(comm_stream: DeviceCommStream) -> list[LaunchedCollective]:
    """Return what ``comm_stream`` has launched that has not ended, oldest first."""
    launched = comm_stream.launched
    while launched and launched[0].end.query():
        launched.popleft()
    while True:
        try:
            return list(launched)
        except RuntimeError:  # another was launched meanwhile
            continue


def _name(kind: str, label: str) -> str:
    return f"{kind} of unit {label!r}" if label else kind


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(monitor: ref[DesyncMonitor], ended: threading.Event, interval: float) -> None:
    while not ended.wait(interval) and (found := monitor()) is not None:
        try:
            found.poll()
        except Exception:  # this must not end what it watches, nor the watching
            if not dist.is_initialized():
                return
        del found


@atexit.register
def _end_threads() -> None:
    """End the threads, because Python would end one that queries a store by aborting the whole
    process."""
    for ended in list(_threads.values()):
        ended.set()
    for thread in list(_threads):
        thread.join(2 * ANSWER_SECONDS)
