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
from rich.table import Table

from fsdp_overlap.cli.best_plan import show_best
from fsdp_overlap.cli.errors import BadInput
from fsdp_overlap.cli.output import check_writable, writing
from fsdp_overlap.cli.report import show_report, write_report
from fsdp_overlap.layout import Flat, LayoutRule, PerTensor, TensorAtomic
from fsdp_overlap.profiling import read_report
from fsdp_overlap.simulator import (
    Costs,
    Device,
    Fabric,
    Fsdp2Training,
    Prediction,
    Profile,
    Training,
    search,
    simulate,
)
from fsdp_overlap.simulator.choices import ways_to_save
from fsdp_overlap.simulator.hardware import GIB
from fsdp_overlap.simulator.models import (
    check_positions,
    model_of,
    on_meta,
    positions_of,
    unpredictable,
)

LAYOUTS: dict[str, LayoutRule] = {"flat": Flat(), "rows": PerTensor(), "whole": TensorAtomic()}
LONGEST = 8192
PROCESSES = min(2, os.cpu_count() or 1)


@dataclass(frozen=True)
class Asked:
    """What the command was asked for beside the step: where it runs, and what to show of it.
    ``memory`` in GiB a device, ``price`` in dollars an hour of one."""

    device: str
    fabric: str
    profile: Path | None
    memory: float | None
    price: float | None
    best: bool
    against_fsdp2: bool
    out: Path | None


def predict(asked: Asked, layout: str, sequence: int | None, **options: Any) -> None:
    """Predicts a step, or looks for the best plan of it, and shows what was found. Writes files to
    ``asked.out``. ``options`` are those of :class:`Training`. Without ``sequence``, sequences have
    as many tokens as the model has positions, at most ``LONGEST``.

    Raises:
        BadInput: unknown hardware, model or layout, numbers that do not go together, or a step that
            does not fit. What a step that does not fit would take is shown all the same.
    """
    if layout not in LAYOUTS:
        raise BadInput(f"--layout {layout}: must be one of {', '.join(LAYOUTS)}")
    for name, number in (("memory", asked.memory), ("price", asked.price)):
        if number is not None and number <= 0:
            raise BadInput(f"--{name} {number:g}: must be more than 0")
    if asked.out is not None:
        check_writable(asked.out)
    try:
        costs = _costs(asked)
        model = on_meta(model_of(options["model"]))
        if sequence is None:
            sequence = min(LONGEST, (model and positions_of(model)) or LONGEST)
        if model is not None:
            check_positions(model, sequence)
            if costs.profile is not None:
                costs.profile.check_model(model)
        training = Training(layout=LAYOUTS[layout], sequence=sequence, **options)
        if asked.best:
            _search(training, costs, asked)
        else:
            _predict(training, costs, asked)
    except BadInput:
        raise
    except ValueError as error:  # unknown names, numbers that do not go, a missing package
        raise BadInput(str(error)) from None


def _costs(asked: Asked) -> Costs:
    device = Device.read(asked.device)
    if asked.memory is not None:
        device = replace(device, memory_size=int(asked.memory * GIB))
    profile = None if asked.profile is None else Profile.read(asked.profile)
    return Costs(device, Fabric.read(asked.fabric), profile=profile)


def _search(training: Training, costs: Costs, asked: Asked) -> None:
    if training.experts > 1 or asked.against_fsdp2:
        other = "--against-fsdp2" if asked.against_fsdp2 else "--expert-parallel"
        raise BadInput(f"--best and {other}: leave one of the two out")
    start = time.perf_counter()
    with Console(stderr=True).status(f"{training.model} on {training.gpus} GPUs") as status:
        found = search(training, costs, processes=PROCESSES, progress=status.update)
    show_best(found, costs.device, asked.price, asked.out, time.perf_counter() - start)


def _predict(training: Training, costs: Costs, asked: Asked) -> None:
    trainings = {training.model: training}
    if asked.against_fsdp2:
        trainings["FSDP2"] = Fsdp2Training.like(training)
    console = Console(highlight=False, soft_wrap=True)
    start = time.perf_counter()
    with Console(stderr=True).status(f"{training.model} on {training.gpus} GPUs"):
        try:
            predictions = {
                name: simulate(each.program, each.gpus, costs) for name, each in trainings.items()
            }
        except Exception as error:  # whatever the code of a model raises
            raise unpredictable(training.model, error) from error
    took = time.perf_counter() - start
    prediction = predictions[training.model]
    for name, value in (
        *_lines(training, prediction, costs, asked.price),
        ("predicted in", f"{took:.0f} s"),
    ):
        console.print(f"{name:<24} {value}")
    if asked.against_fsdp2:
        console.print()
        console.print(_beside(prediction, predictions["FSDP2"]))
    console.print()
    reports = {name: read_report(each.trace, steps=1) for name, each in predictions.items()}
    show_report(reports)
    if asked.out is not None:
        with writing(asked.out) as new:
            _write_trace(prediction, new / "rank0.json.gz")
            if asked.against_fsdp2:
                (new / "fsdp2").mkdir()
                _write_trace(predictions["FSDP2"], new / "fsdp2" / "rank0.json.gz")
            write_report(reports, new)
        console.print(f"\n{asked.out / 'overlap.html'}, .png and .json")
    if not prediction.fits(costs.device):
        raise BadInput(_why_not(training, prediction, costs.device))


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


def _lines(
    training: Training, prediction: Prediction, costs: Costs, price: float | None
) -> list[tuple[str, str]]:
    at_peak = sorted(prediction.peak.items(), key=lambda item: -item[1])
    peak = ", ".join(f"{kind} {nbytes / GIB:.1f}" for kind, nbytes in at_peak if nbytes)
    arriving = prediction.traffic(costs.fabric)
    traffic = ", ".join(f"{name} {nbytes / 1e9:.1f} GB" for name, nbytes in arriving.items())
    stretches = prediction.stretches
    times = "once" if len(stretches) == 1 else f"{len(stretches)} times"
    waits = f"{1e3 * prediction.host_bound:.0f} ms, {times}"
    if stretches:
        waits += f", the longest {1e3 * max(each.waited for each in stretches):.1f} ms"
    lines = [
        ("step", f"{1e3 * prediction.seconds:.0f} ms"),
        ("tokens a step and GPU", f"{training.tokens:.0f}"),
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
