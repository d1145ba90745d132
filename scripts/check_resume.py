"""Kills `fsdp-overlap train` with SIGKILL at random moments, resumes it each time, and compares the
run with one that was left alone: the same losses at every step, the same last checkpoint."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
import typer
from rich.console import Console

from fsdp_overlap.checkpoint import SafeFileSystemReader, read_metadata

TRAIN = [sys.executable, "-m", "fsdp_overlap", "train"]
TINY = (
    "--device cpu --eval-every 50 --log-every 7 --batch-size 4 --seq-len 32 --layers 3 --width 96"
)
TIMELESS = ("step", "loss", "grad_norm", "lr", "val_loss")
OUT = Console(highlight=False, soft_wrap=True)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRAIN, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, to be killed as one
    )


def kill(process: subprocess.Popen[str]) -> None:
    """The launcher and its ranks, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_for(process: subprocess.Popen[str], is_there: Any, seconds: float) -> bool:
    """Whether it came about before the process ended."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        if is_there():
            return True
        time.sleep(0.0005)
    return False


def live_once(run: Path, arguments: list[str], draw: random.Random) -> str:
    """Starts or resumes the run and kills it; says when it was killed."""
    checkpoints = run / "checkpoints"
    before = {path.name for path in checkpoints.glob("step-*")}
    log = (run / "metrics.jsonl").stat().st_mtime_ns if before else 0
    process = start(*arguments)
    moment = draw.choice(["starting", "training", "training", "saving", "saving"])
    if moment == "starting":
        wait_for(process, lambda: False, draw.uniform(0, 8))
    elif moment == "training":
        metrics = run / "metrics.jsonl"
        wait_for(process, lambda: metrics.exists() and metrics.stat().st_mtime_ns > log, 60)
        wait_for(process, lambda: False, draw.uniform(0, 2))
    else:
        saves = draw.randint(1, 3)
        for _ in range(saves):
            wait_for(process, lambda: not (checkpoints / ".unfinished").exists(), 60)
            wait_for(process, (checkpoints / ".unfinished").exists, 60)
        wait_for(process, lambda: False, draw.uniform(0, 0.03))
    if process.poll() is not None:
        error = process.communicate()[1]
        if process.returncode:
            raise SystemExit(f"a resumed run failed: {error}")
        return "finished"
    is_saving = (checkpoints / ".unfinished").exists()
    kill(process)
    return "while saving" if is_saving else f"while {moment}".replace("saving", "training")


def curve(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k in TIMELESS} for line in lines]


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    last = max((run / "checkpoints").glob("step-*"))
    tensors = {
        fqn: torch.empty(item.size, dtype=item.properties.dtype)
        for fqn, item in read_metadata(last).state_dict_metadata.items()
        if hasattr(item, "size")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=SafeFileSystemReader(last), no_dist=True)
    return tensors


def main(
    kills: Annotated[int, typer.Option(help="SIGKILLs before the run may finish.")] = 20,
    steps: Annotated[int, typer.Option(help="Steps of the run.")] = 400,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
) -> None:
    """Exit code 0 if the killed run is the run that was left alone."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(chr(draw.randint(97, 122)) for _ in range(20_000)))
        common = [*TINY.split(), "--data", str(text), "--steps", str(steps)]
        common += ["--save-every", str(save_every)]
        alone, killed = Path(folder) / "alone", Path(folder) / "killed"
        OUT.print(f"a run of {steps} steps, left alone")
        process = start(*common, "--out", str(alone))
        error = process.communicate()[1]
        if process.returncode:
            raise SystemExit(f"it failed: {error}")

        moments: Counter[str] = Counter()
        while sum(moments.values()) < kills:
            begun = (killed / "config.json").exists()
            arguments = ["--resume", str(killed)] if begun else [*common, "--out", str(killed)]
            if killed.exists() and not begun:  # killed before it had written anything
                shutil.rmtree(killed)
            moment = live_once(killed, arguments, draw)
            if moment == "finished":
                break
            moments[moment] += 1
            done = max((killed / "checkpoints").glob("step-*"), default=Path("no checkpoint"))
            OUT.print(f"kill {sum(moments.values())} {moment}; {done.name}")
        if sum(moments.values()) < kills:
            raise SystemExit(f"it finished after {sum(moments.values())} kills; use more --steps")
        process = start("--resume", str(killed))
        error = process.communicate()[1]
        if process.returncode:
            raise SystemExit(f"the last resumed run failed: {error}")

        if curve(killed) != curve(alone):
            raise SystemExit("the losses of the killed run are not those of the run left alone")
        ours, theirs = final_tensors(killed), final_tensors(alone)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[k], theirs[k]) for k in ours):
            raise SystemExit("the last checkpoint is not that of the run left alone")
        OUT.print(
            f"killed {sum(moments.values())} times ("
            + ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items()))
            + f"): {len(curve(alone))} lines of metrics and {len(ours)} tensors of the last "
            "checkpoint are equal, bit for bit"
        )


if __name__ == "__main__":
    typer.run(main)
