"""Ranks whose hosts wait nowhere, one of which does not come: who says what, after how long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.comm.comm_streams import REPLAY
from fsdp_overlap.comm.store_mailbox import StoreMailbox
from fsdp_overlap.desync.error_monitor import ErrorMonitor
from fsdp_overlap.features import desync_monitor as monitor
from fsdp_overlap.features.desync_monitor import RankPosition, describe_hang
from fsdp_overlap.tools.emulator import EmulatedDevice, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND, NcclLikeGroup
from support.late_nccl import Late, late_collectives
from support.ranks import RankError, run_ranks

TIMEOUT = 1.0


class Branch(nn.Sequential):
    """Two layers, the second of which may be left out."""

    skips = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self[0](inputs)
        return first if self.skips else self[1](first)


class Hanging:
    """A model of three units on this rank, two whole steps of which have run."""

    def __init__(self) -> None:
        mesh = init_device_mesh("emulated", (dist.get_world_size(),))
        self.ctx = FsdpContext(mesh, hang_timeout=TIMEOUT)
        with torch.device("emulated"):
            self.model = Branch(nn.Linear(4, 4), nn.Linear(4, 4))
            self.batch = torch.ones(2, 4)
        for module in (*self.model, self.model):
            fully_shard(module, self.ctx)
        self.said: list[str] = []
        self.pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self.pids, os.getpid())
        for _ in range(3):
            self.step()
        assert self.ctx._monitor is not None
        self.ctx._monitor.report = self.said.append

    def step(self) -> None:
        self.model(self.batch).sum().backward()
        self.model.zero_grad()

    def wait_for_words(self) -> str:
        end = time.monotonic() + 20 * TIMEOUT
        while not self.said and time.monotonic() < end:
            time.sleep(0.05)
        return self.said[0] if self.said else ""


def load_data(seconds: float) -> None:
    time.sleep(seconds)


def in_data_loading(one: Hanging, late: Late) -> str:
    if dist.get_rank() == 1:
        load_data(4 * TIMEOUT)
    one.step()
    return one.wait_for_words() if dist.get_rank() != 1 else "".join(one.said)


def in_data_loading_of_many(one: Hanging, late: Late) -> str:
    """The last rank only reads what the first two have found."""
    with patch.object(monitor, "READERS", 2):
        return in_data_loading(one, late)


def in_compute(one: Hanging, late: Late) -> str:
    endless: Future[None] = Future()
    if dist.get_rank() == 0:
        one.step()
        return one.wait_for_words()
    late.add(endless)
    one.step()
    time.sleep(4 * TIMEOUT)
    endless.set_result(None)
    return "".join(one.said)


def slowly(one: Hanging, late: Late) -> str:
    for step in range(6):
        if step % dist.get_world_size() == dist.get_rank():
            time.sleep(0.7 * TIMEOUT)
        one.step()
    return "".join(one.said)


def all_idle(one: Hanging, late: Late) -> str:
    """Nobody asks the store about others."""
    one.step()
    with patch.object(StoreMailbox, "read") as read:
        load_data(3 * TIMEOUT)
    assert not read.called
    return "".join(one.said)


def in_the_same_collective(one: Hanging, late: Late) -> str:
    """The network dies. The host of rank 1 has launched more."""
    is_alive = threading.Event()
    dist.barrier()
    with patch.object(NcclLikeGroup, "_exchange", lambda *_: is_alive.wait()):
        with torch.no_grad():
            for _ in range(1 + dist.get_rank()):
                one.model(one.batch)
        words = one.wait_for_words()
        is_alive.set()
        for queue in list(late.of):
            for future in late.left(queue):
                future.result()
    return words


def without_a_unit(one: Hanging, late: Late) -> str:
    one.model.skips = dist.get_rank() == 1
    one.step()
    words = one.wait_for_words()
    with pytest.raises(RuntimeError, match=r"ranks ran different units: .* Call ctx\.reset\(\)"):
        one.step()
    raise AssertionError(words)  # what was launched never ends


def while_one_is_stopped(one: Hanging, late: Late) -> str:
    """As if it had died: it says nothing."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        one.step()
        return "goes on"
    one.step()
    words = one.wait_for_words()
    os.kill(one.pids[1], signal.SIGCONT)
    return words


