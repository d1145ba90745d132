"""Groups of sharded ranks under torchft: one is killed in mid-step, comes back and heals.

torchft has an environment of its own, which ``scripts/clients/run.sh torchft`` makes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from support.examples import EXAMPLES

ROOT = EXAMPLES.parents[1]
BIN = ROOT / ".venv-torchft" / "bin"
EXAMPLE = EXAMPLES / "torchft_training.py"
STEPS, PAUSE = 120, 0.25
RANKS = 2  # of a group

pytestmark = [
    pytest.mark.skipif(not BIN.exists(), reason="needs scripts/clients/run.sh torchft"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


class Group:
    """A torchrun of the example, with what it has printed so far in a file."""

    def __init__(self, number: int, folder: Path, lighthouse: int) -> None:
        self.number = number
        self.log = folder / f"group-{number}-{time.monotonic_ns()}.log"
        variables = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCHFT_LIGHTHOUSE": f"http://localhost:{lighthouse}",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(str(BIN / "python"), "-m", "torch.distributed.run"),
                    *("--nproc-per-node", str(RANKS), "--rdzv-backend", "c10d"),
                    *("--rdzv-endpoint", "localhost:0", str(EXAMPLE)),
                    *("--group", str(number), "--steps", str(STEPS), "--pause", str(PAUSE)),
                ],
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def steps(self) -> list[dict[str, Any]]:
        """What ranks have told of their steps."""
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]

    def kill(self) -> None:
        pid = self.process.pid
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (*map(int, ranks), pid):
            os.kill(each, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(group: Group) -> Iterator[Group]:
    try:
        yield group
    finally:
        if group.process.poll() is None:
            with suppress(FileNotFoundError, ProcessLookupError):
                group.kill()


@contextmanager
def lighthouse() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [str(BIN / "torchft_lighthouse"), "--bind", f"[::]:{port}"]
    command += ["--min_replicas", "1", "--join_timeout_ms", "1000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], *groups: Group) -> None:
    end = time.monotonic() + 90
    while not condition():
        logs = "\n".join(group.log.read_text()[-3000:] for group in groups)
        assert time.monotonic() < end, logs
        assert all(group.process.poll() in (None, 0) for group in groups), logs
        time.sleep(0.05)


def last(group: Group) -> int:
    return max((each["step"] for each in group.steps()), default=-1)


def test_a_group_that_is_killed_comes_back_and_numbers_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(lighthouse())
        stays = stack.enter_context(running(Group(0, tmp_path, port)))
        wait_until(lambda: last(stays) > 0, stays)  # it is never behind, so it heals from nobody
        dies = stack.enter_context(running(Group(1, tmp_path, port)))
        wait_until(
            lambda: any(e["groups"] == 2 and e["step"] > 3 for e in dies.steps()), stays, dies
        )
        dies.kill()
        killed_at = last(stays)
        wait_until(lambda: last(stays) > killed_at + 5, stays)
        back = stack.enter_context(running(Group(1, tmp_path, port)))
        for group in (stays, back):
            wait_until(lambda group=group: group.process.poll() is not None, stays, back)
    committed = [each for each in stays.steps() if each["committed"]]
    assert [each["step"] for each in committed if not each["rank"]] == list(range(STEPS))
    participants = {each["step"]: each["groups"] for each in committed}
    alone = [step for step, groups in participants.items() if groups == 1 and step >= killed_at]
    assert alone, "the other group was not missed"
    healed = [each for each in back.steps() if each["step"] > max(alone) + 1]
    assert len({each["rank"] for each in healed}) == RANKS, "it did not come back"
    expected = losses_of_one_process(participants)
    for each in (*committed, *healed):
        wanted = expected[each["step"]][each["group"], each["rank"]]
        assert each["loss"] == pytest.approx(wanted, rel=1e-9), each


def losses_of_one_process(participants: dict[int, int]) -> list[dict[tuple[int, int], float]]:
    """Of an unsharded model, by step, and by group and rank: each step with the batches of so many
    groups."""
    program = example()
    model = program.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        losses = {}
        for group in range(2):
            for rank in range(RANKS):
                x, y = program.batch(step, group, rank)
                losses[group, rank] = torch.nn.functional.mse_loss(model(x), y)
        groups = range(participants[step])
        mine = [loss for (group, _), loss in losses.items() if group in groups]
        torch.stack(mine).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({key: loss.item() for key, loss in losses.items()})
    return found


def example() -> ModuleType:
    """The example, whose import of torchft only its own environment can do."""
    source = EXAMPLE.read_text().replace("import torchft\n", "")
    module = ModuleType("torchft_training")
    exec(compile(source, str(EXAMPLE), "exec"), module.__dict__)
    return module
