"""A rank of `fsdp-overlap train` dies, and its launcher, its own or torchrun, starts all again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_overlap.tools.cli import train
from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.job import run_of_this_job, this_job
from fsdp_overlap.tools.cli.launch import find_place
from fsdp_overlap.tools.cli.output import BadInput
from fsdp_overlap.tools.cli.process_group import fresh_store
from support.cli_runs import (
    assert_is_the_run_left_alone,
    finish,
    latest,
    wait_until,
)
from support.program import Program
from support.ranks import expect_rank_errors, run_ranks

TINY = "train --device cpu --steps 48 --eval-every 16 --log-every 3 --save-every 16 --data text.txt"
TINY += " --batch-size 4 --seq-len 16 --layers 2 --width 16 --heads 2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text and an undisturbed run, `alone`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 100)
    finish(Program(folder, [*TINY.split(), "--out", "alone"]))
    return folder


def kill_rank(process: Program, rank: int, when: Callable[[], bool]) -> None:
    wait_until(when, process)
    os.kill(process.ranks()[rank], signal.SIGKILL)


@pytest.mark.slow
def test_a_run_whose_rank_died_ends_as_if_it_had_not(runs: Path) -> None:
    """Before there is a checkpoint, and while one is written."""
    run = runs / "killed"
    process = Program(runs, [*TINY.split(), "--out", "killed", "--max-restarts", "2"])
    metrics = run / "metrics.jsonl"
    # In the first step process groups are made, where a survivor may wait to be killed for 30 s.
    kill_rank(process, 0, lambda: metrics.exists() and metrics.stat().st_size > 0)
    kill_rank(process, 1, (run / "checkpoints" / ".unfinished").exists)
    out = finish(process)
    assert "restarted (1 of 2); from the beginning, because there was no checkpoint\n" in out
    assert "restarted (2 of 2); " in out
    assert_is_the_run_left_alone(run, runs)


@pytest.mark.slow
def test_torchrun_restarts_the_run_that_it_has_begun(runs: Path) -> None:
    """Also where nobody named its folder."""
    torchrun = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = Program(runs, TINY.split(), torchrun)
    kill_rank(process, 1, lambda: any(runs.glob("runs/*/checkpoints/step-000016")))
    out = finish(process)
    (run,) = (runs / "runs").iterdir()
    assert "restarted (1 of 1); resumed after step " in out
    assert_is_the_run_left_alone(run, runs)


def test_when_restarts_are_used_up_the_dead_rank_is_named(runs: Path) -> None:
    run = runs / "dead"
    process = Program(runs, [*TINY.split(), "--out", "dead"])
    kill_rank(process, 1, (run / "checkpoints" / "step-000016").exists)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "error: rank 1 failed: Signal 9 (SIGKILL) received by PID " in err
    assert err.splitlines()[-1] == "go on with: fsdp-overlap train --resume dead"
    assert latest(run).name >= "step-000016"


def fail(out: str, restarts: tuple[int, int]) -> list[str]:
    """What is noted on an error of a run at `out`."""

    def run(config: TrainConfig, *_: object) -> None:
        (config.out / "checkpoints" / "step-000004").mkdir(parents=True, exist_ok=True)
        raise RuntimeError("a collective failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "process_group", contextlib.nullcontext)
        patch.setattr(train, "restarts", lambda: restarts)
        patch.setattr(train, "_run", run)
        with pytest.raises(RuntimeError) as raised:
            train.train(TrainConfig(Path(out)), "cpu", resume=False)
    return getattr(raised.value, "__notes__", [])


def test_the_last_error_says_how_to_go_on(tmp_path: Path) -> None:
    first, last = str(tmp_path / "first"), str(tmp_path / "last")
    assert run_ranks(fail, 2, first, (0, 1)) == [[], []]
    note = f"go on with: fsdp-overlap train --resume {last}"
    assert run_ranks(fail, 2, last, (1, 1)) == [[note], [note]]


def test_restarts_are_asked_of_who_starts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_place(2, "cpu", 3).max_restarts == 3
    with pytest.raises(BadInput, match="--max-restarts -1: must not be negative"):
        find_place(2, "cpu", -1)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="torchrun has started the ranks; give it the option"):
        find_place(None, "cpu", 3)


def test_a_job_knows_its_own_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(name: str, run_id: str, *command: str) -> Path:
        be(run_id, *command)
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"job": this_job()}))
        return folder.relative_to(tmp_path)

    def be(run_id: str, *command: str) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        monkeypatch.setattr(sys, "argv", ["train", *command])

    monkeypatch.chdir(tmp_path)
    mine = begin("1", "77")
    begin("2", "77", "--lr", "0.1")
    begin("3", "78")
    begin("4", "none")
    (tmp_path / "runs" / "5").mkdir()
    (tmp_path / "runs" / "6").write_text("not a folder")
    be("77")
    assert run_of_this_job(None) == run_of_this_job(mine) == mine
    assert run_of_this_job(Path("runs/3")) is None
    be("none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_of_this_job(None) is None  # of the same command, but of another torchrun
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for name in ("7", "8"):  # torchrun, started twice
        store = dist.TCPStore("localhost", 0, is_master=True)
        monkeypatch.setenv("MASTER_PORT", str(store.port))
        assert run_of_this_job(None) is None
        nameless = begin(name, "none")
        assert run_of_this_job(None) == nameless


def test_ranks_that_start_again_do_not_read_what_the_dead_wrote() -> None:
    kept = dist.HashStore()
    parts: list[dict[int, dist.Store]] = []
    for _ in range(3):

        def meet(rank: int) -> None:
            parts[-1][rank] = fresh_store(kept, rank, 3, seconds=20)

        parts.append({})
        threads = [threading.Thread(target=meet, args=[rank]) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(3):
            parts[-1][rank].set(f"address of {rank}", f"{len(parts)}")
        kept.set("who is rank 1", "somebody who has died since")
    for number, stores in enumerate(parts, 1):
        assert {s.get(f"address of {r}") for s in stores.values() for r in range(3)} == {
            str(number).encode()
        }


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not come within 0 s"):
        fresh_store(dist.HashStore(), 0, 3, seconds=0)


def look(folders: list[str]) -> None:
    train.check_all_see(Path(folders[dist.get_rank()]), seconds=0)


def test_a_folder_that_a_machine_does_not_see_is_refused_on_every_rank(tmp_path: Path) -> None:
    there, elsewhere = str(tmp_path), str(tmp_path / "elsewhere")
    expect_rank_errors(look, 2, [there, elsewhere], match="BadInput: .*cannot see this folder")
