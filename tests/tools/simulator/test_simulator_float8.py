"""Products in float8, as torchao computes them, on emulated time."""

from __future__ import annotations

import weakref
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from fsdp_overlap import PerTensor
from fsdp_overlap.tools.simulator import (
    Costs,
    Device,
    Fabric,
    Fsdp2Training,
    Prediction,
    Training,
    float8,
    simulate,
)
from fsdp_overlap.tools.simulator.float8 import compute_in_float8
from support.cli_runs import run_main

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed: pip install -e '.[dev]'"
)

RANKS, WIDTH, BLOCKS, TOKENS = 8, 1024, 3, 4096
FABRIC = Fabric.read("nvlink4_400g")
H100 = Costs(Device.read("h100_sxm"), FABRIC)
E4M3 = torch.float8_e4m3fn


class Plain(nn.Module):
    """Its head has the shape of a layer of its blocks."""

    def __init__(self, inner: int = 4 * WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, inner, bias=False), nn.GELU(), nn.Linear(inner, WIDTH, bias=False)
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class Odd(Plain):
    """The second layer of each block, and the first, have a size that is no multiple of 16."""

    def __init__(self) -> None:
        super().__init__(inner=1000)


class HalfOdd(Plain):
    """Each block has a third layer, of a size that GPUs can multiply in float8."""

    def __init__(self) -> None:
        super().__init__(inner=1000)
        for layer in self.layers:
            layer.append(nn.Linear(WIDTH, WIDTH, bias=False))  # type: ignore[operator]


class Alone(Plain):
    """Each block is a linear layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))


class Gated(nn.Module):
    """Two layers have the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class OfGated(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(BLOCKS))


def training(kind: type[Training] = Training, **options: Any) -> Training:
    model = f"{__name__}:{options.pop('model', Plain).__name__}"
    chosen = {
        "gpus": RANKS,
        "sequence": TOKENS,
        "optimizer": "torch-adamw",
        "linear_dtype": "float8",
    }
    return kind(model, **{**chosen, **options})


def predicted(kind: type[Training] = Training, **options: Any) -> Prediction:
    return simulate(training(kind, **options).program, RANKS, H100)