def after_a_reset(one: Hanging, late: Late) -> str:
    """What ranks told each other before a reset no longer holds."""
    one.ctx.reset()
    one.model.zero_grad()
    for _ in range(4):
        one.step()
    dist.barrier()
    if dist.get_rank() == 0:
        one.ctx.error_monitor.poll()
    dist.barrier()
    return "".join(one.said)


def while_one_comes_late_to_a_reset(one: Hanging, late: Late) -> str:
    """The other waits for it in a collective and in the reset, and finds no fault with it."""
    if dist.get_rank() == 1:
        load_data(4 * TIMEOUT)
    with suppress(ArithmeticError), torch.no_grad():
        one.model[0](one.batch)
        raise ArithmeticError
    one.ctx.reset()
    return "".join(one.said)


def after_its_groups_are_gone(one: Hanging, late: Late) -> str:
    """The thread of the monitor ends."""
    assert one.ctx._monitor is not None
    dist.barrier()
    dist.destroy_process_group()
    errors: list[str] = []
    with patch.object(threading, "excepthook", lambda args: errors.append(str(args.exc_value))):
        end = time.monotonic() + 10 * TIMEOUT
        while monitors() and time.monotonic() < end:
            time.sleep(0.05)
    return "".join([*errors, *one.said, *(thread.name for thread in monitors())])


def monitors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fsdp_overlap_monitor"]


def after_an_error(one: Hanging, late: Late) -> str:
    """An error of the monitor itself is no fault of the ranks."""
    read, failed = ErrorMonitor._read, []

    def fail_once(error_monitor: ErrorMonitor) -> str:
        if not failed:
            failed.append(True)
            raise RuntimeError("dictionary changed size during iteration")
        return read(error_monitor)

    with patch.object(ErrorMonitor, "_read", fail_once):
        return in_data_loading(one, late)


def hang(program: Any) -> str:
    with running(EmulatedDevice()):
        one = Hanging()
        with late_collectives() as late:
            dist.barrier()
            words: str = program(one, late)
            assert one.ctx._monitor is not None
            one.ctx._monitor.end()
            deadline = time.monotonic() + 10
            while any(map(late.left, list(late.of))) and time.monotonic() < deadline:
                time.sleep(0.05)
    return words


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("world_size", "program"),
    [(2, in_data_loading), (3, in_data_loading_of_many), (2, after_an_error)],
)
def test_a_rank_that_loads_data_is_named(world_size: int, program: Any) -> None:
    said = run_ranks(hang, world_size, program, backend=BACKEND)
    assert not said.pop(1)  # it waits for nobody
    for rank, words in zip((0, 2), said, strict=False):
        assert words.startswith(f"[rank {rank}] fsdp_overlap: no progress:"), words
        assert "s waiting in all_gather of unit" in words
        assert re.search(r"rank 1: for \d+ s idle since", words)
        assert "; host at test_desync_monitor.py:" in words
        assert "in load_data" in words
        assert words.endswith("for rank 1")


def test_a_network_that_does_not_move_is_no_ranks_fault() -> None:
    for words in run_ranks(hang, 2, in_the_same_collective, backend=BACKEND):
        assert words.endswith("the network, or the backend, does not move"), words


@pytest.mark.slow
def test_a_rank_that_computes_without_end_is_named() -> None:
    words, others = run_ranks(hang, 2, in_compute, backend=BACKEND)
    assert re.search(r"rank 1: for \d+ s computing, before", words), words
    assert words.endswith("rank 0 waits for rank 1")
    assert not others


def test_a_rank_that_skips_a_unit_is_named_and_nobody_goes_on() -> None:
    said = r"fsdp_overlap: ranks ran different units: .* was rank 0: .*; rank 1: "
    with pytest.raises(RankError, match=said):
        run_ranks(hang, 2, without_a_unit, backend=BACKEND)


