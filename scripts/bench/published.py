"""Predicts what others measured and published, each beside the measurement.

Of each table the row with the fewest GPUs is used up: how long compute takes is stretched until the
prediction is as measured there. All other rows are predicted with that. Tables of tensor
parallelism have one row each, which is predicted with the stretch of the 8B on the same machines.
Memory is predicted without any fit. What steps lose with scale is the time at a row over the time
at the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fsdp_overlap.simulator import Costs, Device, Fabric, Prediction, Training, simulate

GIB = 2**30


def mpt(width: int, blocks: int, heads: int) -> nn.Module:
    """An MPT, as a GPT-2 of transformers: the same matrices, and biases beside them."""
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        n_embd=width,
        n_layer=blocks,
        n_head=heads,
        n_positions=2048,
        vocab_size=50368,
        activation_function="gelu",
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model


mpt_1b = partial(mpt, 2048, 24, 16)
mpt_7b = partial(mpt, 4096, 32, 32)
mpt_13b = partial(mpt, 5120, 40, 40)


@dataclass(frozen=True)
class Row:
    """Tokens a second and GPU, and the GiB that the allocator took if they were published."""

    gpus: int
    tokens: float
    memory: float | None = None


@dataclass(frozen=True)
class Published:
    name: str
    source: str
    device: str
    fabric: str
    training: Training
    rows: tuple[Row, ...]
    like: Published | None = None
    """The table whose stretch is used, if not that of the first row."""


TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
DECEMBER = f"{TORCHTITAN}llama3_h100_202412_torchtitan.md"
JUNE = f"{TORCHTITAN}llama3-8b_h200_202506_trainy-whitefiber.md"
ASYNC_TP = f"{TORCHTITAN}asyncTP_llama3_h100_2025-06_torchtitan.md"
FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"

LLAMA = Training(
    "llama3-8b", gpus=1, micro_batch_size=2, checkpointing="selective", optimizer="torch-adamw"
)
FLOAT8 = replace(LLAMA, linear_dtype="float8", gather_dtype=torch.float8_e4m3fn)
# Composer's FSDP reduced gradients in the precision of compute.
MPT = Training(
    "published:mpt_13b",
    gpus=1,
    micro_batch_size=2,
    sequence=2048,
    reduce_dtype=torch.bfloat16,
    optimizer="torch-adamw",
)

LLAMA_70B = replace(
    LLAMA, model="llama3-70b", gpus=8, tensor_parallel=8, micro_batch_size=16, checkpointing="full"
)

COMPILED = Published(
    "the same, compiled",
    DECEMBER,
    "h100_500w",
    "nvlink4_400g",
    LLAMA,
    (Row(8, 6667, 77.0), Row(128, 6514, 62.0)),
)
COMPILED_FLOAT8 = Published(
    "the same, compiled, float8",
    DECEMBER,
    "h100_500w",
    "nvlink4_400g",
    FLOAT8,
    (Row(8, 8532, 76.8), Row(128, 8380, 61.8)),
)
TABLES = (
    Published(
        "Llama 3.1 8B on H100, bfloat16",
        DECEMBER,
        "h100_500w",
        "nvlink4_400g",
        LLAMA,
        (Row(8, 5762, 82.4), Row(128, 5605, 67.0)),
    ),
    COMPILED,
    COMPILED_FLOAT8,
    Published(
        "Llama 3.1 8B on H200, compiled, float8",
        JUNE,
        "h200_sxm",
        "nvlink4_400g",
        FLOAT8,
        (Row(32, 10938, 47.96), Row(64, 10753, 46.97)),
    ),
    Published(
        "Llama 3.1 70B on H100, compiled, tensor parallelism of 8",
        ASYNC_TP,
        "h100_500w",
        "nvlink4_400g",
        LLAMA_70B,
        (Row(256, 597.3),),
        like=COMPILED,
    ),
    Published(
        "the same, float8",
        DECEMBER,
        "h100_500w",
        "nvlink4_400g",
        replace(LLAMA_70B, linear_dtype="float8"),
        (Row(256, 829, 71.9),),
        like=COMPILED_FLOAT8,
    ),
    # Those of llm-foundry's models that ran with one batch on three or more numbers of GPUs: both
    # on H100, and the largest on A100.
    Published(
        "MPT 13B on H100",
        FOUNDRY,
        "h100_sxm",
        "nvlink4_400g",
        MPT,
        (Row(8, 4792), Row(16, 4767), Row(32, 4811), Row(64, 4800)),
    ),
    Published(
        "MPT 1B on H100",
        FOUNDRY,
        "h100_sxm",
        "nvlink4_400g",
        replace(MPT, model="published:mpt_1b", micro_batch_size=20),
        (Row(16, 46037), Row(32, 45130), Row(64, 44402)),
    ),
    Published(
        "MPT 7B on A100",
        FOUNDRY,
        "a100_sxm",
        "nvlink3_roce_200g",
        replace(MPT, model="published:mpt_7b", micro_batch_size=18, checkpointing="full"),
        (Row(32, 3725), Row(64, 3665), Row(128, 3623)),
    ),
)


def predict(table: Published, gpus: int, stretch: float) -> Prediction:
    training = replace(table.training, gpus=gpus)
    costs = Costs(Device.read(table.device), Fabric.read(table.fabric), stretch)
    return simulate(training.program, gpus, costs)


def fit(table: Published) -> tuple[float, Prediction]:
    """How much compute is stretched to take as long as in the first row, and that row."""
    first = table.rows[0]
    if table.like is not None:
        stretch, _ = fit(table.like)
        return stretch, predict(table, first.gpus, stretch)
    measured = table.training.tokens / first.tokens
    stretch, found = 1.0, predict(table, first.gpus, 1.0)
    while abs(found.seconds / measured - 1) > 1e-3:
        # What is exposed stays, nearly.
        exposed = found.report.exposed_time / 1e6
        stretch *= (measured - exposed) / (found.seconds - exposed)
        found = predict(table, first.gpus, stretch)
    return stretch, found


def lines(table: Published) -> Iterator[list[str]]:
    stretch, first = fit(table)
    for row in table.rows:
        is_first = row is table.rows[0]
        is_fitted = is_first and table.like is None
        found = first if is_first else predict(table, row.gpus, stretch)
        tokens = table.training.tokens / found.seconds
        losses = [
            f"{100 * (time / before - 1):.2f}"
            for time, before in (
                (1 / row.tokens, 1 / table.rows[0].tokens),
                (found.seconds, first.seconds),
            )
        ]
        yield [
            table.name if is_first else "",
            str(row.gpus),
            f"{row.tokens:.0f}",
            f"fitted: {stretch:.3f}" if is_fitted else f"{tokens:.0f}",
            "" if is_fitted else f"{100 * (row.tokens / tokens - 1):+.1f}",
            *(["", ""] if is_first else losses),
            *memory(row, found),
        ]


def memory(row: Row, found: Prediction) -> list[str]:
    """GiB published and predicted, and the error in percent."""
    predicted = found.reserved / GIB
    if row.memory is None:
        return ["", f"{predicted:.1f}", ""]
    error = 100 * (predicted / row.memory - 1)
    return [f"{row.memory:.1f}", f"{predicted:.1f}", f"{error:+.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--table",
        type=int,
        nargs="+",
        choices=range(1, len(TABLES) + 1),
        default=range(1, len(TABLES) + 1),
        help="the first table, the second and so on; all if left out",
    )
    chosen = [TABLES[number - 1] for number in parser.parse_args().table]
    shown = Table(box=None, pad_edge=False)
    for name in (
        "table",
        "GPUs",
        "tokens/s",
        "predicted",
        "step, %",
        "loss, %",
        "predicted",
        "GiB",
        "predicted",
        "error, %",
    ):
        shown.add_column(name, justify="left" if name == "table" else "right")
    console = Console(width=140)
    for table in chosen:
        with Console(stderr=True).status(table.name):
            for line in lines(table):
                shown.add_row(*line)
    console.print(shown)


if __name__ == "__main__":
    main()
