"""Comm streams that write down what happens on them, a model on such comm streams, and places in
their log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_overlap import FsdpContext
from fsdp_overlap.comm.comm_streams import (
    Accept,
    CommStream,
    ComputeEvent,
    DeviceCommStream,
    HostCommStream,
    HostWorkHandle,
    Issue,
    WorkHandle,
)
from fsdp_overlap.tensor.flat_buffer import Buffer
from support.twins import LENGTH, loss_of
from support.zoo import ROWS, VOCABULARY, Model, shard_layers

GATHER, REDUCE = "all_gather", "reduce_scatter"


@dataclass(frozen=True)
class Entry:
    """One thing that happened. ``action`` is allocate, enqueue, wait or free, ``kind`` is the
    collective."""

    comm_stream: str
    action: str
    kind: str
    label: str


class RecordingWorkHandle(HostWorkHandle):
    log: list[Entry]
    comm_stream: str

    def wait(self) -> None:
        if self._pending is not None:
            self.log.append(Entry(self.comm_stream, "wait", self.kind, self.label))
        super().wait()


class Recording(CommStream):
    """Logs what happens on a comm stream to a list that comm streams may share, in program order.
    The class of comm streams that does it comes next among the bases."""

    def __init__(self, name: str, log: list[Entry], *device: torch.device) -> None:
        super().__init__(*device)
        self.name = name
        self.log = log

    def allocate(self, label: str, buffer: Buffer) -> None:
        self.log.append(Entry(self.name, "allocate", "", label))
        super().allocate(label, buffer)

    def enqueue(
        self, kind: str, label: str, issue: Issue, accept: Accept | None = None, nbytes: int = 0
    ) -> WorkHandle:
        self.log.append(Entry(self.name, "enqueue", kind, label))
        return super().enqueue(kind, label, issue, accept, nbytes)

    def free(self, label: str, buffer: Buffer, after: ComputeEvent, waits: bool = True) -> None:
        self.log.append(Entry(self.name, "free", "", label))
        super().free(label, buffer, after, waits)


class RecordingCommStream(Recording, HostCommStream):
    """A host comm stream that also logs when somebody waits.

    The schedule is the same for every comm stream. So a test without a GPU can assert in which
    order things are enqueued on one."""

    def enqueue(
        self, kind: str, label: str, issue: Issue, accept: Accept | None = None, nbytes: int = 0
    ) -> WorkHandle:
        made = super().enqueue(kind, label, issue, accept, nbytes)
        work = RecordingWorkHandle(kind, label, made._pending, accept)
        work.log, work.comm_stream = self.log, self.name
        return work


class RecordingDeviceStream(Recording, DeviceCommStream):
    """A stream of a device that logs."""


class Recorded:
    """A model whose comm streams write down what they do."""

    def __init__(self, prefetch: int = 1, build: Callable[[], nn.Module] = Model) -> None:
        self.log: list[Entry] = []
        self.ctx = FsdpContext(prefetch=prefetch)
        self.ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, self.log)
        self.model = build()
        shard_layers(self.model, self.ctx)
        self.tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY

    def forward(self) -> torch.Tensor:
        return loss_of(self.model(self.tokens), self.tokens)

    def step(self) -> None:
        self.forward().backward()
        self.model.zero_grad()

    def recorded(self, run: Callable[[], Any]) -> list[Entry]:
        self.log.clear()
        run()
        return list(self.log)

    def passes(self) -> tuple[list[Entry], list[Entry]]:
        """Return the logs of forward and backward once the order is learned."""
        self.step()
        losses: list[torch.Tensor] = []
        forward = self.recorded(lambda: losses.append(self.forward()))
        return forward, self.recorded(losses[0].backward)


def position(log: list[Entry], action: str, label: str, comm_stream: str = GATHER) -> int:
    found = [
        index
        for index, entry in enumerate(log)
        if (entry.comm_stream, entry.action, entry.label) == (comm_stream, action, label)
    ]
    assert len(found) == 1, f"{action} of {label!r} on {comm_stream}: {len(found)} times in {log}"
    return found[0]


def layer(index: int) -> str:
    return f"layers.{index}"
