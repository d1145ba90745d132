"""The example programs run, on ranks of their own and under ``torchrun``."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap.engine.unit import unit_of
from support.examples import EXAMPLES, TRAINING, load, run_training
from support.ranks import run_ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("half", [False, True])
def test_the_training_example_learns(tmp_path: Path, half: bool) -> None:
    first, *_, last = run_ranks(run_training, 2, half, str(tmp_path), 4)[0]
    assert last < first / 2


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "microbatches"), [(3, 2), (2, 1), (1, 3)])
def test_the_training_example_goes_on_where_it_stopped(
    tmp_path: Path, stage: int, microbatches: int
) -> None:
    run = partial(run_training, zero_stage=stage, microbatches=microbatches)
    whole = run_ranks(run, 2, False, str(tmp_path / "whole"), 3)
    parts = run_ranks(run, 2, False, str(tmp_path / "parts"), 1, 3)
    assert parts == whole


@pytest.mark.slow
def test_the_training_example_learns_alike_at_every_stage(tmp_path: Path) -> None:
    losses = [
        run_ranks(partial(run_training, zero_stage=stage), 2, False, str(tmp_path / str(stage)), 2)
        for stage in (1, 2, 3)
    ]
    assert losses[1] == losses[2]
    assert losses[0][0] == pytest.approx(losses[2][0], rel=1e-2)  # computed in bfloat16


def kept(folder: str) -> list[int]:
    """Full buffers of the model and of its average: trained, evaluated, saved."""
    program = load(TRAINING)
    training = program.Training(Path(folder), zero_stage=2)
    average = unit_of(training.average.module).context
    alive = []
    for step in (
        lambda: training.train_epoch(program.sequences(64, seed=1)),
        lambda: training.evaluate(program.sequences(64, seed=2)),
        training.save,
    ):
        step()
        alive += [training.ctx.stats.current_full_buffers, average.stats.current_full_buffers]
    return alive


def test_the_training_example_keeps_what_it_trains_until_it_saves(tmp_path: Path) -> None:
    assert run_ranks(kept, 2, str(tmp_path)) == [[3, 0, 3, 0, 0, 0]] * 2


@pytest.mark.slow
def test_the_training_example_runs_under_torchrun(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc-per-node", "2", str(TRAINING), "--folder", str(tmp_path), "--epochs", "1"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss" in done.stdout
    assert (tmp_path / "epoch-1" / ".metadata").exists()


def run_transformers(folder: str) -> tuple[float, float, list[int]]:
    """The first loss, the last, and what was counted, if the saved model counts the same."""
    from transformers import AutoModelForCausalLM

    losses, counted = load(EXAMPLES / "transformers_training.py").run(Path(folder), steps=31)
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert saved.generate(torch.tensor([counted[:3]]), max_new_tokens=5)[0].tolist() == counted
    return losses[0], losses[-1], counted


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_the_transformers_example_learns_and_saves_what_it_learned(tmp_path: Path) -> None:
    one, other = run_ranks(run_transformers, 2, str(tmp_path))
    assert one[1] < one[0] - 0.7
    assert one[2] == other[2]


def run_fine_tuning(folder: str) -> list[float]:
    """The losses, if what was saved is what was trained."""
    from transformers import AutoModelForCausalLM

    program = load(EXAMPLES / "fine_tuning.py")
    losses = program.run(Path(folder), steps=21)
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(Path(folder) / "tuned").float()
    published = AutoModelForCausalLM.from_pretrained(Path(folder) / "published").float()
    text = program.load_text(None, program.LENGTH)
    tokens, _ = program.sample_batch(text.train, 8, program.LENGTH, torch.Generator())
    with torch.no_grad():
        before, after = (
            each(input_ids=tokens, labels=tokens).loss.item() for each in (published, saved)
        )
    assert before == pytest.approx(losses[0], abs=0.2)
    assert after == pytest.approx(losses[-1], abs=0.4)
    return list(losses)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_the_fine_tuning_example_learns_from_what_it_loads(tmp_path: Path) -> None:
    for losses in run_ranks(run_fine_tuning, 2, str(tmp_path)):
        assert losses[-1] < losses[0] - 1.5


def run_generation(folder: str) -> list[list[list[int]]]:
    """What was generated. The last of it is what the saved model generates."""
    from transformers import LlamaForCausalLM

    program = load(EXAMPLES / "generation.py")
    generated = program.run(Path(folder), steps=40, every=20)
    dist.barrier()
    saved = LlamaForCausalLM.from_pretrained(folder)
    if generated:
        assert torch.equal(program.generate(saved), generated[-1])
    return [tokens.tolist() for tokens in generated]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_the_generation_example_generates_with_the_weights_that_are_trained(
    tmp_path: Path,
) -> None:
    *trained, one, other = run_ranks(run_generation, 4, str(tmp_path))
    assert trained == [[], []]
    assert one == other
    first, *_, last = one
    counted = [[(row[0] + k * (row[1] - row[0])) % 17 for k in range(12)] for row in last]
    assert last[0] == counted[0] != first[0]


def run_pipeline() -> list[float]:
    losses: list[float] = load(EXAMPLES / "pipeline.py").run(steps=40)
    return losses


def test_the_pipeline_example_learns() -> None:
    *first_stage, one, other = run_ranks(run_pipeline, 4)
    assert first_stage == [[], []]
    assert max(one[-1], other[-1]) < 0.5 * min(one[0], other[0])