def kernels(prediction: Prediction) -> Counter[str]:
    events = prediction.trace["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "kernel")


def seconds_of(prediction: Prediction, name: str) -> list[float]:
    events = prediction.trace["traceEvents"]
    return [event["dur"] / 1e6 for event in events if event["name"] == name]


def test_blocks_multiply_in_float8_and_the_head_does_not() -> None:
    found = kernels(predicted())
    # A product of forward and two of backward, of each of two layers. The head's three stay.
    assert found["_scaled_mm"] == 3 * 2 * BLOCKS
    assert found["mm"] == 3
    # The input and the weight are cast forward, both again backward, and the output's gradient.
    assert found["cast_to_float8"] == 5 * 2 * BLOCKS


def casts_of_torch() -> int:
    """How often compiled forward and backward of a block cast to float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    casts = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        nonlocal casts
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            is_narrow = isinstance(value, torch.Tensor) and value.dtype in (E4M3, torch.float8_e5m2)
            casts += is_narrow and "convert_element_type" in str(node.target)
        return make_boxed_func(graph)

    block = convert_to_float8_training(Gated().bfloat16(), config=Float8LinearConfig(emulate=True))
    backend = aot_autograd(
        fw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    x = torch.rand(16, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(block, backend=backend, fullgraph=True)(x).sum().backward()
    return casts


@pytest.mark.slow
def test_tensors_are_cast_as_often_as_torch_compile_has_it() -> None:
    found = kernels(predicted(model=OfGated))["cast_to_float8"]
    # Weights and the two inputs twice, and each output's gradient.
    assert found == casts_of_torch() * BLOCKS == 13 * BLOCKS


def test_each_microbatch_casts_its_own() -> None:
    found = [kernels(predicted(microbatches=n))["cast_to_float8"] for n in (1, 2)]
    assert found[1] == 2 * found[0]


@pytest.mark.parametrize("model", [HalfOdd, Alone])
def test_layers_that_gpus_cannot_multiply_stay(model: type[Plain]) -> None:
    assert kernels(predicted(model=model))["_scaled_mm"] == 3 * BLOCKS


def test_a_product_takes_the_time_of_float8() -> None:
    rates = H100.device.products
    flops = 2 * TOKENS * WIDTH * 4 * WIDTH
    slowest = H100.slowest(RANKS)
    for name, key in (("_scaled_mm", "float8"), ("mm", "bfloat16")):
        rate = rates[key].peak * rates[key].efficiency * H100.device.small_products.at(flops)
        fastest = min(seconds_of(predicted(), name))  # with no collective beside it
        alone = flops / rate + 2e-6
        share = H100.device.share_in_training
        assert fastest == pytest.approx(slowest * alone / share, rel=0.02), name


def test_a_cast_writes_a_byte_for_each_element_that_it_reads() -> None:
    taken = seconds_of(predicted(), "cast_to_float8")
    bandwidth = H100.device.memory_bandwidth * H100.device.memory_efficiency
    elements = WIDTH * 4 * WIDTH  # of a weight, and of the smaller of two inputs

    def are(count: int, nbytes: int) -> bool:
        seconds = H100.slowest(RANKS) * (nbytes * elements / bandwidth + 2e-6)
        return sum(each == pytest.approx(seconds, rel=0.01) for each in taken) >= count

    assert are(BLOCKS, 2 + 1)  # inputs
    assert are(BLOCKS, 2 + 2 + 1)  # weights, whose largest magnitude is looked for, too


@pytest.mark.parametrize("gathers", [False, True])
def test_parameters_stay_what_they_are(gathers: bool) -> None:
    model = Plain()
    before = dict(model.named_parameters())
    replaced = weakref.ref(model.layers[0][0])  # type: ignore[index]
    compute_in_float8(model, gathers)
    assert replaced() is None  # without a collector
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    for name, parameter in after.items():
        assert (parameter.shape, parameter.dtype) == (before[name].shape, torch.float32)
        is_other = gathers and name.startswith("layers.")
        assert (parameter is before[name]) != is_other
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize(("kind", "again"), [("none", 0), ("selective", 1), ("full", 2)])
def test_checkpoints_keep_products_in_float8_too(kind: str, again: int) -> None:
    # Of a block's two products the first is kept by selective checkpoints.
    found = kernels(predicted(checkpointing=kind))
    assert found["_scaled_mm"] == (3 * 2 + again) * BLOCKS


def gathered(prediction: Prediction) -> int:
    found = prediction.report.collectives
    return sum(each.nbytes or 0 for each in found if each.kind == "all_gather")


@pytest.mark.slow
def test_weights_may_travel_as_they_are_multiplied() -> None:
    in_bfloat16 = predicted(layout=PerTensor())
    found = predicted(layout=PerTensor(), gather_dtype=E4M3)
    # Weights come cast, so that of the casts three are left.
    assert kernels(found)["cast_to_float8"] == 3 * 2 * BLOCKS
    assert kernels(found)["_scaled_mm"] == 3 * 2 * BLOCKS
    sums = [kernels(each)["ncclDevKernel_all_reduce"] for each in (found, in_bfloat16)]
    assert sums[0] == sums[1] + 1  # the scales of all weights
    of_blocks = 2 * BLOCKS * WIDTH * 4 * WIDTH
    saved = gathered(in_bfloat16) - gathered(found)
    # A byte of each element, twice but for the last block, which is kept for backward.
    assert saved == pytest.approx((2 - 1 / BLOCKS) * of_blocks * (RANKS - 1) / RANKS, rel=0.15)
    assert found.memory < 1.02 * in_bfloat16.memory
    assert not found.stretches or found.host_bound < 0.5 * found.seconds


def test_else_they_are_rounded_for_the_wire_alone() -> None:
    assert training(gather_dtype=E4M3).wire_dtype is E4M3
    found = predicted(gather_dtype=E4M3)
    assert kernels(found)["cast_to_float8"] == 5 * 2 * BLOCKS
    assert gathered(found) < 0.8 * gathered(predicted())


def test_fsdp2_computes_the_same() -> None:
    for dtype, casts in ((None, 5), (E4M3, 3)):
        found = kernels(predicted(Fsdp2Training, gather_dtype=dtype))
        assert found["_scaled_mm"] == 3 * 2 * BLOCKS
        assert found["cast_to_float8"] == casts * 2 * BLOCKS
    with pytest.raises(ValueError, match=r"gather_dtype=torch\.float8_e4m3fn: FSDP2 has nothing"):
        training(Fsdp2Training, gather_dtype=E4M3, linear_dtype=None)


def test_casts_outside_of_a_simulation_are_torchaos() -> None:
    from torchao.float8 import float8_linear, float8_scaling_utils

    predicted()
    original = float8_scaling_utils.hp_tensor_to_float8_dynamic
    assert float8_linear.hp_tensor_to_float8_dynamic is original


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--linear-dtype", "float4"], "linear_dtype='float4': must be float8, or be left out"),
        (
            ["--linear-dtype", "float8", "--sequence", "1000"],
            "of 1000 tokens: the gradient of a weight",
        ),
        (["--linear-dtype", "float8", "--device", "a100_sxm"], "W has no rate for products"),
        (["--linear-dtype", "float8", "--best", "--device", "a100_sxm"], "no rate for products"),
    ],
)
def test_what_cannot_be_multiplied_is_said(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # New processes import for seconds.
    monkeypatch.setattr("fsdp_overlap.tools.cli.simulate.PROCESSES", 1)
    given = [f"{__name__}:Plain", "--sequence", "2048", *arguments]
    assert run_main("simulate", *given) == 2
    assert said in capsys.readouterr().err


def test_without_a_layer_to_convert_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("simulate", f"{__name__}:Odd", "--linear-dtype", "float8") == 2
    assert "no block of Odd has an nn.Linear whose inputs and outputs" in capsys.readouterr().err


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need torchao: pip install 'torchao>=0\.18'"):
        float8.compute_in_float8(Plain(), gathers=False)


def test_the_command_shows_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("simulate", f"{__name__}:Plain", "--linear-dtype", "float8") == 0
    assert "tokens a second and GPU" in capsys.readouterr().out
