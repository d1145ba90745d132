"""ZeRO stages and microbatches of `fsdp-overlap train`: the same training, resumed as if it had not
been interrupted, and nothing kept where a checkpoint is written."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_overlap.tools.cli import train as training
from fsdp_overlap.tools.cli import trainer as trainers
from fsdp_overlap.tools.cli.checkpoints import Checkpoints
from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.data import Text
from fsdp_overlap.tools.cli.trainer import Trainer
from support.cli_runs import assert_is_the_run_left_alone, curve, finish, latest, run_main
from support.program import Program
from support.ranks import run_ranks

UNITS = 3  # two blocks and the root
STEPS = 4
WAYS = list(itertools.product((1, 2, 3), (1, 3)))  # stages and microbatches


def trainer_of(stage: int, microbatches: int, folder: str = "run", **options: Any) -> Trainer:
    config = TrainConfig(
        out=Path(folder),
        steps=STEPS,
        batch_size=6,
        microbatches=microbatches,
        seq_len=8,
        layers=UNITS - 1,
        width=16,
        heads=2,
        zero_stage=stage,
        log_every=1,
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    train, validation = torch.randint(256, (2, 500), generator=generator).to(torch.uint8)
    return Trainer(config, Text(train, validation, "noise"), torch.device("cpu"))


def whole(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.full_tensor() for parameter in trainer.model.parameters()]


def outcome(trainer: Trainer, steps: int) -> list[Any]:
    """Losses and norms of the next steps, then the parameters."""
    metrics = [trainer.advance() for _ in range(steps)]
    return [[(m["loss"], m["grad_norm"]) for m in metrics], *whole(trainer)]


def are_equal(one: list[Any], other: list[Any]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))


# ---- the same training ----


def trained(optimizer: str) -> None:
    found = {way: outcome(trainer_of(*way, optimizer=optimizer), STEPS) for way in WAYS}
    for microbatches in (1, 3):
        assert are_equal(found[2, microbatches], found[3, microbatches])
    assert are_equal(found[1, 1], found[3, 1])
    plain = found[3, 1][0]
    assert plain[-1] != plain[0]
    for way, (steps, *_) in found.items():
        # Other orders of adding up: AdamW makes of rounding what it makes of any small gradient.
        assert torch.tensor(steps).allclose(torch.tensor(plain), rtol=1e-3), way


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stages_train_alike_to_the_bit_and_microbatches_to_rounding(optimizer: str) -> None:
    """To the bit where gradients are added up in the same order, which at stage 1 with several
    microbatches they are not."""
    run_ranks(trained, 2, optimizer)


def counted(stage: int, microbatches: int) -> tuple[int, int]:
    trainer = trainer_of(stage, microbatches)
    context, stats = trainer.context, trainer.context.stats
    for _ in range(STEPS - 1):  # the last would validate
        gathered, reduced = stats.all_gathers, stats.reduce_scatters
        trainer.advance()
        # All-gathers of what is kept are under way before the next forward.
        assert all(unit.is_up_to_date for unit in context.units) == (stage < 3)
    return stats.all_gathers - gathered, stats.reduce_scatters - reduced


@pytest.mark.parametrize(
    ("stage", "gathers", "reductions"),
    # At stage 3 backward finds the root and the last block still there.
    [(1, UNITS, UNITS), (2, UNITS, 3 * UNITS), (3, 3 * (2 * UNITS - 2), 3 * UNITS)],
)
def test_a_step_of_three_microbatches_gathers_and_reduces_as_its_stage_says(
    stage: int, gathers: int, reductions: int
) -> None:
    assert run_ranks(counted, 2, stage, 3) == [(gathers, reductions)] * 2


# ---- checkpoints ----


def resumed(folder: str, stage: int, microbatches: int) -> None:
    alone = outcome(trainer_of(stage, microbatches), STEPS)
    checkpoints = Checkpoints(Path(folder), keep=1)
    first = trainer_of(stage, microbatches)
    before = outcome(first, STEPS // 2)
    first.release_unsharded()
    path = checkpoints.save(first.steps_done, first)
    second = trainer_of(stage, microbatches)
    checkpoints.load(path, second)
    assert second.steps_done == STEPS // 2
    for trainer in (first, second):  # that which saved goes on too
        steps, *parameters = outcome(trainer, STEPS - STEPS // 2)
        assert are_equal([before[0] + steps, *parameters], alone)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("stage", "microbatches"), WAYS)
def test_a_trainer_that_saved_and_one_that_loaded_go_on_to_the_bit(
    tmp_path: Path, stage: int, microbatches: int
) -> None:
    run_ranks(resumed, 2, str(tmp_path), stage, microbatches)


class Noted(Checkpoints):
    """Notes how many full buffers exist when a checkpoint is written."""

    alive: list[int]

    def save(self, step: int, run: Any) -> Path:
        self.alive.append(run.context.stats.current_full_buffers)
        return super().save(step, run)


def run_of_job(folder: str, stage: int) -> tuple[list[int], int]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    trainer = trainer_of(stage, 3, folder, save_every=2)
    checkpoints = Noted(Path(folder), keep=1)
    checkpoints.alive = []
    try:
        with mock.patch.object(trainers.torch.accelerator, "empty_cache") as given_back:
            assert training._train(trainer.config, trainer, checkpoints, None)
            given_back.assert_not_called()  # a CPU has no such cache
            with mock.patch.object(trainers, "has_streams", return_value=True):
                trainer.release_unsharded()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return checkpoints.alive, given_back.call_count


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_job_keeps_no_full_buffer_while_it_saves(tmp_path: Path, stage: int) -> None:
    for alive, given_back in run_ranks(run_of_job, 2, str(tmp_path), stage):
        assert alive == [0, 0]
        assert given_back == (stage < 3)


# ---- from outside ----

RUN = f"--device cpu --steps {2 * STEPS} --eval-every 4 --log-every 1 --save-every {STEPS}"
RUN += " --batch-size 4 --microbatches 2 --zero-stage 1"
RUN += f" --seq-len 16 --layers {UNITS - 1} --width 16 --heads 2 --optimizer muon"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an uninterrupted run, `alone`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 100)
    finish(Program(folder, ["train", *RUN.split(), "--data", "text.txt", "--out", "alone"]))
    return folder


@pytest.fixture
def interrupted(runs: Path, tmp_path: Path) -> Path:
    """The same run, as if it had been killed before its last checkpoint."""
    run = Path(shutil.copytree(runs / "alone", tmp_path / "run"))
    shutil.rmtree(latest(run))
    return run


def gathers_of(run: Path) -> dict[str, set[float]]:
    """How many all-gathers a profiled step has at each stage that the run's report shows."""
    found: dict[str, set[float]] = {}
    for name, report in json.loads((run / "overlap.json").read_text())["runs"].items():
        for rank in report["ranks"]:
            gathers = [c for c in rank["collectives"] if c["kind"] == "all_gather"]
            found.setdefault(name, set()).add(len(gathers) / rank["steps"])
    return found


