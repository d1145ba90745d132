"""A run of ``fsdp-overlap train`` is killed at random moments and resumed each time.

``--tries 20 --seed 1`` kills it 20 times, at other moments.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cli_runs import assert_is_the_run_left_alone, curve, finish
from support.program import Program
from support.tries import Tries

SAVE_EVERY = 10
MOST_SAVES = 3
"""It is killed in one of as many, counted from its start."""

STEPS_OF_A_LIFE = (MOST_SAVES + 1) * SAVE_EVERY
"""More than it gets ahead before it is killed."""

TINY = "train --device cpu --eval-every 50 --log-every 1 --batch-size 4 --seq-len 32"
TINY += f" --layers 3 --width 96 --save-every {SAVE_EVERY} --data text.txt"


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_ends_as_if_it_had_not_been(
    tries: Tries, tmp_path: Path
) -> None:
    """The same losses at every step, the same last checkpoint, bit for bit."""
    kills, seed = tries.or_else(3)
    draw = random.Random(seed)
    (tmp_path / "text.txt").write_text("".join(chr(draw.randint(97, 122)) for _ in range(20_000)))
    train = [*TINY.split(), "--steps", str((kills + 1) * STEPS_OF_A_LIFE)]
    finish(Program(tmp_path, [*train, "--out", "alone"]))
    run = tmp_path / "killed"
    moments: Counter[str] = Counter()
    for _ in range(kills):
        moments[live_once(run, arguments_for(run, train), draw)] += 1
    finish(Program(tmp_path, arguments_for(run, train)))
    assert_is_the_run_left_alone(run, tmp_path)
    when = ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items()))
    tries.note(f"killed {kills} times ({when}) in {len(curve(run))} lines of metrics")


def arguments_for(run: Path, train: list[str]) -> list[str]:
    if (run / "config.json").exists():
        return ["train", "--resume", run.name]
    if run.exists():  # killed before it had written anything
        shutil.rmtree(run)
    return [*train, "--out", run.name]


def live_once(run: Path, arguments: list[str], draw: random.Random) -> str:
    """Start or resume the run and kill it, launcher and ranks at once. Return when it was."""
    metrics, unfinished = run / "metrics.jsonl", run / "checkpoints" / ".unfinished"

    def size() -> int:
        return metrics.stat().st_size if metrics.exists() else 0

    def lines() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    process = Program(run.parent, arguments)
    before = size()
    moment = draw.choice(["starting", "training", "training", "saving", "saving"])
    if moment == "starting":
        wait(process, lambda: size() != before, draw.uniform(0, 4))
    else:  # a resumed run cuts off the lines behind its checkpoint, and then writes
        wait(process, lambda: size() != before, 60)
        first = lines()

        def is_late() -> bool:
            return lines() - first >= MOST_SAVES * SAVE_EVERY

        if moment == "training":
            wanted = draw.randint(1, 2 * SAVE_EVERY)
            wait(process, lambda: lines() - first >= wanted, 60)
        else:
            for _ in range(draw.randint(1, MOST_SAVES)):
                # A save may be over before it is seen.
                wait(process, lambda: not unfinished.exists() or is_late(), 60)
                wait(process, lambda: unfinished.exists() or is_late(), 60)
            time.sleep(draw.uniform(0, 0.03))
    assert process.poll() is None, process.communicate()
    is_saving = unfinished.exists()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    return "while saving" if is_saving else f"while {moment}".replace("saving", "training")


def wait(process: Program, is_there: Callable[[], bool], seconds: float) -> None:
    """Until it is there, the process has ended, or it has had as many seconds."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end and not is_there():
        time.sleep(0.0005)
