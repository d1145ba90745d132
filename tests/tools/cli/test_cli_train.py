"""`fsdp-overlap train` from outside: what it leaves, what it prints, what it refuses."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_overlap.tools.cli import main
from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.data import load_text, move, sample_batch, split_text, unigram_entropy
from fsdp_overlap.tools.cli.launch import find_place
from fsdp_overlap.tools.cli.output import BadInput
from fsdp_overlap.tools.cli.process_group import cores, process_group
from fsdp_overlap.tools.cli.run_folder import check_out
from fsdp_overlap.tools.profiling import read_report
from support.program import Program

TINY = "--steps 4 --eval-every 2 --log-every 1 --batch-size 4 --seq-len 32".split()
TINY += "--layers 3 --width 32 --heads 2".split()
TRAIN = ["train", "--device", "cpu", *TINY, "--out", "run"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("All that is gold does not glitter; not all those who wander are lost.\n" * 200)
    return path


def read_metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, text_file: Path
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Where a run on two ranks was started, with its folder `run`, and how it ended. It alone is
    started as a shell would, by new interpreters."""
    path = tmp_path_factory.mktemp("cwd")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_overlap", *TRAIN, "--data", str(text_file)],
        cwd=path,
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return path, done


@pytest.mark.slow
def test_a_run_leaves_its_folder_and_says_what_it_did(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    path, done = finished
    folder = path / "run"
    assert [p.name for p in path.iterdir()] == ["run"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints",
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "overlap.html",
        "overlap.json",
        "overlap.png",
        "traces",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert (config["ranks"], config["layers"], config["device"]) == (2, 3, "cpu")
    metrics = read_metrics(folder)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert [m["step"] for m in metrics if "val_loss" in m] == [2, 4]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"{metrics[-1]['val_loss']:.3f} nats/byte" in done.stdout
    assert f"{config['unigram_entropy']:.3f} nats/byte" in done.stdout


def test_the_traces_hold_every_collective_of_two_steps(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    path, done = finished
    report = read_report(*(path / "run" / "traces").iterdir())
    assert [(rank.rank, rank.steps) for rank in report.ranks] == [(0, 2), (1, 2)]
    for rank in report.ranks:
        # The steps are like those before them, though a validation came just before.
        names = {c.name for c in rank.collectives if c.kind == "other"}
        assert names == {"all_reduce", "order_check"}
        # Three blocks and the root; for backward, at least those that compute has left behind.
        assert rank.total("all_gather", "forward").count == 2 * 4
        assert rank.total("all_gather", "backward").count >= 2 * 2
        assert rank.total("reduce_scatter").count == 2 * 4
        assert {c.name for c in rank.collectives if c.kind == "reduce_scatter"} >= {"blocks.0"}
    assert re.search(r"^forward all-gathers +rank [01] +[\d.]+ of 4 ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_torchrun_gives_the_same_run(
    tmp_path: Path, text_file: Path, finished: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torchrun = ["--nproc-per-node", "2", "--master-port", str(port)]
    process = Program(tmp_path, [*TRAIN, "--data", str(text_file)], torchrun)
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    timeless = ("step", "loss", "val_loss", "lr")
    assert [[m.get(k) for k in timeless] for m in read_metrics(tmp_path / "run")] == [
        [m.get(k) for k in timeless] for m in read_metrics(finished[0] / "run")
    ]


@pytest.mark.slow
def test_how_many_ranks_share_a_batch_does_not_change_the_run(
    tmp_path: Path, text_file: Path, finished: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    alone = ["--ranks", "1", "--batch-size", "8", "--data", str(text_file)]
    process = Program(tmp_path, [*TRAIN, *alone])
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    one, two = (read_metrics(path / "run") for path in (tmp_path, finished[0]))
    assert [m["loss"] for m in one] == pytest.approx([m["loss"] for m in two], rel=1e-4)
    assert one[-1]["grad_norm"] == pytest.approx(two[-1]["grad_norm"], rel=1e-3)


def test_a_failing_rank_fails_the_command_readably(tmp_path: Path, text_file: Path) -> None:
    # More sequences than any memory holds.
    huge = ["--batch-size", str(1 << 50), "--data", str(text_file)]
    process = Program(tmp_path, [*TRAIN, *huge])
    _, err = process.communicate(timeout=150)
    assert process.returncode == 1
    assert re.match(r"error: rank [01] failed: RuntimeError: ", err.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data nowhere", "--data nowhere: No such file or directory"),
        ("--data empty.txt", "--data empty.txt holds no text"),
        ("--data folder", "--data folder holds no text"),
        ("--ranks 0", "--ranks 0: must be at least 1"),
        ("--ranks 100000", "--ranks 100000: at most"),
        ("--width 100 --heads 3", "--width 100 cannot be split into --heads 3"),
        ("--data short.txt --seq-len 100", "--seq-len 100 is too long for 500 bytes"),
        ("--out folder/file", "--out folder/file is not a folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("x" * 500)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["fsdp-overlap", "train", "--device", "cpu", *arguments.split()]
    )
    assert main.run() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"error: {message}")
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_input_is_exit_code_two(tmp_path: Path) -> None:
    process = Program(tmp_path, ["train", "--device", "cpu", "--data", "nowhere"])
    out, err = process.communicate(timeout=150)
    assert process.returncode == 2
    assert out == ""
    assert err == "error: --data nowhere: No such file or directory\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"batch_size": -1}, "--batch-size -1: must be at least 1"),
        ({"microbatches": 0}, "--microbatches 0: must be at least 1"),
        (
            {"batch_size": 6, "microbatches": 4},
            "--microbatches 4: --batch-size 6 cannot be split into as many equal parts; use a "
            "divisor of 6, or --batch-size 8",
        ),
        ({"zero_stage": 0}, "--zero-stage 0: use 1, 2 or 3"),
        ({"prefetch": -1}, "--prefetch -1: must not be negative"),
        ({"lr": math.nan}, "--lr nan: must be a positive number"),
        ({"dtype": "int8"}, "--dtype int8: use float32 or bfloat16"),
        (
            {"gather_dtype": "float16"},
            "--gather-dtype float16: use float8_e4m3fn, float8_e5m2, int8",
        ),
        ({"optimizer": "sgd"}, "--optimizer sgd: use adamw or muon"),
        ({"width": 12, "heads": 5}, "heads that fit this width: 1, 2, 3, 6"),
        ({"width": 7, "heads": 1}, "use an even width"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float | str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TrainConfig(out=Path("run"), **settings)


def test_a_used_folder_is_not_overwritten(tmp_path: Path) -> None:
    check_out(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(BadInput, match="is not empty"):
        check_out(tmp_path)
    with pytest.raises(BadInput, match="is not a folder"):
        check_out(tmp_path / "config.json" / "run")


JOINED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def set_only(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in (*JOINED, *MEETING, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_ranks_must_agree_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **JOINED, **MEETING)
    assert find_place(None, "cpu").joining
    with pytest.raises(BadInput, match="torchrun has started 2"):
        find_place(3, "cpu")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (JOINED, "MASTER_ADDR and MASTER_PORT: not set, and ranks need them to meet"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE set, but not LOCAL_RANK: set all"),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", **MEETING},
            "srun has started 4 tasks, and RANK, LOCAL_RANK, WORLD_SIZE are not set: let "
            r"each task export RANK=\$SLURM_PROCID LOCAL_RANK=\$SLURM_LOCALID "
            r"WORLD_SIZE=\$SLURM_STEP_NUM_TASKS, MASTER_ADDR and MASTER_PORT",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 tasks"),
        (JOINED | MEETING | {"RANK": ""}, "RANK='': must be a number"),
        (JOINED | MEETING | {"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two': must be a"),
        (JOINED | MEETING | {"RANK": "2"}, "RANK=2: must be below WORLD_SIZE, which is 2"),
        (
            {"PMI_SIZE": "2", "RANK": "1"},
            "mpiexec has started 2 tasks, and LOCAL_RANK, WORLD_SIZE are",
        ),
    ],
)
def test_who_starts_ranks_must_say_which(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    set_only(monkeypatch, **variables)
    with pytest.raises(BadInput, match=says):
        find_place(None, "cpu")


def test_ranks_need_not_know_how_many_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in scripts for srun and mpirun, of which a machine may have a part of the ranks."""
    many = {"RANK": "999", "LOCAL_RANK": "1", "WORLD_SIZE": "1000"}
    set_only(monkeypatch, **many, **MEETING)
    assert find_place(None, "cpu").ranks == 1000
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **MEETING, "MASTER_PORT": port}
    set_only(monkeypatch, **one)
    threads = torch.get_num_threads()
    try:
        with process_group("cpu"):
            assert torch.get_num_threads() == cores()
    finally:
        torch.set_num_threads(threads)


def test_the_split_is_the_same_each_time_and_loses_nothing() -> None:
    text = bytes(range(256)) * 4000
    train, validation = split_text(text)
    assert len(train) + len(validation) == len(text)
    assert len(validation) == pytest.approx(len(text) / 10, rel=0.1)
    again = split_text(text)
    assert torch.equal(train, again[0])
    assert torch.equal(validation, again[1])
    short_train, short_validation = split_text(bytes(range(20)))
    assert short_validation.tolist() == [18, 19]
    assert short_train.tolist() == list(range(18))


def test_a_folder_is_read_in_order_of_name_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in (("b", b"B" * 50), ("a/z", b"Z" * 50), (".git", b"!"), ("c", b"\0")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    text = load_text(tmp_path, seq_len=4)
    assert bytes(text.train.tolist()) == b"Z" * 50 + b"B" * 40
    assert bytes(text.validation.tolist()) == b"B" * 10


def test_batches_travel_to_an_accelerator_while_the_host_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[torch.Tensor] = []
    # Which needs an accelerator; the meta device stands for one.
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: pinned.append(self.clone()) or pinned[-1]
    )
    copies: list[tuple[torch.Tensor, bool]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._to_copy.default:
                copies.append((args[0], kwargs["non_blocking"]))
            return func(*args, **(kwargs or {}))

    batch = torch.arange(12).view(3, 4)[:, :-1]
    assert move(batch, torch.device("cpu")) is batch
    with Copies():
        moved = move(batch, torch.device("meta"))
    assert moved.device.type == "meta"
    [(source, non_blocking)] = copies
    assert source is pinned[0]
    assert non_blocking


def test_the_default_text_is_source_code() -> None:
    text = load_text(None, seq_len=256)
    assert b"def __init__(self" in bytes(text.train.tolist())
    assert 2.5 < unigram_entropy(text.validation) < 4


def test_unigram_entropy_is_in_nats_per_byte() -> None:
    def entropy(text: bytes) -> float:
        return unigram_entropy(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    assert entropy(b"aaaa") == 0
    assert entropy(b"abab") == pytest.approx(math.log(2))
    assert entropy(bytes(range(256))) == pytest.approx(math.log(256))
    assert entropy(b"aaab") == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_targets_are_the_next_bytes() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = sample_batch(text, 64, 9, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (64, 9)
    assert torch.equal(inputs + 1, targets)
    # The last sequence that fits may be drawn too.
    last, _ = sample_batch(text[:10], 1, 9, torch.Generator())
    assert last.tolist() == [list(range(9))]
