"""Threads of the library, each of which chooses its device first.

CUDA's current device is a thread's own, and a new thread has the first one. Its first call of CUDA,
be it to ask an event, makes a context there: some 500 MiB of the first GPU's memory for each of the
other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

import torch

from fsdp_overlap.comm.comm_streams import has_streams, streams_of


def choose_device(device: torch.device | None) -> None:
    """Make ``device`` the current one of this thread, if it has streams."""
    if device is not None and has_streams(device):
        streams_of(device).set_device(device)


def make_thread(run: Callable[[], object], name: str, device: torch.device | None) -> Thread:
    """Return a thread, to be started, that does not keep the process alive. ``device`` is what it
    calls, ``None`` if it calls none."""

    def run_on_device() -> None:
        choose_device(device)
        run()

    return Thread(target=run_on_device, name=name, daemon=True)


def thread_pool(num_threads: int, device: torch.device | None) -> ThreadPoolExecutor:
    """Return a pool of threads that call ``device``, or none."""
    return ThreadPoolExecutor(num_threads, initializer=choose_device, initargs=(device,))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Call ``device`` within, in a thread of somebody else, who may have another one."""
    return streams_of(device).device(device) if has_streams(device) else nullcontext()
