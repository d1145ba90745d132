"""Comm streams of a GPU that show who does not wait: they are late, and put NaN into memory."""

from __future__ import annotations

import os
from typing import Any

import torch

from fsdp_overlap.comm.comm_streams import Accept, ComputeEvent, DeviceCommStream, Issue, WorkHandle
from fsdp_overlap.tensor.flat_buffer import FlatBuffer

RANKS = int(os.environ.get("FSDP_OVERLAP_RANKS_ON_GPUS", 0)) or max(
    1, min(2, torch.cuda.device_count())
)
"""Ranks of tests with NCCL. The variable has several share a GPU (see `ranks.py`)."""
# About a millisecond, long enough for compute to come first wherever nothing holds it up.
CYCLES = 2_000_000


def late() -> None:
    """Make what is enqueued next on the current stream late."""
    if torch.cuda.is_available():  # else a device stands in, on which only orders count
        torch.cuda._sleep(CYCLES)


class LateWorkHandle:
    """Compute that waited for it is late, though the host and the comm streams go on."""

    def __init__(self, work: WorkHandle) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        late()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class HostileCommStream(DeviceCommStream):
    """A comm stream that is late with all it does, and whose buffers hold NaN before and after.

    So compute that does not wait for a gather is seen. With `late_compute` the comm stream is in
    time, and what computes after a wait for it is late. That shows a free that does not wait for
    compute, and a comm stream that reads gradients too early."""

    def __init__(self, device: torch.device, late_compute: bool = False) -> None:
        super().__init__(device)
        self.late_compute = late_compute

    def allocate(self, label: str, buffer: FlatBuffer) -> None:
        super().allocate(label, buffer)
        with self._device_module.stream(self.stream):
            buffer.flat.fill_(torch.nan)

    def enqueue(
        self, kind: str, label: str, issue: Issue, accept: Accept | None = None, nbytes: int = 0
    ) -> WorkHandle:
        if self.late_compute:
            return LateWorkHandle(super().enqueue(kind, label, issue, accept, nbytes))
        with self._device_module.stream(self.stream):
            late()
        return super().enqueue(kind, label, issue, accept, nbytes)

    def free(self, label: str, buffer: FlatBuffer, after: ComputeEvent, waits: bool = True) -> None:
        if after is not None:
            self.stream.wait_event(after)
        with self._device_module.stream(self.stream):
            buffer.flat.fill_(torch.nan)
        super().free(label, buffer, None)
