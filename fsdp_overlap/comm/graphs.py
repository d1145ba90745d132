"""CUDA graphs: callbacks when one is captured and replayed.

A replay runs no Python, so nothing counts the edits of weights that it makes. The class of graphs
is therefore extended where it begins, ends and replays a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from fsdp_overlap.comm.streams import streams_of
from fsdp_overlap.tensor.pending_steps import finish_pending_steps


class Replays(Protocol):
    """Callbacks of each replay of one graph."""

    def before(self) -> None:
        """Prepare for the current stream to run the graph."""
        ...

    def after(self) -> None:
        """Follow up on the graph, which was enqueued on the current stream."""
        ...


class Watcher(Protocol):
    """Callbacks of each capture, on the capturing stream."""

    def capture_begins(self) -> None: ...
    def capture_ends(self) -> Replays | None:
        """Prepare for the capture to end. Return the callbacks of its replays."""
        ...

    def capture_ended(self) -> None:
        """Raise a RuntimeError if replays would be wrong: there are none then."""
        ...


before_capture_or_replay: list[Callable[[], None]] = []
"""Are called before a graph is captured, and before a replay edits weights."""

before_capture: list[Callable[[], None]] = [finish_pending_steps]
"""Are called before a graph is captured. They end what other threads ask of the device: whatever
could wait or allocate there would end the capture."""

querying = Lock()
"""Is held while a graph is captured: a query of an event by another thread would end that."""

QUERIES_SECONDS = 1.0
"""How long the queries of another thread may take that a capture waits for."""

_watchers: WeakSet[Watcher] = WeakSet()
_replays: WeakKeyDictionary[object, list[Replays]] = WeakKeyDictionary()
_extended: WeakSet[type] = WeakSet()
_capture: object | None = None
_is_guarded = False
"""Whether the capture under way holds :data:`querying`."""


def capture_under_way() -> object | None:
    """Return what stands for the capture under way. ``None`` if there is none, or it is not by the
    graphs of a device that :func:`watch` was called for."""
    return _capture


def refuse_in_capture(what: str) -> None:
    """Raise RuntimeError if a graph is captured: ``what``, which another thread does, would end
    that."""
    if _capture is not None:
        raise RuntimeError(
            f"{what} while a CUDA graph is captured, whose thread would end the capture: do it "
            "before the capture, or after it"
        )


def watch(device: torch.device, watcher: Watcher) -> None:
    """Call ``watcher``, which it refers to weakly, for the graphs of ``device``."""
    kind = getattr(streams_of(device), "CUDAGraph", None)
    if kind is None:
        return
    _watchers.add(watcher)
    if kind not in _extended:
        _extended.add(kind)
        _extend(kind)


def _extend(kind: Any) -> None:
    begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

    @wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        global _capture, _is_guarded
        for call in (*before_capture_or_replay, *before_capture):
            call()
        is_guarded = querying.acquire(timeout=QUERIES_SECONDS)
        try:
            begin(graph, *args, **kwargs)
        except BaseException:
            if is_guarded:
                querying.release()
            raise
        _capture, _is_guarded = object(), is_guarded
        for watcher in list(_watchers):
            watcher.capture_begins()

    @wraps(end)
    def capture_end(graph: Any) -> None:
        global _capture, _is_guarded
        watchers = list(_watchers)
        try:
            found = [replays for each in watchers if (replays := each.capture_ends()) is not None]
        finally:
            _capture = None
            try:
                end(graph)
            finally:
                if _is_guarded:
                    _is_guarded = False
                    querying.release()
        _replays[graph] = found
        try:
            for watcher in watchers:
                watcher.capture_ended()
        except RuntimeError:
            graph.reset()
            raise

    @wraps(replay)
    def replay_with_callbacks(graph: Any) -> None:
        callbacks = _replays.get(graph, ())
        for each in callbacks:
            each.before()
        replay(graph)
        for each in callbacks:
            each.after()

    kind.capture_begin, kind.capture_end = capture_begin, capture_end
    kind.replay = replay_with_callbacks
