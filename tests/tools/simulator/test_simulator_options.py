"""What published runs use beside the defaults: dtypes, losses, compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Prediction, Training, simulate
from fsdp_overlap.tools.simulator.uncertainty import KNOWN
from support.cli_runs import run_main
from support.predicted import GPUS, kernels, predict, write_config

WIDTH, BLOCKS, VOCABULARY, TOKENS = 64, 4, 1024, 512
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
COSTS = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(CONFIG, tmp_path)


def predicted(config: str, **options: Any) -> Prediction:
    return predict(config, **{"sequence": TOKENS, **options})


def sent(prediction: Prediction, name: str) -> int:
    """Bytes of the full buffers."""
    of = "Out msg nelems" if "gather" in name else "In msg nelems"
    return sum(each["args"][of] for each in kernels(prediction, name))


def seconds(prediction: Prediction, name: str) -> float:
    return sum(each["dur"] for each in kernels(prediction, name)) * 1e-6


@pytest.mark.slow
def test_parameters_and_states_rest_in_the_dtype_that_is_said(config: str) -> None:
    single, half = predicted(config), predicted(config, dtype=torch.bfloat16)
    for kind in ("parameters", "optimizer"):
        # The allocator rounds, and there are tables beside parameters.
        assert half.peak[kind] < 0.75 * single.peak[kind]


@pytest.mark.slow
def test_gradients_are_reduced_in_the_dtype_that_is_said(config: str) -> None:
    single, half = predicted(config), predicted(config, reduce_dtype=torch.bfloat16)
    name = "ncclDevKernel_reduce_scatter"
    assert sent(half, name) == sent(single, name) / 2
    assert sent(half, "ncclDevKernel_all_gather") == sent(single, "ncclDevKernel_all_gather")


@pytest.mark.slow
def test_a_part_of_the_blocks_is_checkpointed(config: str) -> None:
    options = {"sequence": 2048}
    none, full = (predicted(config, **options, checkpointing=each) for each in ("none", "full"))
    options |= {"checkpointing": "selective"}
    all_of_them, half = (
        predicted(config, **options, selective_ac_option=each) for each in ("1", "2")
    )
    assert (all_of_them.memory, all_of_them.compute) == (full.memory, full.compute)
    assert full.memory < half.memory < none.memory
    assert half.compute == pytest.approx((none.compute + full.compute) / 2, rel=1e-3)
    assert half.memory != predicted(config, **options).memory


@pytest.mark.slow
def test_losses_take_the_memory_of_their_logits(config: str) -> None:
    standard, fused, chunked = (
        predicted(config, loss=loss, sequence=2048) for loss in ("standard", "fused", "chunked")
    )
    logits = 2048 * VOCABULARY
    # Logits in float32, their logarithms, and gradients of both.
    assert standard.memory - fused.memory >= 2 * 4 * logits
    assert fused.memory - chunked.memory >= logits
    # The head's products are the same ones, in 16 pieces.
    assert len(kernels(chunked, "mm")) + len(kernels(chunked, "addmm_")) == (
        len(kernels(standard, "mm")) + 3 * (VOCABULARY // WIDTH - 1)
    )


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_a_loss_may_be_eager_where_blocks_are_compiled(
    tmp_path: Path, tensor_parallel: int
) -> None:
    words = 64 * VOCABULARY
    config = write_config(CONFIG | {"vocab_size": words}, tmp_path)
    more = {}
    for blocks in (1, 4):
        standard, eager = (
            simulate(
                Training(
                    config,
                    GPUS,
                    loss=loss,
                    sequence=TOKENS,
                    blocks=blocks,
                    tensor_parallel=tensor_parallel,
                ).program,
                GPUS,
                replace(COSTS, compiles=True),
            )
            for loss in ("standard", "eager")
        )
        # Logits in float32, their logarithms, and gradients of both.
        logits = TOKENS * words // tensor_parallel
        assert eager.memory - standard.memory >= 2 * 4 * logits
        more[blocks] = eager.compute - standard.compute
    # They are written and read, and as many kernels of blocks are fused.
    assert more[1] > 6 * 4 * logits / COSTS.device.memory_bandwidth
    assert more[4] == pytest.approx(more[1], rel=0.02)


@pytest.mark.slow
def test_ranks_share_sequences(config: str) -> None:
    whole, shared = predicted(config), predicted(config, context_parallel=4, sequence=4 * TOKENS)
    # Keys and values in bfloat16, in forward; their gradients in backward.
    keys = 2 * BLOCKS * 2 * 4 * TOKENS * WIDTH
    for name in ("ncclDevKernel_all_gather", "ncclDevKernel_reduce_scatter"):
        assert sent(shared, name) - sent(whole, name) == keys
    assert seconds(shared, "mm") == pytest.approx(seconds(whole, "mm"))
    again = predicted(config, context_parallel=4, sequence=4 * TOKENS, checkpointing="full")
    assert sent(again, "ncclDevKernel_all_gather") - sent(whole, "ncclDevKernel_all_gather") == (
        2 * keys
    )
    assert Training("llama3-8b", 8, context_parallel=4).tokens == 8192 / 4


@pytest.mark.slow
def test_a_sliding_window_changes_attention_alone(tmp_path: Path) -> None:
    """From its length on it is a mask, with which kernels compute all scores, and not half."""
    window = {"model_type": "mistral", "sliding_window": TOKENS, "max_position_embeddings": TOKENS}
    config = write_config(CONFIG | window, tmp_path)
    for compiles in (False, True):
        costs = replace(COSTS, compiles=compiles)
        without, masked = (
            simulate(Training(config, GPUS, sequence=tokens).program, GPUS, costs)
            for tokens in (TOKENS - 1, TOKENS)
        )
        assert len(kernels(masked, "mm")) == len(kernels(without, "mm"))
        assert not kernels(masked, "bmm")
        name = "_scaled_dot_product_{}_attention"
        assert len(kernels(masked, name.format("efficient"))) == BLOCKS
        assert len(kernels(without, name.format("flash"))) == BLOCKS
        # Each block keeps what is added to its scores, in bfloat16.
        more = masked.memory - without.memory - 2 * BLOCKS * TOKENS**2
        assert abs(more) < 0.02 * without.memory


def test_ranks_do_not_share_masked_sequences(tmp_path: Path) -> None:
    window = {"model_type": "mistral", "sliding_window": TOKENS // 4}
    config = write_config(CONFIG | window, tmp_path)
    with pytest.raises(ValueError, match="context_parallel=2: the model masks its attention"):
        predicted(config, context_parallel=2)


@pytest.mark.slow
def test_expandable_segments_reserve_less(config: str) -> None:
    training = Training(config, GPUS, sequence=TOKENS, micro_batch_size=8)
    fixed, expandable = (
        simulate(training.program, GPUS, replace(COSTS, expandable_segments=expands))
        for expands in (False, True)
    )
    assert expandable.memory == pytest.approx(fixed.memory, rel=0.01)
    assert expandable.memory <= expandable.reserved < fixed.reserved
    assert expandable.seconds == fixed.seconds


class Chain(nn.Module):
    """A row of small operations before a product, as long as their memory takes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(F.relu(x * 2 + 1) + x)
        return out


