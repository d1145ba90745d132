"""Device streams: which devices have them, and torch's module that makes them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def has_streams(device: torch.device) -> bool:
    """Return whether compute on ``device`` is enqueued on streams, so that the host runs ahead of
    it."""
    # torch.cpu has classes of these names too, which do nothing.
    return device.type not in ("cpu", "meta") and hasattr(streams_of(device), "Stream")


def streams_of(device: torch.device) -> Any:
    """Return the module with ``device``'s streams and events, such as ``torch.cuda`` for a GPU."""
    return torch.get_device_module(device)


def current_device(device_type: str) -> torch.device:
    """Return the device of this type that is computed on now, with its index if the type has
    streams."""
    device = torch.device(device_type)
    if has_streams(device):
        return torch.device(device_type, streams_of(device).current_device())
    return device


def mark_enqueued(device: torch.device) -> Any:
    """Return an event after all that this thread has enqueued on its current stream of ``device``,
    which other threads can wait for. None if the device has no streams: there all of it is done.

    A host that waits for it sleeps: by default CUDA's spins, which takes a core from what steps
    shards on the host."""
    if not has_streams(device):
        return None
    streams = streams_of(device)
    event = streams.Event(**_sleeping(streams.Event))
    return streams.current_stream(device).record_event(event)


@cache
def _sleeping(event: Any) -> dict[str, bool]:
    """Return the options of events of class ``event`` on which the host waits asleep."""
    try:
        event(blocking=True)
    except TypeError:  # torch.xpu's have no such option in torch 2.11
        return {}
    return {"blocking": True}


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph, such as a CUDA graph, captures the current stream."""
    if not has_streams(device):
        return False
    ask = getattr(streams_of(device), "is_current_stream_capturing", None)
    return ask is not None and ask()