def test_a_rank_that_says_nothing_is_named() -> None:
    words, _ = run_ranks(hang, 2, while_one_is_stopped, backend=BACKEND)
    assert re.search(r"rank 0: for \d+ s waiting in", words)
    assert "rank 1: no answer; died, or the process is stopped" in words


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [slowly, all_idle])
def test_ranks_that_are_slow_or_all_idle_are_left_alone(program: Any) -> None:
    assert run_ranks(hang, 2, program, backend=BACKEND) == ["", ""]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [after_a_reset, while_one_comes_late_to_a_reset])
def test_ranks_that_reset_are_left_alone(program: Any) -> None:
    assert run_ranks(hang, 2, program, backend=BACKEND) == ["", ""]


def test_a_monitor_ends_with_the_process_groups() -> None:
    assert run_ranks(hang, 2, after_its_groups_are_gone, backend=BACKEND) == ["", ""]


ASKING_AT_THE_END = """
import threading
import time
from contextlib import suppress
from datetime import timedelta
import torch
from torch.distributed import TCPStore
from fsdp_overlap.features.desync_monitor import DesyncMonitor
from fsdp_overlap.tools.emulator import EmulatedDevice, running

server = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
client = TCPStore("127.0.0.1", server.port, 1, False, wait_for_workers=False)

class Asking(DesyncMonitor):
    def poll(self):
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join()

def ask():
    with suppress(RuntimeError):
        client.wait(["never"], timedelta(seconds=1))

while_running = running(EmulatedDevice())
while_running.__enter__()
monitor = Asking(torch.device("emulated"), list, None, 0.05, list)
time.sleep(0.3)
"""


@pytest.mark.slow
def test_a_process_ends_as_it_should_while_its_monitor_asks_the_store() -> None:
    program = [sys.executable, "-c", ASKING_AT_THE_END]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_who_waits_for_whom() -> None:
    def at(state: str, number: int) -> RankPosition:
        return RankPosition(state, "all_gather of unit 'x'", number, "at train.py:1 in main", 12.0)

    idle = {0: at("idle", 7), 1: at("idle", 7)}
    assert describe_hang(idle, []) is None
    assert describe_hang({0: at("computes", 7), 1: at("computes", 7)}, []) is None
    behind = describe_hang({0: at("waits", 9), 1: at("waits", 7), 2: at("waits", 9)}, [])
    assert behind is not None
    assert behind.endswith("ranks 0, 2 wait for rank 1")
    dead = describe_hang({0: at("waits", 9)}, [1])
    assert dead is not None
    assert "rank 1: no answer; died, or the process is stopped" in dead
    many = describe_hang(
        {rank: at("waits", 9) for rank in range(1024) if rank not in (3, 700)}, [3, 700]
    )
    assert many is not None
    assert many.splitlines() == [
        "no progress:",
        "  ranks 0-2, 4-699, 701-1023: for 12 s waiting in all_gather of unit 'x' (9 done); "
        "host at train.py:1 in main",
        "  ranks 3, 700: no answer; died, or the process is stopped",
        "  ranks 0-2, 4-699, 701-1023 wait for ranks 3, 700",
    ]
    together = describe_hang({0: at("waits", 9), 1: at("waits", 9)}, [])
    assert together is not None
    assert together.endswith("the network, or the backend, does not move")


def test_a_replay_may_take_its_time_but_not_for_a_rank_that_does_not_come() -> None:
    def at(state: str, number: int) -> RankPosition:
        return RankPosition(state, REPLAY, number, "at train.py:1 in main", 12.0)

    assert describe_hang({0: at("waits", 7), 1: at("waits", 7)}, []) is None
    assert describe_hang({0: at("waits", 7), 1: at("idle", 8)}, []) is None  # it is through
    for late in (at("idle", 7), at("waits", 6)):
        told = describe_hang({0: at("waits", 7), 1: late}, [])
        assert told is not None
        assert told.endswith("rank 0 waits for rank 1")
