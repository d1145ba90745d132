"""What compiled programs keep for backward, and compute again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._inductor.decomposition import select_decomp_table

from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Prediction, Training, simulate
from fsdp_overlap.tools.simulator.observed import MemoryKind
from support.predicted import GPUS, write_config

ROWS, WIDTH = 1 << 18, 64
NBYTES = ROWS * WIDTH * 4
COSTS = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))
COMPILED = replace(COSTS, compiles=True)

Product = Callable[[torch.Tensor], torch.Tensor]
Layer = Callable[[Product, Product, torch.Tensor], torch.Tensor]


def in_row(first: Product, _: Product, x: torch.Tensor) -> torch.Tensor:
    return first(x).tanh().sin()


def beside(first: Product, _: Product, x: torch.Tensor) -> torch.Tensor:
    return x + first(x.sin().tanh())


def gated(first: Product, second: Product, x: torch.Tensor) -> torch.Tensor:
    return F.silu(first(x)) * second(x)


def edited(first: Product, _: Product, x: torch.Tensor) -> torch.Tensor:
    return first(x).sin().mul_(2)


def widened(first: Product, _: Product, x: torch.Tensor) -> torch.Tensor:
    return first(x).double().sin().float()


def shared(first: Product, second: Product, x: torch.Tensor) -> torch.Tensor:
    sines = x.sin()
    return first(sines) + second(sines).tanh()


LAYERS = [in_row, beside, gated, edited, widened, shared]


def step_of(layer: Layer, layers: int, costs: Costs) -> Prediction:
    """Forward and backward of so many layers that share their weights."""

    def program() -> Callable[[], None]:
        with torch.device("emulated"):
            first, second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
            x = torch.empty(ROWS, WIDTH)

        def step() -> None:
            hidden = x.requires_grad_()
            for _ in range(layers):
                hidden = layer(first, second, hidden)
            hidden.sum().backward()

        return step

    return simulate(program, 1, costs)


def kept_by_torch(layer: Layer, layers: int) -> int:
    """The bytes that AOTAutograd's partitioner keeps of so many layers, for 64 rows."""
    kept: list[int] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        graphs = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, compiler="inductor", **options
        )
        [output] = [node for node in graphs[0].graph.nodes if node.op == "output"]
        values = [node.meta.get("val") for node in output.args[0][num_fwd_outputs:]]
        kept.append(sum(value.nbytes for value in values if isinstance(value, torch.Tensor)))
        return graphs

    def run(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            x = layer(partial(F.linear, weight=weights[0]), partial(F.linear, weight=weights[1]), x)
        return x.sum()

    def compiler(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    compiled = aot_function(
        run,
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2)]
    compiled(weights, torch.randn(64, WIDTH, requires_grad=True))
    return kept[0]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_keeps_what_torch_would(layer: Layer) -> None:
    few, more = (kept_by_torch(layer, layers) for layers in (6, 10))
    theirs = (more - few) / 4 / (64 * WIDTH * 4)
    few, more = (step_of(layer, layers, COMPILED).memory for layers in (6, 10))
    assert (more - few) / 4 / NBYTES == pytest.approx(theirs, rel=0.01)
    few, more = (step_of(layer, layers, COSTS).memory for layers in (6, 10))
    assert (more - few) / 4 / NBYTES >= theirs - 0.01


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_takes_as_long(layer: Layer) -> None:
    few, more, most = (step_of(layer, layers, COMPILED).compute for layers in (4, 8, 16))
    assert most - more == pytest.approx(2 * (more - few), rel=0.02)


def test_what_is_computed_again_takes_time() -> None:
    """The SiLU of each layer, for the product with it. Backward reads the other product."""
    few, more = (step_of(gated, layers, COMPILED) for layers in (4, 8))
    kernels = [
        sum(each["name"] == "recompute" for each in found.trace["traceEvents"])
        for found in (few, more)
    ]
    assert kernels[1] - kernels[0] == 4


def test_what_a_kernel_alone_reads_takes_no_memory() -> None:
    def program() -> Callable[[], None]:
        with torch.device("emulated"):
            weight, x = torch.empty(WIDTH, WIDTH), torch.empty(ROWS, WIDTH)

        def step() -> None:
            hidden = x.sin() + x.cos()
            hidden = hidden * x.tanh()
            F.linear(hidden, weight)

        return step

    eager, compiled = (simulate(program, 1, costs) for costs in (COSTS, COMPILED))
    weight = WIDTH * WIDTH * 4
    assert compiled.memory == 3 * NBYTES + weight  # x, what the product reads, and what it makes
    assert eager.memory == 4 * NBYTES + weight
    assert compiled.reserved < eager.reserved


def test_what_a_program_takes_to_write_it_later_takes_memory_at_once() -> None:
    """As fully_shard does for the gradients that it reduces: compiled code is not asked."""

    def program() -> Callable[[], None]:
        def step() -> None:
            buffer = torch.empty(ROWS, WIDTH, device="emulated")
            other = torch.empty(0, device="emulated")
            other.untyped_storage().resize_(NBYTES)
            del buffer, other

        return step

    assert simulate(program, 1, COMPILED).memory == 2 * NBYTES


def test_the_host_enqueues_a_kernel_once() -> None:
    def program() -> Callable[[], None]:
        with torch.device("emulated"):
            x, weight = torch.empty(16, WIDTH), torch.empty(WIDTH, WIDTH)

        def step() -> None:
            for _ in range(100):
                F.linear((x + 1).sin().cos() * 2, weight)

        return step

    eager, compiled = (simulate(program, 1, costs).seconds for costs in (COSTS, COMPILED))
    host = COSTS.device.operation_seconds
    assert eager == pytest.approx(500 * host, rel=0.1)
    assert compiled == pytest.approx(200 * host, rel=0.1)


def test_a_compiled_loss_keeps_no_logits_in_float32() -> None:
    """As torch's: the loss keeps the logits, and their gradient, in their dtype, takes their place
    if nobody else holds them."""
    tokens, vocabulary = 4096, 32768

    def program() -> Callable[[], None]:
        with torch.device("emulated"):
            head = nn.Linear(WIDTH, vocabulary, bias=False, dtype=torch.bfloat16)
            hidden = torch.empty(tokens, WIDTH, dtype=torch.bfloat16)
            targets = torch.zeros(tokens, dtype=torch.long)

        def step() -> None:
            logits = head(hidden)
            held.extend([logits] if holds else [])
            loss = F.cross_entropy(logits.float(), targets)
            del logits
            loss.backward()
            held.clear()

        return step

    nbytes, held, holds = tokens * vocabulary * 2, list[torch.Tensor](), False
    eager, compiled = (simulate(program, 1, costs).memory for costs in (COSTS, COMPILED))
    assert compiled == pytest.approx(nbytes, rel=0.05)
    assert eager > 5 * nbytes
    holds = True
    assert simulate(program, 1, COMPILED).memory == pytest.approx(2 * nbytes, rel=0.05)


@pytest.mark.slow
def test_what_came_from_the_host_is_kept() -> None:
    def program() -> Callable[[], None]:
        with torch.device("emulated"):
            weight = nn.Parameter(torch.empty(ROWS, WIDTH))
        host = torch.empty(ROWS, WIDTH, device="cpu")

        def step() -> None:
            loss = sum((host.to("emulated") * weight).sum() for _ in range(8))
            cast(torch.Tensor, loss).backward()

        return step

    eager, compiled = (simulate(program, 1, costs).memory for costs in (COSTS, COMPILED))
    # The weight, eight copies of what the host has, and the gradient, to which one kernel adds.
    assert compiled == 10 * NBYTES
    assert eager > compiled


def test_a_prediction_repeats() -> None:
    """Wherever its storages lie, of which later ones have the addresses of former ones."""
    layers = [step_of(gated, 6, COMPILED).compute for _ in range(2)]
    others = [torch.empty(1000) for _ in range(100)]
    layers.append(step_of(gated, 6, COMPILED).compute)
    assert layers == [layers[0]] * 3
    assert len(others) == 100


def test_a_long_row_of_operations_is_not_looked_at_to_its_end() -> None:
    def long(first: Product, _: Product, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2000):
            x = x + 1
        return first(x).sin()

    assert step_of(long, 1, COMPILED).memory > 0


@pytest.mark.slow
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

    def most(found: Prediction, kind: MemoryKind) -> int:
        return max(usage.nbytes[kind] for usage in found.usage)

    for kind in cast(tuple[MemoryKind, ...], ("parameters", "full buffers", "optimizer")):
        assert most(compiled, kind) == most(eager, kind)
    assert most(compiled, "activations") < 0.75 * most(eager, "activations")
    # With all blocks checkpointed there is nothing between them to choose from.
    training = replace(training, checkpointing="full", loss="fused")
    eager, compiled = (simulate(training.program, GPUS, costs) for costs in (COSTS, COMPILED))
    assert 0.9 * eager.memory < compiled.memory <= eager.memory
