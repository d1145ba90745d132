"""Interrupting, resuming and exporting runs of `fsdp-overlap train`, from outside."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdp_overlap.checkpoint import read_metadata
from fsdp_overlap.tools.cli.checkpoints import step_of
from fsdp_overlap.tools.cli.run_folder import RunFolder
from support.cli_runs import (
    assert_is_the_run_left_alone,
    curve,
    export,
    finish,
    latest,
    run_main,
    wait_until,
)
from support.program import Program, somebody_is_left

STEPS = 24
# With Muon, whose state is of two kinds: its own and AdamW's.
TINY = f"--device cpu --steps {STEPS} --eval-every 8 --log-every 3 --batch-size 4 --seq-len 16"
TINY += " --layers 2 --width 16 --heads 2 --save-every 4 --optimizer muon"


def start(folder: Path, arguments: str) -> Program:
    return Program(folder, ["train", *arguments.split()])


def start_anew(folder: Path, arguments: str) -> subprocess.Popen[str]:
    """As a shell would, where a claim is about signals between processes."""
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_overlap", "train", *arguments.split()],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text and an uninterrupted run, `alone`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 100)
    finish(start(folder, f"{TINY} --data text.txt --out alone"))
    return folder


@pytest.fixture(scope="module")
def stopped(runs: Path) -> Path:
    """A run that was asked to stop in the middle, and what it left."""
    process = start_anew(runs, f"{TINY} --data text.txt --out stopped")
    wait_until((runs / "stopped" / "checkpoints" / "step-000004").exists, process)
    os.kill(process.pid, signal.SIGTERM)
    asked = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert time.monotonic() - asked < 20  # less than who asks usually waits before he kills
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in err
    assert "--resume stopped" in out
    return runs / "stopped"


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_saves_and_goes_on_as_if_it_had_not(
    runs: Path, stopped: Path, copy: Path
) -> None:
    assert step_of(latest(stopped)) < STEPS
    assert f"resumed after step {step_of(latest(stopped))}" in finish(
        start(runs, f"--resume {copy}")
    )
    assert_is_the_run_left_alone(copy, runs)


@pytest.mark.slow
@pytest.mark.parametrize("in_a_save", [False, True])
def test_a_killed_run_resumes_as_if_it_had_not_been(
    runs: Path, tmp_path: Path, in_a_save: bool
) -> None:
    run = tmp_path / "killed"
    process = start(runs, f"{TINY} --data text.txt --out {run}")
    wait_until((run / "checkpoints" / "step-000008").exists, process)
    if in_a_save:
        wait_until((run / "checkpoints" / ".unfinished").exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert step_of(latest(run)) < STEPS
    finish(start(runs, f"--resume {run}"))
    assert_is_the_run_left_alone(run, runs)
    assert not (run / "checkpoints" / ".unfinished").exists()


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_save_and_end(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "alone"
    process = start_anew(runs, f"{TINY} --data text.txt --out {run}")
    wait_until((run / "checkpoints" / "step-000004").exists, process)
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while somebody_is_left(process.pid):
        assert time.monotonic() < end
        time.sleep(0.1)
    RunFolder(run)
    assert latest(run).name >= "step-000004"


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(runs: Path, copy: Path) -> None:
    finish(start(runs, f"--resume {copy} --ranks 1"))
    mine, alone = curve(copy), curve(runs / "alone")
    assert [m["step"] for m in mine] == [m["step"] for m in alone]
    assert [m["loss"] for m in mine] == pytest.approx([m["loss"] for m in alone], rel=1e-3)
    assert json.loads((copy / "config.json").read_text())["batch_size"] == 8


def test_the_last_are_kept_and_a_finished_run_resumes_to_its_end(runs: Path) -> None:
    names = sorted(path.name for path in (runs / "alone" / "checkpoints").iterdir())
    assert names == ["step-000020", "step-000024"]
    before = curve(runs / "alone")
    assert "validation loss" in finish(start(runs, "--resume alone"))
    assert curve(runs / "alone") == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "metadata flipped": (lambda c: flip(c / ".metadata"), r"checksum is not that"),
    "metadata missing": (lambda c: (c / ".metadata").unlink(), r"\.metadata: No such file"),
    "file missing": (lambda c: (c / "__1_0.distcp").unlink(), r"__1_0.distcp: No such file"),
    "file cut": (lambda c: os.truncate(c / "__0_0.distcp", 5000), r"has 5,000 bytes of the"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_anything_starts(
    copy: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = DAMAGES[damage]
    change(latest(copy))
    before = files_of(copy)
    assert run_main("train", "--resume", str(copy)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --resume {copy}: ")
    assert f"remove {latest(copy)} to resume from the checkpoint before" in error
    assert re.search(message, error)
    assert files_of(copy) == before


@pytest.mark.slow
def test_damaged_values_are_refused_before_the_run_is_touched(runs: Path, copy: Path) -> None:
    flip(latest(copy) / "__0_0.distcp")
    before = files_of(copy)
    process = start(runs, f"--resume {copy}")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "does not match; remove this folder to resume from the checkpoint before it" in err
    assert files_of(copy) == before
    shutil.rmtree(latest(copy))
    finish(start(runs, f"--resume {copy}"))
    assert_is_the_run_left_alone(copy, runs)


def test_what_cannot_be_resumed_is_one_line(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"steps": 3}')
    moved = Path(shutil.copytree(copy, tmp_path / "moved"))
    (tmp_path / "other.txt").write_text("Call me Ishmael. " * 300)
    settings = json.loads((moved / "config.json").read_text())
    settings["data"] = str(tmp_path / "other.txt")
    (moved / "config.json").write_text(json.dumps(settings))
    cases = {
        f"--resume {tmp_path / 'empty'}": r"config.json: No such file or directory",
        f"--resume {tmp_path / 'foreign'}": r"config.json is not that of a run",
        f"--resume {moved}": r"is not the text that the run began with",
        f"--resume {copy} --lr 0.1": r"--lr cannot be changed by --resume",
        f"--resume {copy} --save-every 3": r"--save-every cannot be changed by --resume",
        f"--resume {copy} --ranks 3 --device cpu": r"8 sequences a step cannot be shared equally",
    }
    before = files_of(copy)
    for arguments, message in cases.items():
        assert run_main("train", *arguments.split()) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert files_of(copy) == before


def test_two_runs_do_not_write_one_folder(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="another run is writing there"):
        RunFolder(tmp_path)
    del first


@pytest.fixture
def exported(stopped: Path, tmp_path: Path) -> Path:
    out = tmp_path / "model.pt"
    assert export(latest(stopped), out) == 0
    return out


def test_an_export_is_the_model(stopped: Path, exported: Path, tmp_path: Path) -> None:
    tensors = torch.load(exported, weights_only=True)
    saved = read_metadata(latest(stopped)).state_dict_metadata
    assert {f"model.{name}" for name in tensors} == {n for n in saved if n.startswith("model.")}
    assert tensors["embed.weight"].shape == (256, 16)
    assert tensors["embed.weight"].std() > 0
    assert export(latest(stopped), tmp_path / "model.safetensors") == 0
    same = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensors[name], same[name]) for name in tensors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt", "model.safetensors"]


def test_a_run_begins_with_what_was_exported(runs: Path, stopped: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights" / "model.safetensors"
    file.parent.mkdir()
    assert export(latest(stopped), file) == 0
    options = f"{TINY} --data {runs / 'text.txt'} --out on --from {file.parent} --steps 2"
    finish(start(tmp_path, f"{options} --eval-every 1 --log-every 1 --lr 1e-9"))
    before = next(m["val_loss"] for m in reversed(curve(runs / "alone")) if "val_loss" in m)
    found = [m["val_loss"] for m in curve(tmp_path / "on")]
    assert len(found) == 2
    assert found == pytest.approx([found[0]] * 2, rel=1e-3)
    assert before < found[0] < 5  # it was stopped in the middle, and begins at 5.5
    file.unlink()
    finish(start(tmp_path, "--device cpu --resume on"))  # of which nothing is read again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--from nowhere", "nowhere: No such file or directory"),
        ("--from empty", "empty has no file *.safetensors"),
        ("--from model.safetensors --width 32", "nothing was loaded: embed.weight has shape"),
        ("--from model.safetensors --layers 3", "nothing was loaded: no file has blocks.2."),
    ],
)
def test_weights_of_no_such_model_are_one_line(
    stopped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    assert export(latest(stopped), tmp_path / "model.safetensors") == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert run_main("train", *TINY.split(), *options.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --from ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "model.safetensors"]


def test_what_cannot_be_exported_is_one_line(
    stopped: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = latest(stopped)
    cases = [
        (checkpoint, exported, [], "exists; give a new file"),
        (checkpoint, tmp_path / "model.bin", [], "use a name that ends in .pt, .pth or"),
        (tmp_path, tmp_path / "new.pt", [], ".metadata: No such file or directory"),
        (checkpoint, tmp_path / "new.pt", ["--prefix", "mod"], "can be one of draws, loss_sum"),
    ]
    capsys.readouterr()
    for folder, out, options, message in cases:
        assert export(folder, out, *options) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
