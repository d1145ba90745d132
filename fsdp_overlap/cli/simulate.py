"""What a step of training would take, in a terminal and in files."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from fsdp_overlap.cli.errors import BadInput
from fsdp_overlap.cli.report import show_report, write_report
from fsdp_overlap.layout import Flat, LayoutRule, Rows, Whole
from fsdp_overlap.profiling import read_report
from fsdp_overlap.simulating import Costs, Device, Fabric, Training, simulate
from fsdp_overlap.simulating.training import model_of

GIB = 1024**3
LAYOUTS: dict[str, LayoutRule] = {"flat": Flat(), "rows": Rows(), "whole": Whole()}


def predict(device: str, fabric: str, out: Path | None, layout: str, **options: Any) -> None:
    """Predicts a step and shows what it found. Writes the trace and its report to ``out``.
    ``options`` are those of :class:`Training`.

    Raises:
        BadInput: unknown hardware, model or layout, or numbers that do not go together.
    """
    if layout not in LAYOUTS:
        raise BadInput(f"--layout {layout}: must be one of {', '.join(LAYOUTS)}")
    try:
        on, over = Device.read(device), Fabric.read(fabric)
        training = Training(layout=LAYOUTS[layout], **options)
        model_of(training.model)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if out is not None and out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is not a folder")
    console = Console(highlight=False, soft_wrap=True)
    start = time.perf_counter()
    try:
        with Console(stderr=True).status(f"{training.model} on {training.gpus} GPUs"):
            prediction = simulate(training.program, training.gpus, Costs(on, over))
    except ValueError as error:  # a stage or prefetch that there is not, a package that is missing
        raise BadInput(str(error)) from None
    took = time.perf_counter() - start
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
    console.print()
    reports = {training.model: read_report(prediction.trace, steps=1)}
    show_report(reports)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with gzip.open(out / "rank0.json.gz", "wt") as file:
            json.dump(prediction.trace, file)
        write_report(reports, out)
        console.print(f"\n{out / 'overlap.html'}, .png and .json")
