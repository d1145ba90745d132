"""Predictions of what others measured and published, each beside the measurement.

Of each table the row with the fewest GPUs is used up: how long compute takes is stretched until the
prediction is as measured there. All other rows are predicted with that. Their memory is predicted
without any fit. What steps lose with scale is the time at a row over the time at the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from fsdp_overlap.simulating import Costs, Device, Fabric, Prediction, Training, simulate

GIB = 2**30
LLAMA = Training("llama3-8b", gpus=1, batch=2, checkpointing="selective", optimizer="torch-adamw")
DECEMBER = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
JUNE = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3-8b_h200_202506_trainy-whitefiber.md"
)


@dataclass(frozen=True)
class Row:
    """Tokens a second and GPU, and the GiB that the allocator took."""

    gpus: int
    tokens: float
    memory: float


@dataclass(frozen=True)
class Published:
    name: str
    source: str
    device: str
    fabric: str
    training: Training
    rows: tuple[Row, ...]


TABLES = (
    Published(
        "Llama 3.1 8B on H100, bfloat16",
        DECEMBER,
        "h100_500w",
        "nvlink4_400g",
        LLAMA,
        (Row(8, 5762, 82.4), Row(128, 5605, 67.0)),
    ),
    Published(
        "the same, compiled",
        DECEMBER,
        "h100_500w",
        "nvlink4_400g",
        LLAMA,
        (Row(8, 6667, 77.0), Row(128, 6514, 62.0)),
    ),
    Published(
        "the same, compiled, float8",
        DECEMBER,
        "h100_500w",
        "nvlink4_400g",
        replace(LLAMA, gather_dtype=torch.float8_e4m3fn),
        (Row(8, 8532, 76.8), Row(128, 8380, 61.8)),
    ),
    Published(
        "Llama 3.1 8B on H200, compiled, float8",
        JUNE,
        "h200_sxm",
        "nvlink4_400g",
        replace(LLAMA, gather_dtype=torch.float8_e4m3fn),
        (Row(32, 10938, 47.96), Row(64, 10753, 46.97)),
    ),
)


def predict(table: Published, gpus: int, stretch: float) -> Prediction:
    training = replace(table.training, gpus=gpus)
    costs = Costs(Device.read(table.device), Fabric.read(table.fabric), stretch)
    return simulate(training.program, gpus, costs)


def fit(table: Published) -> tuple[float, Prediction]:
    """How much compute is stretched to take as long as in the first row."""
    first = table.rows[0]
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
        found = first if is_first else predict(table, row.gpus, stretch)
        tokens = table.training.tokens / found.seconds
        memory = found.reserved / GIB
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
            f"fitted: {stretch:.3f}" if is_first else f"{tokens:.0f}",
            "" if is_first else f"{100 * (row.tokens / tokens - 1):+.1f}",
            *(["", ""] if is_first else losses),
            f"{row.memory:.1f}",
            f"{memory:.1f}",
            f"{100 * (memory / row.memory - 1):+.0f}",
        ]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
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
    for table in TABLES:
        with Console(stderr=True).status(table.name):
            for line in lines(table):
                shown.add_row(*line)
    console.print(shown)


if __name__ == "__main__":
    main()
