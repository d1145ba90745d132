"""Captures of device graphs, such as CUDA graphs: whether one is under way, and what other threads
must not do meanwhile.

The rest of the folder is loaded before the first capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from fsdp_overlap.comm.comm_streams import streams_of
from fsdp_overlap.tensor.pending_steps import finish_pending_steps

before_capture_or_replay: list[Callable[[], None]] = []
"""Are called before a capture of a graph, and before a replay edits weights."""

before_capture: list[Callable[[], None]] = [finish_pending_steps]
"""Are called before a capture of a graph. They end what other threads ask of the device: whatever
could wait or allocate there would end the capture."""

querying = Lock()
"""Is held during the capture of a graph: a query of an event by another thread would end that."""

_capture: object | None = None


def set_capture(capture: object | None) -> None:
    """Note what stands for the capture under way."""
    global _capture
    _capture = capture


def capture_under_way() -> object | None:
    """Return what stands for the capture under way. ``None`` if there is none, or it is not by the
    graphs of a device that :func:`before_first_capture` was called for."""
    return _capture


def refuse_in_capture(what: str) -> None:
    """Raise RuntimeError during the capture of a graph: ``what``, which another thread does, would
    end that."""
    if _capture is not None:
        raise RuntimeError(
            f"{what} while a CUDA graph captures compute, which another thread would end: do it "
            "before the capture, or after it"
        )


class Subject(Protocol):
    """What takes part in captures."""

    def prepare_for_captures(self) -> object: ...


_unprepared: WeakKeyDictionary[Any, WeakSet[Subject]] = WeakKeyDictionary()
"""By the class of graphs of a device."""
_preparing = Lock()


def before_first_capture(device: torch.device, subject: Subject) -> None:
    """Prepare ``subject``, which it refers to weakly, before the next capture of a graph of
    ``device``."""
    kind = getattr(streams_of(device), "CUDAGraph", None)
    if kind is None:
        return
    if kind not in _unprepared:
        _intercept(kind)
    _unprepared[kind].add(subject)


def _intercept(kind: Any) -> None:
    begin = kind.capture_begin
    _unprepared[kind] = WeakSet()

    @wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        with _preparing:
            if (subjects := _unprepared.pop(kind, None)) is not None:
                kind.capture_begin = begin  # and what the subjects extend it by
                for subject in list(subjects):
                    subject.prepare_for_captures()
        kind.capture_begin(graph, *args, **kwargs)

    kind.capture_begin = capture_begin
