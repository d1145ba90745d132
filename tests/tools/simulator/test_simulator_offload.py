"""Steps of models that rest on the host: what waits for what, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_overlap import PerTensor
from fsdp_overlap.tools.simulator import (
    Costs,
    Device,
    Fabric,
    Host,
    Training,
    predict_offload,
    simulate,
)
from fsdp_overlap.tools.simulator.offload import OffloadedUnit, _steady
from support.cli_runs import run_main

COSTS = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))
HOST = Host.read("xeon_32_cores")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
HOWS = ("in step", "clipped", "overlapped")

seconds = st.floats(0.01, 1.0)
lists_of_units = st.lists(
    st.builds(OffloadedUnit, *[seconds] * len(OffloadedUnit._fields)), min_size=2, max_size=8
)


def steady(units: list[OffloadedUnit], how: str, slots: int = 99, prefetch: int = 1) -> float:
    alone = sum(unit.step for unit in units)
    return _steady(units, prefetch, slots, how, alone if how == "in step" else 0.0)


@given(lists_of_units)
def test_a_step_takes_at_least_what_each_part_takes(units: list[OffloadedUnit]) -> None:
    compute = sum(unit.forward + unit.backward for unit in units)
    fetch = sum(unit.fetch for unit in units) + sum(unit.fetch for unit in units[1:])
    send, step = (sum(part) for part in zip(*((u.send, u.step) for u in units), strict=True))
    for how in HOWS:
        assert steady(units, how) >= max(compute, fetch, send, step) * (1 - 1e-9)
    assert steady(units, "in step") >= compute + step


@given(lists_of_units, st.integers(2, 4))
def test_a_thread_is_no_slower_than_a_step_after_backward(
    units: list[OffloadedUnit], slots: int
) -> None:
    after = steady(units, "in step") * (1 + 1e-9)
    assert steady(units, "clipped") <= after
    assert steady(units, "overlapped", slots) <= after


@pytest.mark.parametrize(
    ("how", "fetch", "compute", "step", "expected"),
    [
        # Three units; compute of forward 1 and of backward 2 each.
        ("in step", 0.0, 1.0, 1.0, 9 + 3),
        ("overlapped", 0.0, 1.0, 0.0, 9),
        # The step of what arrives last, the root, is exposed, and nothing else.
        ("overlapped", 0.0, 1.0, 1.0, 9 + 1),
        # Steps begin when backward is over, and forward waits for those of the first two.
        ("clipped", 0.0, 1.0, 1.0, 9 + 2),
        ("in step", 1.0, 0.0, 0.0, 5),
    ],
)
def test_simple_steps(how: str, fetch: float, compute: float, step: float, expected: float) -> None:
    units = [OffloadedUnit(fetch, compute, 2 * compute, 0.0, step)] * 3
    assert steady(units, how) == pytest.approx(expected)


def test_little_memory_holds_backward_up() -> None:
    units = [OffloadedUnit(0.0, 1.0, 1.0, 0.0, 3.0)] * 8
    assert steady(units, "overlapped", slots=1) > steady(units, "overlapped", slots=8)


def predicted(**options: Any) -> Any:
    training = Training("llama3-8b", micro_batch_size=2, checkpointing="full", **options)
    return predict_offload(training, COSTS, HOST, simulate(training.program, training.gpus, COSTS))


@pytest.mark.slow
def test_an_8b_model_on_one_gpu() -> None:
    found = predicted(gpus=1)
    assert found.host_memory == pytest.approx(18 * 8.03e9, rel=0.001)
    assert found.memory < 0.6 * COSTS.device.memory_size
    assert found.optimizer == pytest.approx(42 * 8.03e9 / (0.75 * 307e9), rel=0.001)
    # 32 blocks twice, the root once, in bfloat16.
    assert found.copies == pytest.approx(2 * (2 * 6.98e9 + 1.05e9) / (0.85 * 63e9), rel=0.01)
    assert found.overlapped < 1.2 * max(found.compute, found.copies, found.optimizer)
    assert found.overlapped < 0.8 * found.in_step
    assert found.overlapped < found.clipped < found.in_step


@pytest.mark.slow
def test_ranks_share_the_hosts_memory_and_not_the_way_to_it() -> None:
    one, eight = predicted(gpus=1, blocks=4), predicted(gpus=8, blocks=4)
    assert eight.optimizer == pytest.approx(one.optimizer, rel=0.01)
    assert eight.copies < 0.3 * one.copies
    assert eight.host_memory == pytest.approx(one.host_memory / 8, rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "muon"},
        {"microbatches": 2},
        {"stage": 2},
        {"replicas": 2},
        {"dtype": torch.bfloat16},
        {"blocks_per_unit": 2},
        {"layout": PerTensor()},
        {"reshard_after_forward": 2},
        {"context_parallel": 2},
    ],
)
def test_what_is_not_predicted_is_said(options: dict[str, Any]) -> None:
    training: Any = Training("llama3-8b", gpus=2, **options)
    resident: Any = None
    with pytest.raises(ValueError, match="leave the other options out"):
        predict_offload(training, COSTS, HOST, resident)


def test_one_block_says_nothing_of_others() -> None:
    resident: Any = None
    with pytest.raises(ValueError, match="has 1: it must have 2 or more"):
        predict_offload(Training("llama3-8b", gpus=2, blocks=1), COSTS, HOST, resident)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["simulate", str(tmp_path), "--gpus", "2", "--sequence", "64"]
    assert run_main(*arguments, "--offload", "xeon_32_cores") == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"on the GPU", "offloaded", "offloaded, overlap"} <= set(rows)
    assert run_main(*arguments, "--offload", "abacus") == 2
    assert "there is no host 'abacus'; there are xeon_32_cores" in capsys.readouterr().err
