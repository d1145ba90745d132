"""Waits for runs of `fsdp-overlap`, and compares them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_overlap.tools.cli import main
from fsdp_overlap.tools.cli.checkpoints import Checkpoints
from support.program import Program

TIMELESS = ("step", "loss", "grad_norm", "lr", "val_loss")


def finish(process: Program) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def wait_until(is_there: Callable[[], bool], process: Program | subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not is_there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)


def curve(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k in TIMELESS} for line in lines]


def export(checkpoint: Path, out: Path, *options: str) -> int:
    return run_main("export", str(checkpoint), str(out), *options)


def run_main(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fsdp-overlap", *arguments])
        try:
            return main.run()
        except SystemExit as end:  # how typer ends
            return int(end.code or 0)


def latest(run: Path) -> Path:
    found = Checkpoints(run / "checkpoints", keep=1).latest()
    assert found is not None
    return found


def assert_is_the_run_left_alone(run: Path, runs: Path) -> None:
    assert curve(run) == curve(runs / "alone")
    tensors = []
    for each in (run, runs / "alone"):
        out = run / f"{each.name}.pt"
        assert export(latest(each), out) == 0
        tensors.append(torch.load(out, weights_only=True))
        out.unlink()
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