ROWS = 1 << 20


def chain_in(costs: Costs, count: int = 1) -> float:
    """The seconds of compute of so many forwards."""

    def program() -> Any:
        with torch.device("emulated"):
            model, x = Chain(), torch.empty(ROWS, WIDTH)

        @torch.no_grad()
        def step() -> None:
            for _ in range(count):
                model(x)

        return step

    return simulate(program, 1, costs).compute


def test_compiled_kernels_read_and_write_what_is_used_before_and_after() -> None:
    device = COSTS.device
    moved = ROWS * WIDTH * 4 / (device.memory_bandwidth * device.memory_efficiency)
    # Each of four operations reads and writes; the sum reads two.
    eager, compiled = chain_in(COSTS), chain_in(replace(COSTS, compiles=True))
    assert eager - compiled == pytest.approx(
        9 * moved + 4 * device.kernel_seconds - 2 * moved - device.kernel_seconds
    )
    # The next forward's kernel is another one.
    twice = chain_in(replace(COSTS, compiles=True), 2)
    assert twice == pytest.approx(2 * compiled)


def seconds_of(costs: Costs, forward: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
    """Of ``forward(x, rows)``, where ``rows`` are half as many as those of ``x``."""

    def program() -> Any:
        with torch.device("emulated"):
            x, rows = torch.empty(ROWS, WIDTH), torch.empty(ROWS // 2, dtype=torch.int64)
        return partial(forward, x, rows)

    return simulate(program, 1, costs).compute


def test_kernels_read_the_rows_they_look_up_and_end_where_they_put_some() -> None:
    costs, device = replace(COSTS, compiles=True), COSTS.device
    bandwidth = device.memory_bandwidth * device.memory_efficiency
    moved, indices = ROWS * WIDTH * 4, ROWS // 2 * 8
    # Half of the rows are read; nobody reads the output from memory.
    took = seconds_of(costs, lambda x, rows: x.index_select(0, rows).mul_(2))
    assert took == pytest.approx((moved / 2 + indices) / bandwidth + device.kernel_seconds)
    # The sum is read, the zeros are not; a second kernel reads what the first has written.
    took = seconds_of(
        costs, lambda x, rows: torch.zeros_like(x).index_add(0, rows, x[: ROWS // 2] + 1).mul(2)
    )
    first = moved / 2 + indices + moved
    assert took == pytest.approx((first + moved) / bandwidth + 2 * device.kernel_seconds)


HALF = WIDTH // 2


@pytest.mark.parametrize(
    ("forward", "units"),
    [
        # A half is read once, and so is the other one; a row by its shape alone is the same rows.
        (lambda x, _: x[:, :HALF] * x[:, HALF:], 1),
        (lambda x, _: x[:, :HALF].sin() * x[:, :HALF], 0.5),
        (lambda x, _: x.view(-1).sin() + x.view(-1), 1),
        # A column that is repeated is read as a column.
        (lambda x, _: x[:, :1].contiguous().expand(ROWS, WIDTH) * x, 1 + 1 / WIDTH),
        # Products read a fused tensor in halves, which was written once.
        (lambda x, _: _halves(x.sin()), 2),
        # Rows are added where they lie: read there, and written.
        (lambda x, rows: x.index_add_(0, rows[:8], x[:8]), 3 * 8 / ROWS),
    ],
)
def test_kernels_move_the_bytes_they_touch(
    forward: Callable[[torch.Tensor, torch.Tensor], object], units: float
) -> None:
    costs, device = replace(COSTS, compiles=True), COSTS.device
    moved = ROWS * WIDTH * 4 / (device.memory_bandwidth * device.memory_efficiency)
    assert seconds_of(costs, forward) / moved == pytest.approx(units, abs=0.1)


def _halves(x: torch.Tensor) -> None:
    for half in (x[:, :HALF], x[:, HALF:]):
        half[:8, :8] @ half[:8, :8]


def test_products_that_do_not_read_from_a_kernel_do_not_end_it() -> None:
    """As in Llama's blocks, whose second product comes after the first one's activation."""

    def between(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (x @ x[:WIDTH]).sin() * (x @ x[:WIDTH])

    def after(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        first, second = x @ x[:WIDTH], x @ x[:WIDTH]
        return first.sin() * second

    costs = replace(COSTS, compiles=True)
    assert seconds_of(costs, between) == pytest.approx(seconds_of(costs, after))


def test_collectives_and_optimizers_are_no_part_of_a_kernel() -> None:
    def program() -> Any:
        with torch.device("emulated"):
            weight = nn.Parameter(torch.empty(ROWS, WIDTH))
            weight.grad = torch.empty(ROWS, WIDTH)
        optimizer = torch.optim.AdamW([weight], fused=True)

        def step() -> None:
            optimizer.step()
            dist.all_reduce(weight.detach() * 2)

        return step

    device = COSTS.device
    moved = ROWS * WIDTH * 4 / (device.memory_bandwidth * device.memory_efficiency)
    eager, compiled = (
        simulate(program, GPUS, replace(COSTS, compiles=each)).compute for each in (False, True)
    )
    # The product by two is read and written: four reads and three writes are the optimizer's.
    assert compiled == pytest.approx(eager)
    assert compiled > (7 + 2) * moved


@pytest.mark.slow
def test_what_backward_reads_is_written_or_computed_again(config: str) -> None:
    # Where collectives do not slow compute down, of which some run beside other operations now.
    costs = replace(COSTS, device=replace(COSTS.device, overlap_slowdown=0.0))
    training = Training(config, GPUS, optimizer="torch-adamw", sequence=2048)
    eager, compiled = (
        simulate(training.program, GPUS, replace(costs, compiles=compiles))
        for compiles in (False, True)
    )
    assert seconds(compiled, "mm") == pytest.approx(seconds(eager, "mm"))
    assert 0.3 * eager.compute < compiled.compute < 0.8 * eager.compute
    assert len(kernels(compiled, "mm")) == len(kernels(eager, "mm"))


def test_products_and_all_else_are_stretched_apart() -> None:
    plain = chain_in(COSTS)
    products, others = (
        chain_in(replace(COSTS, **{name: 3.0})) - plain
        for name in ("matmul_stretch", "other_stretch")
    )
    assert products + others == pytest.approx(2 * plain)
    flops = 2 * ROWS * WIDTH * WIDTH
    rate = COSTS.device.products["float32"]
    assert products >= 2 * flops / (rate.peak * rate.efficiency)


def test_products_reach_less_in_training() -> None:
    """And nothing else."""
    device = replace(COSTS.device, share_in_training=1.0)
    alone = replace(COSTS, device=device)
    slower = replace(COSTS, device=replace(device, share_in_training=0.5))
    assert chain_in(slower) == pytest.approx(chain_in(replace(alone, matmul_stretch=2.0)))
    assert chain_in(slower) > 1.1 * chain_in(alone)


@pytest.mark.slow
def test_the_command_has_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(CONFIG | {"hidden_size": 1024, "intermediate_size": 4096}, tmp_path)
    options = (
        "--gpus 16 --sequence 512 --dtype bfloat16 --mixed-precision-reduce bfloat16 --compile "
        "--loss fused --checkpointing selective --selective-ac-option 2 --context-parallel 2 "
        "--matmul-stretch 1.5 --other-stretch 1.1 --network 50"
    )
    assert run_main("simulate", config, *options.split()) == 0
    said = f"times what was predicted, {KNOWN.median:.2f} in the middle"
    assert said in capsys.readouterr().out
    steps = []
    for others in ("--network 400", "--network 50", "--network 50 --rented"):
        assert run_main("simulate", config, "--gpus", "64", *others.split()) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("uncertainty  ") for line in lines)
        steps.append([float(line.split()[1]) for line in lines if line.startswith("step  ")])
    assert steps[0] < steps[1] < steps[2]  # in ms, and with a decimal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype int8", "int8: as a dtype use float32 or bfloat16"),
        ("--loss liger", "loss='liger': must be one of standard, eager, fused, chunked"),
        ("--loss eager", "--loss eager without --compile: all kernels are eager"),
        ("--selective-ac-option every", "must be op, or a number of blocks"),
        ("--selective-ac-option ²", "must be op, or a number of blocks"),
        ("--context-parallel 3", "8 GPUs that hold one copy cannot share sequences 3 by 3"),
        ("--replicas 4 --context-parallel 3", "2 GPUs that hold one copy cannot share sequences"),
        ("--tensor-parallel 2 --loss fused", "leave it at 1, or the others"),
        ("--expert-parallel-comm-backend hybridep", "must be one of standard, deepep"),
        ("--expert-parallel-comm-backend deepep", "expert_parallel=1, which sends no tokens"),
        ("--network 0", "--network 0: must be more than 0"),
        ("--fabric loopback_2g --network 5", "has one node"),
        ("--matmul-stretch -1", "--matmul-stretch -1: must be more than 0"),
        ("--memory nan", "--memory nan: must be more than 0, and finite"),
        ("--price inf", "--price inf: must be more than 0, and finite"),
    ],
)
def test_mistakes(
    options: str, message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("simulate", config, "--sequence", "510", *options.split()) == 2
    assert message in capsys.readouterr().err
