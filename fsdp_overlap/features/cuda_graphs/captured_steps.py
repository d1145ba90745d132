"""Joins steps of a context to CUDA graphs: captures, replays and what cannot be captured."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet, ref

import torch

from fsdp_overlap.comm.comm_streams import DeviceCommStream, DeviceWorkHandle
from fsdp_overlap.engine.comm_context import CommContext
from fsdp_overlap.engine.context import ModelContext
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.features.cuda_graphs.graphs import before_capture_or_replay, capture_under_way
from fsdp_overlap.features.cuda_graphs.watching import watch
from fsdp_overlap.schedule.interface import ScheduledUnit
from fsdp_overlap.schedule.scheduler import Schedule


def watch_captures(context: ModelContext) -> CapturedSteps:
    """Make steps of ``context`` part of the graphs that are captured from now on."""
    me = ref(context)

    def parts() -> tuple[Schedule, CommContext] | None:
        context = me()
        if context is None or not (context.is_initialized and context.has_schedule):
            return None
        return context.schedule, context.comm_context

    captured_steps = CapturedSteps(
        lambda: own.units if (own := me()) else (),
        lambda: own.mesh_infos if (own := me()) else (),
        parts,
    )
    watch(context.device, captured_steps)
    return captured_steps


class CapturedWorkHandle(DeviceWorkHandle):
    """Work on a comm stream's stream that is captured in a graph. When the capture is over there is
    nothing to wait for, because nothing has run."""

    def __init__(self, event: torch.Event, streams: Any) -> None:
        super().__init__(event, streams)
        self._capture = capture_under_way()

    def wait(self) -> None:
        if self._is_under_way():
            super().wait()

    def wait_on_host(self) -> None:
        if self._is_under_way():
            super().wait_on_host()

    def done(self) -> bool:
        return not self._is_under_way()  # nobody may ask a captured event

    def _is_under_way(self) -> bool:
        return capture_under_way() is self._capture


class CommStreamInCapture:
    """A comm stream that takes part in a capture. It keeps what the stream knows of work outside of
    it, because nobody may ask events of the capture."""

    def __init__(self, comm_stream: DeviceCommStream) -> None:
        self._comm_stream = comm_stream
        self._launched, self._count = comm_stream.launched, comm_stream.count
        self._kept_back = comm_stream.kept_back
        comm_stream.launched, comm_stream.kept_back = deque(maxlen=0), []
        comm_stream.max_kept_back = 0  # the allocator would keep it back until the capture ends
        comm_stream.work_handle = CapturedWorkHandle

    def end(self) -> None:
        """Take the comm stream out of the capture."""
        comm_stream = self._comm_stream
        comm_stream.launched, comm_stream.count = self._launched, self._count
        comm_stream.kept_back, comm_stream.preceding = self._kept_back, []
        comm_stream.max_kept_back = type(comm_stream).max_kept_back
        comm_stream.work_handle = type(comm_stream).work_handle


class CapturedSteps:
    """What one context does about graphs. ``units``, ``mesh_infos`` and ``parts`` give what the
    context has now; ``parts`` is ``None`` before the first forward."""

    def __init__(
        self,
        units: Callable[[], Sequence[Unit]],
        mesh_infos: Callable[[], Iterable[MeshInfo]],
        parts: Callable[[], tuple[Schedule, CommContext] | None],
    ) -> None:
        self._units = units
        self._mesh_infos = mesh_infos
        self._parts = parts
        self.is_under_way = False
        """Whether a capture is under way in which units run."""
        self._versions: dict[Unit, int] = {}
        self._left: str | None = None
        self._replays: WeakSet[ReplayedSteps] = WeakSet()
        self._comm_streams: list[CommStreamInCapture] = []

    # What ``watching`` calls, as of a ``Watcher``

    def capture_begins(self) -> None:
        self._versions = {unit: unit.version for unit in self._units()}
        self._left = None

    def capture_ends(self) -> ReplayedSteps | None:
        edited = [unit for unit, version in self._versions.items() if unit.version != version]
        self._versions.clear()
        parts, was_under_way = self._parts(), self.is_under_way
        self.is_under_way = False
        if parts is None:
            return None
        schedule, comm = parts
        if was_under_way:
            self._left = schedule.under_way()
            for unit in self._units():
                unit.mark_stale()  # a capture moves no data
            with suppress(RuntimeError):  # CUDA itself says what ended the capture
                self._end(comm)
        if was_under_way or edited:
            replays = ReplayedSteps(edited, comm)
            self._replays.add(replays)
            return replays
        return None

    def capture_ended(self) -> None:
        left, self._left = self._left, None
        parts = self._parts()
        if parts is None:
            return
        schedule, comm = parts
        comm.let_comm_streams_wait()  # events of the capture are none that gathers could wait for
        if left is None or sys.exception() is not None:
            return
        comm.wait_for_comm_streams()
        schedule.drop()
        comm.rest()
        raise RuntimeError(
            f"the capture of a CUDA graph ended with {left}: capture whole steps, with the "
            "backward of every forward. The graph is empty now"
        )

    def lose_groups(self) -> None:
        """Refuse replays from now on: process groups are renewed."""
        for replays in self._replays:
            replays.lost_groups = True

    # What hooks call

    def join(self, unit: ScheduledUnit) -> None:
        """Join the graph that is captured while ``unit`` is about to run.

        Raises:
            RuntimeError: it cannot be captured. Nothing was changed.
        """
        if not self.is_under_way:
            if (reason := self._why_refused(unit)) is not None:
                raise RuntimeError(
                    f"unit {unit.name!r} runs while a CUDA graph is captured, which cannot be "
                    f"right: {reason}. Nothing was changed"
                )
            parts = self._parts()
            assert parts is not None
            for other in self._units():
                other.mark_stale()  # outer shards are gathered in every replay
            self._begin(parts[1])
            self.is_under_way = True

    def _begin(self, comm: CommContext) -> None:
        """Take all comm streams into the capture that compute is in. Their memory then comes from
        the graph's pool."""
        comm.let_comm_streams_wait()
        self._comm_streams = [
            CommStreamInCapture(comm_stream)
            for comm_stream in comm.comm_streams
            # Contexts may share comm streams.
            if isinstance(comm_stream, DeviceCommStream)
            and comm_stream.work_handle is not CapturedWorkHandle
        ]
        for mesh_info in self._mesh_infos():
            mesh_info.order_check.is_enabled = False  # the host could not read what a replay finds

    def _end(self, comm: CommContext) -> None:
        """Take all comm streams out of the capture, which waits for all that was enqueued there."""
        for comm_stream in self._comm_streams:
            comm_stream.end()
        self._comm_streams.clear()
        for mesh_info in self._mesh_infos():
            mesh_info.order_check.is_enabled = True
        comm.wait_for_comm_streams()

    def check_backward(self) -> None:
        """Check a backward that begins on a stream that is captured.

        Raises:
            RuntimeError: its forward was not in the same capture.
        """
        if not self.is_under_way:
            raise RuntimeError(
                "a backward is captured in a CUDA graph without its forward: capture both in one "
                "graph, as a whole step. torch.cuda.make_graphed_callables() captures them apart, "
                "so it cannot be used on units"
            )

    def _why_refused(self, unit: ScheduledUnit) -> str | None:
        parts = self._parts()
        if parts is None or not parts[0].has_recorded(unit, torch.is_grad_enabled()):
            return (
                "steps are not alike yet: run two whole ones, with the optimizer's, before the "
                "capture"
            )
        if capture_under_way() is None:
            return "the capture was not begun by torch.cuda.CUDAGraph, so replays go unnoticed"
        if (left := parts[0].under_way()) is not None:
            return f"there is {left}: capture all of a step"
        if any(mesh_info.order_check.confirms for mesh_info in self._mesh_infos()):
            return "its ranks communicate by gloo, which makes the host wait: use NCCL"
        for other in self._units():
            if (reason := _why_unit_is_refused(other)) is not None:
                return f"unit {other.name!r} {reason}"
        return None


