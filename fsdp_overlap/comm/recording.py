"""A lane that writes down what happens on it, for tests of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdp_overlap.comm.collectives import Issued
from fsdp_overlap.comm.lanes import HostLane, HostTicket, Mark, Ticket
from fsdp_overlap.tensor.flat_buffer import Buffer


@dataclass(frozen=True)
class Entry:
    """One thing that happened. ``action`` is allocate, enqueue, wait or free, ``kind`` is the
    collective."""

    lane: str
    action: str
    kind: str
    label: str


class RecordingTicket(HostTicket):
    log: list[Entry]
    lane: str

    def wait(self) -> None:
        if self._issued is not None:
            self.log.append(Entry(self.lane, "wait", self.kind, self.label))
        super().wait()


class RecordingLane(HostLane):
    """Runs like a host lane and logs to a list that lanes may share, in program order.

    The schedule is the same for every lane. So a test without a GPU can assert in which order
    things are enqueued on one.
    """

    def __init__(self, name: str, log: list[Entry]) -> None:
        self.name = name
        self.log = log

    def allocate(self, label: str, buffer: Buffer) -> None:
        self.log.append(Entry(self.name, "allocate", "", label))
        super().allocate(label, buffer)

    def enqueue(
        self,
        kind: str,
        label: str,
        issue: Callable[[], Issued],
        accept: Callable[[torch.Tensor], None] | None = None,
        nbytes: int = 0,
    ) -> Ticket:
        self.log.append(Entry(self.name, "enqueue", kind, label))
        ticket = RecordingTicket(kind, label, issue(), accept)
        ticket.log, ticket.lane = self.log, self.name
        return ticket

    def free(self, label: str, buffer: Buffer, after: Mark, waits: bool = True) -> None:
        self.log.append(Entry(self.name, "free", "", label))
        super().free(label, buffer, after, waits)
