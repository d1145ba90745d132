"""The thread of host steps takes what the device is done with, and waits for the device asleep."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_overlap.comm.comm_streams import _sleeping
from fsdp_overlap.comm.host_copies import D2HCopy
from fsdp_overlap.optim import AdamW, OverlapPolicy
from fsdp_overlap.optim.adamw import KernelCall
from fsdp_overlap.optim.host_thread import Call, HostThread
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tools.emulator import EmulatedDevice, current_stream, fake_ranks, running
from support.emulated import Program, Seconds


class Copies:
    """Copies that end in the order of their numbers, when they are told to or waited for. The step
    of the first one lasts until others are told to end."""

    def __init__(self) -> None:
        self.done = 0
        self.stepped: list[int] = []
        self.changed = threading.Condition()

    def call(self, number: int) -> Call:
        def run() -> None:
            with self.changed:
                self.done = max(self.done, number)  # as a wait for the device
                self.stepped.append(number)
                self.changed.notify_all()
                self.changed.wait_for(lambda: number > 1 or self.done > number)

        return Call(run, str(number), lambda: self.done >= number)

    def end(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.stepped == [1], 10)
            self.done = number
            self.changed.notify_all()


def test_of_those_that_are_ready_the_newest_is_stepped_and_else_the_oldest() -> None:
    thread, copies = HostThread(), Copies()
    jobs = thread.submit([copies.call(number) for number in range(1, 7)])
    copies.end(4)  # while the first one is stepped
    for job in jobs:
        job.wait()
    assert copies.stepped == [1, 4, 3, 2, 5, 6]
    thread.finish()


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_device_that_fails_fails_the_step(error: type[Exception]) -> None:
    thread = HostThread()

    def fail() -> bool:
        raise error("an illegal memory access")

    [job] = thread.submit([Call(fail, "a unit", fail)])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="'a unit' failed in its thread: an illegal memory"):
        job.wait()
    thread.reset(())
    thread.finish()


COPY = 0.1
"""The seconds of a copy, the only thing that takes the emulated device time."""


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    timing = Seconds({"copy_": COPY})
    with fake_ranks(4), running(EmulatedDevice(timing, is_real_time=True)) as device:
        yield device


def newest() -> AbstractContextManager[Any]:
    return patch.object(D2HCopy, "is_done", lambda copy: True)


@pytest.mark.alone  # of real time: beside other work a step begins late
@pytest.mark.parametrize(("planted", "in_backward"), [(nullcontext, 3), (newest, 1)])
def test_steps_overlap_with_backward_of_a_device(
    device: EmulatedDevice, planted: Callable[[], AbstractContextManager[Any]], in_backward: int
) -> None:
    """Of four units all but the last one are stepped while the device is busy with backward. A
    thread that takes the newest waits for what the device does last."""
    program = Program(
        shard_options={"offload_policy": CPUOffloadPolicy()},
        optimizer_options={"overlap": OverlapPolicy()},
    )
    program.train(2)
    began: list[float] = []
    run = KernelCall.run

    def noted(call: KernelCall) -> None:
        began.append(time.monotonic())
        run(call)

    with planted(), patch.object(KernelCall, "run", noted):
        program.backward()
        end = current_stream().record_event()
        program.step()
        finish_pending_steps()
    assert len(began) == 4
    last: Any = end
    assert sum(at < last._moment.ends for at in began) == in_backward
    assert not device.findings


class EventOfXpu:
    def __init__(self, enable_timing: bool = False) -> None:
        pass


def test_the_host_waits_for_copies_asleep() -> None:
    assert "blocking" in inspect.signature(torch.cuda.Event.__new__).parameters
    assert _sleeping(EventOfXpu) == {}


def test_copies_to_the_host_are_marked_by_events_that_let_it_sleep(device: EmulatedDevice) -> None:
    made: list[Any] = []
    event = torch.get_device_module("emulated").Event

    class Noted(event):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            made.append(options)
            super().__init__(**options)

    with patch.object(torch.get_device_module("emulated"), "Event", Noted):
        Program(optimizer=AdamW, shard_options={"offload_policy": CPUOffloadPolicy()}).train(1)
    assert {"blocking": True} in made
