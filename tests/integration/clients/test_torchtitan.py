"""torchtitan's trainer and models train on our units as on FSDP2's, each in a process per rank.

torchtitan has an environment of its own, which ``scripts/clients/run.sh torchtitan`` makes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from support.examples import EXAMPLES

ROOT = EXAMPLES.parents[1]
PYTHON = ROOT / ".venv-torchtitan" / "bin" / "python"
STEPS = 3

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs scripts/clients/run.sh torchtitan"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

Losses = list[tuple[float, float]]


def run(ranks: int, folder: Path, *arguments: str) -> None:
    command = [str(PYTHON), "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(EXAMPLES / "torchtitan_training.py")]
    command += ["--folder", str(folder), *arguments, "--checkpoint.enable"]
    started = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=400)
    finally:
        with suppress(ProcessLookupError):  # of ranks that outlive the first
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, output[-6000:]


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints to start from, which torchtitan makes in one process without sharding.

    On a CPU FSDP2's ranks would all draw the same values for their shards.
    """

    @cache
    def made(config: str) -> Path:
        folder = tmp_path_factory.mktemp(config)
        run(1, folder, "--config", config, "--checkpoint.create_seed_checkpoint")
        return folder / "checkpoint" / "step-0"

    return made


def losses(folder: Path, ranks: int, *arguments: str) -> Losses:
    """The loss and the norm of gradients of each step that is run."""
    path = folder / "metrics.jsonl"
    path.unlink(missing_ok=True)
    run(ranks, folder, "--training.steps", str(STEPS), *arguments)
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return [(step["loss"], step["norm"]) for step in steps]


def check_alike(found: Losses, expected: Losses) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3)  # computed in bfloat16


DTENSORS = ["--parallelism.spmd_backend", "partial_dtensor"]
COPIES = ["--parallelism.data_parallel_replicate_degree", "2"]
TENSOR_PARALLEL = ["--parallelism.tensor_parallel_degree", "2"]
EXPERT_PARALLEL = ["--parallelism.expert_parallel_degree", "2"]


@pytest.mark.parametrize(
    ("ranks", "config", "arguments"),
    [
        (2, "llama3", DTENSORS),
        (4, "llama3", [*DTENSORS, *COPIES]),
        (4, "llama3", [*DTENSORS, *TENSOR_PARALLEL]),
        (2, "qwen3", DTENSORS),
        (4, "deepseek_v3", [*DTENSORS, *EXPERT_PARALLEL]),
        (4, "deepseek_v3_few_experts", DTENSORS),
        (2, "llama3", []),
        (2, "qwen3", []),
        (4, "llama3", COPIES),
        (4, "llama3", TENSOR_PARALLEL),
        (4, "deepseek_v3", EXPERT_PARALLEL),
    ],
)
def test_losses_equal_fsdp2s(
    tmp_path: Path, seed: Callable[[str], Path], ranks: int, config: str, arguments: list[str]
) -> None:
    start = ["--config", config, "--checkpoint.initial_load_path", str(seed(config)), *arguments]
    theirs = losses(tmp_path / "fsdp2", ranks, "--fsdp2", *start)
    ours = losses(tmp_path / "ours", ranks, *start)
    check_alike(ours, theirs)
    assert len(ours) == STEPS
    assert ours[-1][0] < 0.95 * ours[0][0]


@pytest.mark.parametrize(("config", "back_end"), [("qwen3", DTENSORS), ("llama3", [])])
def test_training_goes_on_where_it_stopped_also_on_the_other_library(
    tmp_path: Path, seed: Callable[[str], Path], config: str, back_end: list[str]
) -> None:
    folder = tmp_path / "run"
    arguments = [*back_end, "--config", config, "--checkpoint.interval", "2"]
    arguments += ["--checkpoint.initial_load_path", str(seed(config))]
    whole = losses(folder, 2, *arguments)
    for library in ([], ["--fsdp2"]):
        shutil.rmtree(folder / "checkpoint" / f"step-{STEPS}")
        check_alike(losses(folder, 2, *library, *arguments), whole[2:])
