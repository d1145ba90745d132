"""What a step of training would take, in a terminal and in files."""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fsdp_overlap.cli.best_plan import show_best
from fsdp_overlap.cli.errors import BadInput
from fsdp_overlap.cli.report import show_report, write_report
from fsdp_overlap.layout import Flat, LayoutRule, Rows, Whole
from fsdp_overlap.profiling import read_report
from fsdp_overlap.simulating import Costs, Device, Fabric, Prediction, Training, search, simulate
from fsdp_overlap.simulating.choices import ways_to_save
from fsdp_overlap.simulating.hardware import GIB
from fsdp_overlap.simulating.training import model_of

LAYOUTS: dict[str, LayoutRule] = {"flat": Flat(), "rows": Rows(), "whole": Whole()}
PROCESSES = min(2, os.cpu_count() or 1)


@dataclass(frozen=True)
class Asked:
    """What the command was asked for beside the step: where it runs, and what to show of it.
    ``memory`` in GiB a device, ``price`` in dollars an hour of one."""

    device: str
    fabric: str
    memory: float | None
    price: float | None
    best: bool
    out: Path | None


def predict(asked: Asked, layout: str, **options: Any) -> None:
    """Predicts a step, or looks for the best plan of it, and shows what was found. Writes files to
    ``asked.out``. ``options`` are those of :class:`Training`.

    Raises:
        BadInput: unknown hardware, model or layout, numbers that do not go together, or a step that
            does not fit. What a step that does not fit would take is shown all the same.
    """
    if layout not in LAYOUTS:
        raise BadInput(f"--layout {layout}: must be one of {', '.join(LAYOUTS)}")
    for name, number in (("memory", asked.memory), ("price", asked.price)):
        if number is not None and number <= 0:
            raise BadInput(f"--{name} {number:g}: must be more than 0")
    try:
        costs = _costs(asked)
        training = Training(layout=LAYOUTS[layout], **options)
        model_of(training.model)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if asked.out is not None and asked.out.exists() and not asked.out.is_dir():
        raise BadInput(f"--out {asked.out} is not a folder")
    try:
        if asked.best:
            _search(training, costs, asked)
        else:
            _predict(training, costs, asked)
    except BadInput:
        raise
    except ValueError as error:  # a stage or prefetch that there is not, a package that is missing
        raise BadInput(str(error)) from None


def _costs(asked: Asked) -> Costs:
    device = Device.read(asked.device)
    if asked.memory is not None:
        device = replace(device, memory_size=int(asked.memory * GIB))
    return Costs(device, Fabric.read(asked.fabric))


def _search(training: Training, costs: Costs, asked: Asked) -> None:
    start = time.perf_counter()
    with Console(stderr=True).status(f"{training.model} on {training.gpus} GPUs") as status:
        found = search(training, costs, processes=PROCESSES, progress=status.update)
    show_best(found, costs.device, asked.price, asked.out, time.perf_counter() - start)


def _predict(training: Training, costs: Costs, asked: Asked) -> None:
    console = Console(highlight=False, soft_wrap=True)
    start = time.perf_counter()
    with Console(stderr=True).status(f"{training.model} on {training.gpus} GPUs"):
        prediction = simulate(training.program, training.gpus, costs)
    took = time.perf_counter() - start
    for name, value in (
        *_lines(training, prediction, costs, asked.price),
        ("predicted in", f"{took:.0f} s"),
    ):
        console.print(f"{name:<24} {value}")
    console.print()
    reports = {training.model: read_report(prediction.trace, steps=1)}
    show_report(reports)
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        with gzip.open(asked.out / "rank0.json.gz", "wt") as file:
            json.dump(prediction.trace, file)
        write_report(reports, asked.out)
        console.print(f"\n{asked.out / 'overlap.html'}, .png and .json")
    if not prediction.fits(costs.device):
        raise BadInput(_why_not(training, prediction, costs.device))


def _lines(
    training: Training, prediction: Prediction, costs: Costs, price: float | None
) -> list[tuple[str, str]]:
    at_peak = sorted(prediction.peak.items(), key=lambda item: -item[1])
    peak = ", ".join(f"{kind} {nbytes / GIB:.1f}" for kind, nbytes in at_peak if nbytes)
    arriving = prediction.traffic(costs.fabric)
    traffic = ", ".join(f"{name} {nbytes / 1e9:.1f} GB" for name, nbytes in arriving.items())
    stretches = prediction.stretches
    waits = f"{1e3 * prediction.host_bound:.0f} ms in {len(stretches)} stretches"
    if stretches:
        waits += f", the longest {1e3 * max(each.waited for each in stretches):.1f} ms"
    lines = [
        ("step", f"{1e3 * prediction.seconds:.0f} ms"),
        ("tokens a second and GPU", f"{training.tokens / prediction.seconds:.0f}"),
        (
            "memory",
            f"{prediction.reserved / GIB:.1f} GiB of {costs.device.memory_size / GIB:.0f} GiB",
        ),
        ("at the peak, GiB", peak),
        ("arrives at a GPU", traffic),
        ("waits for the host", waits),
    ]
    if price is not None:
        cost = prediction.cost(price)
        billion = cost / (training.tokens * training.gpus) * 1e9
        lines.append(("cost", f"${cost:.4f} a step, ${billion:.0f} a billion tokens"))
    return lines


def _why_not(training: Training, prediction: Prediction, device: Device) -> str:
    saving = ", ".join(ways_to_save(training))
    tried = f" These take less: {saving}." if saving else ""
    return (
        f"it does not fit: it needs {prediction.reserved / GIB:.1f} GiB on each GPU, and "
        f"{device.name} has {device.memory_size / GIB:.1f} GiB.{tried} --best finds a plan that "
        "fits, if there is one; more GPUs leave less on each"
    )
