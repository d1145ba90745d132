"""The example programs run, on ranks of their own and under ``torchrun``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

TRAINING = Path(__file__).parents[1] / "docs" / "examples" / "training.py"


def run_training(half: bool, folder: str, *epochs: int) -> list[float]:
    spec = importlib.util.spec_from_file_location("training", TRAINING)
    assert spec is not None
    assert spec.loader is not None
    training: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(training)
    return [loss for count in epochs for loss in training.run(Path(folder), count, half)]


@pytest.mark.parametrize("half", [False, True])
def test_the_training_example_learns(tmp_path: Path, half: bool) -> None:
    first, *_, last = run_ranks(run_training, 2, half, str(tmp_path), 4)[0]
    assert last < first / 2


def test_the_training_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = run_ranks(run_training, 2, False, str(tmp_path / "whole"), 3)
    parts = run_ranks(run_training, 2, False, str(tmp_path / "parts"), 1, 3)
    assert parts == whole


@pytest.mark.slow
def test_the_training_example_runs_under_torchrun(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc-per-node", "2", str(TRAINING), "--folder", str(tmp_path), "--epochs", "1"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss" in done.stdout
    assert (tmp_path / "epoch-1" / ".metadata").exists()
