"""The comm streams of the emulated device do what recording comm streams and host comm streams do
on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from fsdp_overlap import PerTensor
from fsdp_overlap.comm.comm_streams import CommStream, HostCommStream
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.schedule.stats import Stats
from fsdp_overlap.tools.emulator import EmulatedDevice, fake_ranks, running
from support.emulated import Program
from support.recorded import Entry, RecordingCommStream, RecordingDeviceStream
from support.zoo import ZOO

RANKS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch 0": {"prefetch": 0},
    "prefetch 1": {"prefetch": 1},
    "prefetch 2, rows": {"prefetch": 2, "layout": PerTensor()},
    "ragged": {"layout": TensorAtomic()},
    "copies": {"dims": (2, 2)},
    "copies, divided": {"dims": (2, 2), "shard_optimizer_over_replicas": True},
}
MakeCommStream = Callable[[str, torch.device], CommStream]


def trained(device: str, make_comm_stream: MakeCommStream, **options: Any) -> Stats:
    emulated = running(EmulatedDevice()) if device == "emulated" else nullcontext()
    context: AbstractContextManager[Any] = emulated
    with fake_ranks(RANKS), context:
        program = Program(device=device, **options)
        program.ctx.comm_stream_factory = make_comm_stream
        program.train(3)
        return program.ctx.stats


def on_streams(**options: Any) -> tuple[list[Entry], Stats]:
    log: list[Entry] = []
    stats = trained(
        "emulated", lambda name, device: RecordingDeviceStream(name, log, device), **options
    )
    return log, stats


def recorded(**options: Any) -> tuple[list[Entry], Stats]:
    log: list[Entry] = []
    stats = trained("cpu", lambda name, _: RecordingCommStream(name, log), **options)
    return [entry for entry in log if entry.action != "wait"], stats


# Where gradients may be missing, a stream's parameters get zeros (Note [no gradient] of
# docs/design.md). So the optimizer edits what it leaves alone on a CPU, and divided copies are put
# together again.
MAY_LACK_GRADIENTS = {
    "unused parameters",
    "unused on some ranks",
    "skipped on some ranks",
    "branches",
}
IN_ALL_WAYS = {
    "layers",
    "nested units",
    "tied parameters",
    "unused on some ranks",
    "checkpointed groups, reentrant",
    "dynamic order",
}
PROGRAMS = [
    pytest.param(name, options, id=f"{name}, {option}")
    for name in ZOO
    for option, options in OPTIONS.items()
    if name != "without a context"  # whose context is its own
    and (option == "prefetch 1" or name in IN_ALL_WAYS)
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "options"), PROGRAMS)
def test_device_streams_do_and_count_what_host_streams_do(
    name: str, options: dict[str, Any]
) -> None:
    given, on_cpu = recorded(name=name, **options)
    on_device, counted = on_streams(name=name, **options)
    assert counted == on_cpu
    assert counted.all_gathers > 0
    comm_streams = {entry.comm_stream for entry in given}
    if "shard_optimizer_over_replicas" in options and name in MAY_LACK_GRADIENTS:
        comm_streams.remove("all_reduce")
    for comm_stream in comm_streams:
        assert [e for e in given if e.comm_stream == comm_stream] == [
            e for e in on_device if e.comm_stream == comm_stream
        ]
    # The host sums across replicas when it has waited for the shards' sums; a stream waits by
    # itself.
    assert given == on_device or "dims" in options


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_host_streams_count_what_recording_streams_count(options: dict[str, Any]) -> None:
    _, counted = recorded(**options)
    assert trained("cpu", lambda *_: HostCommStream(), **options) == counted


def test_another_order_is_noticed() -> None:
    given, _ = recorded(prefetch=1)
    on_device, _ = on_streams(prefetch=2)
    assert given != on_device
