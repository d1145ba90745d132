"""Collectives of the NCCL-like group that the host does not wait for, on the emulated device.

Events are over when the collectives before them are, on real ranks. No data travels, so nothing
is to be read of what they write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fsdp_overlap.tools.emulator import torch_module as streams
from fsdp_overlap.tools.emulator.nccl_like import (
    Arrival,
    CollectiveCall,
    Delivery,
    NcclLikeGroup,
    unseen,
)
from fsdp_overlap.tools.emulator.queues import Queue


class _Launched(Delivery):
    """A collective whose `wait()` orders streams alone."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.enqueued is not None:
            self.enqueued.wait()
        return True


class Late:
    """What streams have to do, by stream: futures of what is not known to be over."""

    def __init__(self) -> None:
        self.of: defaultdict[Queue, list[Future[Any]]] = defaultdict(list)

    def add(self, future: Future[Any]) -> None:
        """The current stream has ``future`` to do next."""
        self.of[streams.active().current].append(future)

    def left(self, queue: Queue) -> list[Future[Any]]:
        self.of[queue] = [future for future in self.of[queue] if not future.done()]
        return self.of[queue]


@contextmanager
def late_collectives() -> Iterator[Late]:
    late, ends, communicators = Late(), {}, {}
    record, wait, wait_stream = (
        streams.Event.record,
        streams.Event.wait,
        streams.Stream.wait_stream,
    )

    def carry(group: Any, collective: CollectiveCall, *_: Any) -> dist.Work:
        before = list(late.left(streams.active().current))

        def run() -> None:
            for future in before:
                future.result()
            with suppress(RuntimeError), unseen():  # a rank may be gone
                group._exchange(collective.kind, [torch.empty(0)] * group.size())

        if group not in communicators:
            communicators[group] = ThreadPoolExecutor(1)
        done = communicators[group].submit(run)
        late.add(done)
        return _Launched(Arrival(lambda _=None: [], done.done), lambda _: None)

    def record_end(event: Any, stream: Any = None) -> None:
        record(event, stream)
        ends[event] = list(late.left((stream or streams.current_stream()).queue))

    def wait_for_end(event: Any, stream: Any = None) -> None:
        wait(event, stream)
        late.of[(stream or streams.current_stream()).queue] += ends.get(event, [])

    def wait_for_stream(stream: Any, other: Any) -> None:
        wait_stream(stream, other)
        late.of[stream.queue] += late.left(other.queue)

    def is_over(event: Any) -> bool:
        return all(future.done() for future in ends.get(event, []))

    with (
        patch.object(NcclLikeGroup, "_carry", carry),
        patch.object(streams.Event, "record", record_end),
        patch.object(streams.Event, "wait", wait_for_end),
        patch.object(streams.Event, "query", is_over),
        patch.object(streams.Stream, "wait_stream", wait_for_stream),
    ):
        yield late