@pytest.mark.slow
def test_a_run_at_stage_1_with_microbatches_goes_on_as_if_it_had_not_stopped(
    runs: Path, interrupted: Path
) -> None:
    (interrupted / "overlap.json").unlink()
    out = finish(Program(runs, ["train", "--resume", str(interrupted)]))
    assert f"resumed after step {STEPS}" in out
    assert_is_the_run_left_alone(interrupted, runs)
    config = json.loads((interrupted / "config.json").read_text())
    assert (config["zero_stage"], config["microbatches"]) == (1, 2)
    assert gathers_of(interrupted) == gathers_of(runs / "alone")


@pytest.mark.slow
def test_a_run_goes_on_at_its_stage_with_another_number_of_ranks(
    runs: Path, interrupted: Path
) -> None:
    finish(Program(runs, ["train", "--resume", str(interrupted), "--ranks", "1"]))
    mine, alone = curve(interrupted), curve(runs / "alone")
    assert [m["loss"] for m in mine] == pytest.approx([m["loss"] for m in alone], rel=1e-3)


def test_the_report_shows_what_the_stage_gains(runs: Path) -> None:
    # At stage 3, for each of two microbatches: backward finds the root and the last block.
    assert gathers_of(runs / "alone") == {"stage 1": {UNITS}, "stage 3": {2 * (2 * UNITS - 2)}}


def test_what_a_run_with_microbatches_cannot_be_resumed_with_is_one_line(
    interrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "--ranks 3": "--ranks 3: the run's 4 sequences a microbatch cannot be shared equally",
        "--zero-stage 2": "--zero-stage cannot be changed by --resume",
        "--microbatches 4": "--microbatches cannot be changed by --resume",
    }
    for options, message in cases.items():
        assert run_main("train", "--resume", str(interrupted), *options.split()) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
