"""`fsdp-overlap simulate`: models, options, what it prints and writes, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap.simulating import Costs, Device, Fabric, Prediction, Training, simulate
from fsdp_overlap.simulating.training import CHECKPOINTING
from support.cli_runs import run_main

WIDTH, BLOCKS, VOCABULARY = 64, 4, 100
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Tiny(nn.Module):
    """Of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


TINY = f"{__name__}:Tiny"


def predicted(**options: Any) -> Prediction:
    training = Training(**{"model": TINY, "gpus": 8, "sequence": 128, **options})
    costs = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))
    return simulate(training.program, training.gpus, costs)


def gathers(prediction: Prediction) -> int:
    return sum(each.kind == "all_gather" for each in prediction.report.collectives)


def gathered(prediction: Prediction) -> int:
    """Bytes, but for what shards say of themselves."""
    found = prediction.report.collectives
    return sum(each.nbytes or 0 for each in found if each.kind == "all_gather")


def reductions(prediction: Prediction) -> int:
    return sum(each.kind == "reduce_scatter" for each in prediction.report.collectives)


def test_options_do_what_they_say() -> None:
    plain = predicted()
    # Of the blocks and the root, the last block is kept for backward, and the root is whole.
    assert (gathers(plain), reductions(plain)) == (2 * BLOCKS, BLOCKS + 1)
    paired = predicted(blocks_a_unit=2)
    assert reductions(paired) == BLOCKS // 2 + 1
    twice = predicted(microbatches=2)
    assert reductions(twice) == BLOCKS + 1
    assert gathers(twice) > gathers(plain)
    kept = predicted(microbatches=2, stage=2)
    assert gathers(kept) < gathers(twice)
    assert kept.memory > twice.memory
    copies = predicted(replicate=4)
    kinds = {event["name"] for event in copies.trace["traceEvents"]}
    assert "ncclDevKernel_all_reduce" in kinds
    in_8_bits = predicted(gather_dtype=torch.float8_e4m3fn)
    assert gathered(in_8_bits) < 0.6 * gathered(plain)


def test_what_runs_again_takes_time_and_no_memory() -> None:
    kinds = [predicted(checkpointing=kind, sequence=65536) for kind in CHECKPOINTING]
    assert list(CHECKPOINTING) == ["none", "selective", "full"]
    memory, seconds = [each.memory for each in kinds], [each.seconds for each in kinds]
    assert sorted(memory, reverse=True) == memory
    assert memory[2] < 0.8 * memory[0]
    assert sorted(seconds) == seconds
    assert seconds[2] > 1.1 * seconds[0]


def test_more_gpus_take_longer_and_less_memory() -> None:
    found = [predicted(gpus=gpus, sequence=4096) for gpus in (8, 64, 1024)]
    seconds = [each.seconds for each in found]
    assert sorted(seconds) == seconds
    assert found[1].memory < found[0].memory


def test_a_config_of_transformers_is_predicted_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(json.dumps(CONFIG))
    options = "--gpus 64 --sequence 128 --out"
    assert run_main("simulate", str(config), *options.split(), str(out)) == 0
    shown = capsys.readouterr().out
    assert "tokens a second and GPU" in shown
    assert "forward all-gathers" in shown
    trace = json.loads(gzip.decompress((out / "rank0.json.gz").read_bytes()))
    assert trace["distributedInfo"]["world_size"] == 64
    assert (out / "overlap.html").exists()
    assert run_main("report", str(out / "rank0.json.gz")) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["llama9"],
            "there is no model 'llama9': give one of deepseek-v3, llama3-405b, llama3-70b",
        ),
        (["llama3-8b", "--device", "h1000"], "h100_sxm"),
        (["llama3-8b", "--gpus", "8", "--replicate", "3"], "8 GPUs cannot hold 3 copies"),
        (["llama3-8b", "--experts", "3"], "8 GPUs that hold one copy cannot share experts 3 by 3"),
        ([TINY, "--experts", "2"], "has no mixture of experts"),
        (["moonlight-16b", "--gpus", "6", "--experts", "6"], "64 experts cannot be spread over 6"),
        (
            ["moonlight-16b", "--sequence", "100"],
            "100 tokens for 6 experts each cannot be balanced",
        ),
        (["llama3-8b", "--gpus", "0"], "gpus=0: must be at least 1"),
        (["no_such:model"], "model 'no_such:model': No module named 'no_such'"),
        ([TINY, "--stage", "7"], "set_zero_stage(7): use 1, 2 or 3"),
        ([TINY, "--profile", "no_such.json"], "no_such.json cannot be read as a trace"),
        ([TINY, "--best", "--against-fsdp2"], "--best and --against-fsdp2: leave one of the two"),
        (["llama3-8b", "--layout", "round"], "must be one of flat, rows, whole"),
        (["llama3-8b", "--optimizer", "sgd"], "optimizer='sgd': must be one of adamw, torch-"),
    ],
)
def test_what_cannot_be_predicted_is_said(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("simulate", *arguments) == 2
    assert said in capsys.readouterr().err
