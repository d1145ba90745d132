"""Callbacks when a CUDA graph is captured and replayed.

A replay runs no Python, so nothing counts the edits of weights that it makes. The class of graphs
is therefore extended where it begins, ends and replays a capture.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from fsdp_overlap.comm.comm_streams import streams_of
from fsdp_overlap.features.cuda_graphs import graphs


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


QUERIES_SECONDS = 1.0
"""How long the queries of another thread may take that a capture waits for."""

_watchers: WeakSet[Watcher] = WeakSet()
_replays: WeakKeyDictionary[object, list[Replays]] = WeakKeyDictionary()
_extended: WeakSet[type] = WeakSet()
_is_guarded = False
"""Whether the capture under way holds the lock of queries."""


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
        global _is_guarded
        for call in (*graphs.before_capture_or_replay, *graphs.before_capture):
            call()
        is_guarded = graphs.querying.acquire(timeout=QUERIES_SECONDS)
        try:
            begin(graph, *args, **kwargs)
        except BaseException:
            if is_guarded:
                graphs.querying.release()
            raise
        graphs.set_capture(object())
        _is_guarded = is_guarded
        for watcher in list(_watchers):
            watcher.capture_begins()

    @wraps(end)
    def capture_end(graph: Any) -> None:
        global _is_guarded
        watchers = list(_watchers)
        try:
            found = [replays for each in watchers if (replays := each.capture_ends()) is not None]
        finally:
            graphs.set_capture(None)
            try:
                end(graph)
            finally:
                if _is_guarded:
                    _is_guarded = False
                    graphs.querying.release()
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
