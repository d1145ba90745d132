"""What compiled programs keep for backward, and compute again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_overlap.simulator import Costs, Device, Fabric, Prediction, Training, simulate
from support.predicted import GPUS, write_config

ROWS, WIDTH = 1 << 18, 64
NBYTES = ROWS * WIDTH * 4
COSTS = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))
COMPILED = replace(COSTS, compiles=True)

Layer = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


def in_row(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x).tanh().sin()


def beside(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x + linear(x.sin().tanh())


def gated(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(linear(x)) * linear(x)


def edited(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x).sin().mul_(2)


def widened(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x).double().sin().float()


def step_of(layer: Layer, layers: int, costs: Costs) -> Prediction:
    """Forward and backward of so many layers that share their weight."""

    def program() -> Callable[[], None]:
        with torch.device("emulated"):
            linear, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.empty(ROWS, WIDTH)

        def step() -> None:
            hidden = x.requires_grad_()
            for _ in range(layers):
                hidden = layer(linear, hidden)
            hidden.sum().backward()

        return step

    return simulate(program, 1, costs)


@pytest.mark.parametrize(
    ("layer", "eager", "compiled"),
    [
        (in_row, 2, 1),  # tanh; what the next product reads
        (beside, 2, 1),  # the sum; what the product reads
        (gated, 4, 2),  # both products; SiLU and what the next products read
        (edited, 2, 2),  # the product; what is edited is not computed again
        (widened, 3, 1),  # the product, not the eight bytes an element that sin() reads
    ],
)
def test_what_each_layer_keeps(layer: Layer, eager: int, compiled: int) -> None:
    for costs, kept in ((COSTS, eager), (COMPILED, compiled)):
        few, more = (step_of(layer, layers, costs).memory for layers in (6, 10))
        assert more - few == pytest.approx(4 * kept * NBYTES, rel=0.01), kept


@pytest.mark.parametrize("layer", [in_row, beside, gated, widened])
def test_each_layer_takes_as_long(layer: Layer) -> None:
    few, more, most = (step_of(layer, layers, COMPILED).compute for layers in (4, 8, 16))
    assert most - more == pytest.approx(2 * (more - few), rel=0.02)


def test_what_is_computed_again_takes_time() -> None:
    device = COSTS.device
    read = NBYTES / (device.memory_bandwidth * device.memory_efficiency)
    few, more = (step_of(in_row, layers, COMPILED) for layers in (4, 8))
    kernels = [
        sum(each["name"] == "recompute" for each in found.trace["traceEvents"])
        for found in (few, more)
    ]
    assert kernels[1] - kernels[0] == 4
    assert more.compute - few.compute > 4 * read


def test_a_prediction_repeats() -> None:
    """Wherever its storages lie, of which later ones have the addresses of former ones."""
    layers = [step_of(gated, 6, COMPILED).compute for _ in range(2)]
    others = [torch.empty(1000) for _ in range(100)]
    layers.append(step_of(gated, 6, COMPILED).compute)
    assert layers == [layers[0]] * 3
    assert len(others) == 100


def test_a_long_row_of_operations_is_not_looked_at_to_its_end() -> None:
    def long(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2000):
            x = x + 1
        return linear(x)

    assert step_of(long, 1, COMPILED).memory > 0


def test_full_parameters_are_not_held(tmp_path: Path) -> None:
    config = write_config(
        {
            "model_type": "llama",
            "vocab_size": 1024,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
        },
        tmp_path,
    )
    training = Training(config, GPUS, optimizer="torch-adamw", sequence=2048)
    eager, compiled = (simulate(training.program, GPUS, costs) for costs in (COSTS, COMPILED))
    for kind in ("parameters", "full buffers", "optimizer"):
        assert compiled.peak[kind] == eager.peak[kind]
    assert compiled.peak["activations"] < 0.75 * eager.peak["activations"]
    # With all blocks checkpointed there is nothing between them to choose from.
    training = replace(training, checkpointing="full", loss="fused")
    eager, compiled = (simulate(training.program, GPUS, costs) for costs in (COSTS, COMPILED))
    assert compiled.memory == pytest.approx(eager.memory, rel=0.01)
