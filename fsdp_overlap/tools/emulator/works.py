"""Collectives of process groups on the emulated device, as the program sees them: works and
futures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.tools.emulator.device import EnqueuedCollective
from fsdp_overlap.tools.emulator.dispatch import tensors_in
from fsdp_overlap.tools.emulator.torch_module import (
    Stream,
    active,
    current_stream,
    is_available,
    stream,
)
from fsdp_overlap.torch_internals import current_graph_task_id, queue_callback


class EmulatedWork(dist.Work):
    """A collective that writes ``outputs``, which the device may have ``enqueued``."""

    def __init__(
        self, outputs: Sequence[torch.Tensor] = (), enqueued: EnqueuedCollective | None = None
    ) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self.enqueued = enqueued

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.enqueued is not None:
            self.enqueued.wait()
        self.outputs.clear()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return _future(self.wait, list(self.outputs))


class FinishedWork(EmulatedWork):
    """Work of which nothing is left to do for the host."""

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self.outputs


class WorkFuture(torch.futures.Future[Any]):
    """What is told of an asynchronous collective, as futures of torch on a GPU: to wait for it lets
    the current stream wait, and callbacks run on a stream of their own."""

    _wait_for_work: Callable[[], object] = bool

    def wait(self) -> Any:
        value = super().wait()
        self._wait_for_work()
        if is_available():
            for tensor in tensors_in(value):  # as torch's: who waits uses them
                active().release_after(tensor, active().current)
        return value

    def then(self, callback: Callable[[Any], Any]) -> Any:
        if not is_available():
            return super().then(callback)
        side = Stream()
        with stream(side):
            self.wait()
            result = callback(self)
        return _future(lambda: current_stream().wait_stream(side), result)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self.then(callback)


def _future(wait: Callable[[], Any], value: Any) -> WorkFuture:
    """Return a future of ``value``. Within a backward, C++ waits for it when the backward ends, as
    the reducer of ``DistributedDataParallel`` does."""
    future = WorkFuture()
    future._wait_for_work = wait
    future.set_result(value)
    if current_graph_task_id() >= 0:
        queue_callback(partial(_call, future.wait))
    return future


def _call(wait: Callable[[], object]) -> None:
    wait()
