"""What a step of training would take, in a terminal and in files."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fsdp_overlap.cli.errors import BadInput
from fsdp_overlap.cli.report import show_report, write_report
from fsdp_overlap.layout import Flat, LayoutRule, Rows, Whole
from fsdp_overlap.profiling import read_report
from fsdp_overlap.simulating import (
    Costs,
    Device,
    Fabric,
    Fsdp2Training,
    Prediction,
    Training,
    simulate,
)
from fsdp_overlap.simulating.training import model_of

GIB = 1024**3
LAYOUTS: dict[str, LayoutRule] = {"flat": Flat(), "rows": Rows(), "whole": Whole()}


def predict(
    device: str, fabric: str, out: Path | None, layout: str, against_fsdp2: bool, **options: Any
) -> None:
    """Predicts a step and shows what it found, beside a step of FSDP2 if asked. Writes the trace
    and the report to ``out``. ``options`` are those of :class:`Training`.

    Raises:
        BadInput: unknown hardware, model or layout, or numbers that do not go together.
    """
    if layout not in LAYOUTS:
        raise BadInput(f"--layout {layout}: must be one of {', '.join(LAYOUTS)}")
    try:
        on, over = Device.read(device), Fabric.read(fabric)
        training = Training(layout=LAYOUTS[layout], **options)
        model_of(training.model)
        trainings = {training.model: training}
        if against_fsdp2:
            trainings["FSDP2"] = Fsdp2Training.like(training)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if out is not None and out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is not a folder")
    console = Console(highlight=False, soft_wrap=True)
    start = time.perf_counter()
    try:
        with Console(stderr=True).status(f"{training.model} on {training.gpus} GPUs"):
            predictions = {
                name: simulate(each.program, each.gpus, Costs(on, over))
                for name, each in trainings.items()
            }
    except ValueError as error:  # a stage or prefetch that there is not, a package that is missing
        raise BadInput(str(error)) from None
    took = time.perf_counter() - start
    prediction = predictions[training.model]
    memory = prediction.reserved / GIB
    for name, value in (
        ("step", f"{1e3 * prediction.seconds:.0f} ms"),
        ("tokens a second and GPU", f"{training.tokens / prediction.seconds:.0f}"),
        ("memory", f"{memory:.1f} GiB of {on.memory_size / GIB:.0f} GiB"),
        ("predicted in", f"{took:.0f} s"),
    ):
        console.print(f"{name:<24} {value}")
    if prediction.reserved > on.memory_size:
        console.print(f"It does not fit: {device} has {on.memory_size / GIB:.0f} GiB.")
    if against_fsdp2:
        console.print()
        console.print(_beside(prediction, predictions["FSDP2"]))
    console.print()
    reports = {name: read_report(each.trace, steps=1) for name, each in predictions.items()}
    show_report(reports)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _write_trace(prediction, out / "rank0.json.gz")
        if against_fsdp2:
            (out / "fsdp2").mkdir(exist_ok=True)
            _write_trace(predictions["FSDP2"], out / "fsdp2" / "rank0.json.gz")
        write_report(reports, out)
        console.print(f"\n{out / 'overlap.html'}, .png and .json")


def _write_trace(prediction: Prediction, path: Path) -> None:
    with gzip.open(path, "wt") as file:
        json.dump(prediction.trace, file)


def _beside(ours: Prediction, fsdp2: Prediction) -> Table:
    table = Table("", "this library", "FSDP2", "ratio", box=None, pad_edge=False)
    for name, unit, values in (
        ("step", "ms", [1e3 * each.seconds for each in (ours, fsdp2)]),
        ("exposed communication", "ms", [each.report.exposed_time / 1e3 for each in (ours, fsdp2)]),
        ("memory in use, at most", "GiB", [each.memory / GIB for each in (ours, fsdp2)]),
        ("memory reserved", "GiB", [each.reserved / GIB for each in (ours, fsdp2)]),
    ):
        ratio = f"{values[0] / values[1]:.3f}" if values[1] else ""
        table.add_row(name, *(f"{value:.1f} {unit}" for value in values), ratio)
    return table
