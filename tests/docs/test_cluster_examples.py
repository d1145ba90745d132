"""The examples for several machines run, on machines that are played by this one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.cli_runs import assert_is_the_run_left_alone, finish, wait_until
from support.examples import EXAMPLES, run_training
from support.pages import ROOT, TESTS
from support.program import Program
from support.ranks import run_ranks

TINY = "--device cpu --steps 60 --eval-every 30 --log-every 20 --save-every 10 --data text.txt"
TINY += " --keep 99 --batch-size 4 --seq-len 16 --layers 2 --width 16 --heads 2"
# As Slurm's, for a job of two nodes of one core each. A task has a process group.
STUBS = {
    "scontrol": """
case "$1 $2" in
"show hostnames") printf 'localhost\\nlocalhost\\n' ;;
"requeue $SLURM_JOB_ID") touch requeued ;;
*) exit 1 ;;
esac""",
    "scancel": """
[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] || exit 1
for task in $(cat tasks); do kill -TERM -- "-$task"; done""",
    "srun": """
set -m
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 SLURM_NTASKS=$SLURM_NNODES \\
        taskset -c $((node % $(nproc))) "$@" &
    echo $! >> tasks
done
code=0
for task in $(cat tasks); do wait "$task" || code=$?; done
exit $code""",
}


def free_port() -> int:
    while True:
        port = 20000 + random.randrange(10000)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where commands run, with a folder `bin` for stand-ins."""
    (tmp_path / "bin").mkdir()
    found = f'PYTHONPATH="{TESTS}:$PYTHONPATH"'
    torchrun = f'{found} exec {sys.executable} -m support.torchrun "$@"'
    for name, script in {**STUBS, "torchrun": torchrun}.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)
    return tmp_path


@contextmanager
def started(folder: Path, *command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A command in `folder`. Nothing that it has started is left afterwards."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    outer = {name: value for name, value in os.environ.items() if name not in launcher}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", *command],
        cwd=folder,
        env=outer | {"RANKS": "1", "PATH": path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


@pytest.mark.slow
def test_a_rank_dies_on_one_of_two_machines_and_the_training_example_goes_on(folder: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    script = [str(EXAMPLES / "torchrun.sh"), endpoint, "2", "--folder", "run", "--epochs", "4"]
    with started(folder, *script) as first, started(folder, *script) as second:
        wait_until((folder / "run" / "epoch-1" / ".metadata").exists, second)
        (rank,) = descendants(second.pid)
        os.kill(rank, signal.SIGKILL)
        outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], outputs
    assert any("Signal 9" in out or "exitcode: -9" in out for out in outputs)
    undisturbed = run_ranks(run_training, 2, False, str(folder / "undisturbed"), 4)[0]
    said = [line for out in outputs for line in out.splitlines() if line.startswith("epoch 4")]
    assert said == [f"epoch 4: loss {undisturbed[-1]:.4f}"]


@pytest.mark.slow
def test_a_slurm_job_saves_before_its_time_is_over_and_goes_on_when_queued_again(
    folder: Path,
) -> None:
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 100)
    number = str(free_port() - 20000)
    job = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
    script = [str(EXAMPLES / "slurm.sh"), *TINY.split()]
    run = folder / "runs" / number
    with started(folder, *script, **job) as process:
        wait_until((run / "checkpoints" / "step-000010").exists, process)
        os.kill(process.pid, signal.SIGUSR1)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
    assert "stopped; saved runs/" in out
    assert (folder / "requeued").exists()
    assert not (run / "overlap.html").exists()

    (folder / "tasks").unlink()
    with started(folder, *script, **job) as process:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
    assert "; resumed after step " in out
    finish(Program(folder, ["train", *TINY.split(), "--out", "alone"]))
    assert_is_the_run_left_alone(run, folder)


SCRIPTS = [*(ROOT / "scripts").rglob("*.sh"), *TESTS.rglob("*.sh")]


@pytest.mark.parametrize(
    "script",
    sorted([*EXAMPLES.glob("*.sh"), *SCRIPTS]),
    ids=lambda path: path.name,
)
def test_the_scripts_are_free_of_what_shellcheck_knows(script: Path) -> None:
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("needs shellcheck, which is not installed")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_sbatch_reads_all_of_its_options() -> None:
    """It stops at the first command."""
    lines = (EXAMPLES / "slurm.sh").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options
    assert max(options) < first_command