def _why_unit_is_refused(unit: Unit) -> str | None:
    settings = unit.settings
    if unit.is_conditional:
        return "is conditional, so that the host exchanges messages in each step"
    if unit.rests_on_host:
        return "is offloaded, so that the host waits for copies: shard without CPUOffloadPolicy"
    transport = settings.transport
    if settings.memory_of is not None or not (transport is None or transport.is_capturable):
        return (
            "takes memory from the process group, and a graph takes all from its own pool: switch "
            "that off"
        )
    for param_group in unit.param_groups:
        if param_group.full.allocated:
            return (
                "has a full buffer from before the capture, which a replay would not fill, or that "
                "may be freed by then: call ctx.release_unsharded() right before the capture, and "
                "leave set_keep_unsharded_storage() off"
            )
    return None


class ReplayedSteps:
    """Counts each replay as an edit of the shards that the capture ``edited``, and keeps it in
    order with what comm streams do eagerly."""

    def __init__(self, edited: Sequence[Unit], comm: CommContext) -> None:
        self._edited = [ref(unit) for unit in edited]
        self._comm = ref(comm)
        self.lost_groups = False
        """Whether the process groups that it uses may be gone."""

    def before(self) -> None:
        comm = self._comm()
        if comm is None or self.lost_groups:
            raise RuntimeError(
                "replay() of a CUDA graph whose "
                + ("process groups ctx.reset() has renewed" if comm else "model is gone")
                + ": capture the step again"
            )
        if self._edited:
            for call in before_capture_or_replay:
                call()
        comm.wait_for_comm_streams()

    def after(self) -> None:
        for find in self._edited:
            if (unit := find()) is not None:
                for param_group in unit.param_groups:
                    param_group.edits.record_values()
        if (comm := self._comm()) is not None:
            for comm_stream in comm.comm_streams:
                comm_stream.after_replay()
