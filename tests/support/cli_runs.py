"""Waits for runs of `fsdp-overlap`, and compares them."""

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_overlap.checkpoint import SafeFileSystemReader, read_metadata
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
    assert latest(run).name == latest(runs / "alone").name
    ours, theirs = (tensors_in(latest(each)) for each in (run, runs / "alone"))
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the parameters and the states of the optimizer."""
    tensors = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in read_metadata(checkpoint).state_dict_metadata.items()
        if hasattr(item, "size")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=SafeFileSystemReader(checkpoint), no_dist=True)
    return tensors
