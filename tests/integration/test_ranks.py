"""Claims about the harness itself: what the other tests may rely on."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from support import ranks
from support.program import Program
from support.ranks import RankError, expect_rank_errors, run_ranks


def _rank_and_sum(x: float) -> tuple[int, float]:
    total = torch.tensor(x * (1 + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _pid() -> int:
    return os.getpid()


def _random_number() -> float:
    return torch.rand(()).item()


def _fail_everywhere() -> None:
    raise ValueError(f"no shards on rank {dist.get_rank()}")


def _fail_on_rank_1() -> None:
    values = [dist.get_rank(), 7]
    assert values[0] != 1, "only this rank"
    dist.barrier()


def _enter_only_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        _never_come()


def _import_much() -> None:
    importlib.import_module("torch._inductor.compile_fx")


def _count_objects() -> int:
    return len(gc.get_objects())


def _crash_in_a_thread_of_c() -> None:
    c = ctypes.CDLL(None)
    c.pthread_create(ctypes.byref(ctypes.c_ulong()), None, c.abort, None)
    _never_come()


def _never_come() -> None:
    time.sleep(600)


def _die() -> None:
    os._exit(7)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(_rank_and_sum, 3, 2.0) == [(0, 12.0), (1, 12.0), (2, 12.0)]


def test_processes_are_reused() -> None:
    first = run_ranks(_pid, 2)
    assert run_ranks(_pid, 2) == first
    assert os.getpid() not in first


def test_what_a_call_imported_is_not_looked_at_after_each_later_one() -> None:
    run_ranks(_import_much, 1)
    assert run_ranks(_count_objects, 1)[0] < 10_000


def _host_of_nccl(gpus: int) -> tuple[int, str, str]:
    with (
        patch.object(torch.cuda, "device_count", lambda: gpus),
        patch.object(torch.cuda, "set_device") as chosen,
        patch.dict(os.environ),
    ):
        ranks._take_gpu(dist.get_rank(), dist.get_world_size())
        names = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME")
        return chosen.call_args.args[0], *(os.environ.get(name, "") for name in names)  # type: ignore[return-value]


def test_ranks_that_share_a_gpu_say_that_each_is_a_host() -> None:
    pids = run_ranks(_pid, 2)
    assert run_ranks(_host_of_nccl, 2, 1) == [(0, str(pid), "lo") for pid in pids]
    # Which it would still say when the second one comes.
    assert run_ranks(_host_of_nccl, 1, 1) == [(0, str(pids[0]), "lo")]
    assert run_ranks(_host_of_nccl, 2, 2) == [(0, "", ""), (1, "", "")]


def test_every_call_starts_from_the_same_seed() -> None:
    first = run_ranks(_random_number, 2)
    assert run_ranks(_random_number, 2) == first
    assert first[0] == first[1]


def test_expected_errors_keep_the_processes() -> None:
    pids = run_ranks(_pid, 2)
    messages = expect_rank_errors(_fail_everywhere, 2, match=r"ValueError: no shards on rank \d")
    assert messages == ["ValueError: no shards on rank 0", "ValueError: no shards on rank 1"]
    assert run_ranks(_pid, 2) == pids


def test_expected_error_that_one_rank_misses_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] did not raise an error matching 'rank 1'"):
        expect_rank_errors(_fail_everywhere, 2, match="rank 1")


def test_failure_on_one_rank_shows_every_rank_and_ends_quickly() -> None:
    run_ranks(_pid, 2)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(_fail_on_rank_1, 2)
    assert time.monotonic() - start < 20
    rank_0, rank_1 = str(caught.value).split("---- rank 1: raised ----")
    assert "assert 1 != 1" in rank_1  # rewritten by pytest, as in this process
    assert "in _fail_on_rank_1" in rank_0
    assert "barrier" in rank_0
    assert "in _fail_on_rank_1" in rank_1
    assert "only this rank" in rank_1


def test_hang_ends_within_the_timeout_with_stacks_of_every_rank() -> None:
    run_ranks(_pid, 2)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(_enter_only_on_rank_0, 2, timeout=3.0)
    assert time.monotonic() - start < 15
    rank_0, rank_1 = str(caught.value).split("---- rank 1: still running")
    assert "in _enter_only_on_rank_0" in rank_0
    assert "barrier" in rank_0
    assert "in _never_come" in rank_1


def test_a_crash_shows_all_stacks() -> None:
    """Also those of threads that are not Python's, as gloo's."""
    with pytest.raises(RankError) as caught:
        run_ranks(_crash_in_a_thread_of_c, 2)
    message = str(caught.value)
    assert "died ----\nexit code -6" in message
    assert "in _crash_in_a_thread_of_c" in message
    assert message.count("SIGABRT(6)") > 2, message


def test_pool_works_again_after_a_rank_died() -> None:
    with pytest.raises(RankError, match=r"rank 0: died ----\nexit code 7"):
        run_ranks(_die, 1)
    assert run_ranks(_rank_and_sum, 1, 5.0) == [(0, 5.0)]


def test_a_program_that_hangs_writes_its_stacks(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import os, pathlib, time\n"
        "def launcher_waits():\n"
        "    os.wait()\n"
        "def rank_waits():\n"
        "    pathlib.Path('waits').touch()\n"
        "    time.sleep(60)\n"
        "launcher_waits() if os.fork() else rank_waits()\n"
    )
    program = Program(tmp_path, ["hangs.py"], is_script=True)
    end = time.monotonic() + 45
    while not (tmp_path / "waits").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    with pytest.raises(AssertionError, match=r"not done after 0.2 s") as raised:
        program.communicate(timeout=0.2)
    for name in ("launcher_waits", "rank_waits"):
        assert f"in {name}" in str(raised.value)


COUNTS = """
import os
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def count():
    launcher = os.getppid()
    ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    Path(os.environ["RANK"]).write_text(str(len(ranks)))

if "RANK" in os.environ:
    count()
else:
    by = dict(rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="it", start_method="fork")
    elastic_launch(LaunchConfig(1, 1, 3, **by), count)()
"""


@pytest.mark.parametrize("torchrun", [None, ["--standalone", "--nproc-per-node", "3"]])
def test_ranks_that_are_forked_begin_once_all_are(
    tmp_path: Path, torchrun: list[str] | None
) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    program = Program(tmp_path, ["counts.py"], torchrun, is_script=True)
    out = program.communicate(timeout=60)
    assert program.returncode == 0, out
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3"] * 3


@pytest.mark.slow
def test_a_machine_may_lack_what_workers_import_ahead(tmp_path: Path) -> None:
    (tmp_path / "plotly.py").write_text("raise ImportError")
    code = "from support.ranks import run_ranks; import os; run_ranks(os.getpid, 2)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=150)
