"""Print and write predictions of training steps."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fsdp_overlap.features.rows.layout import PerTensor
from fsdp_overlap.layout import Flat, LayoutRule, TensorAtomic
from fsdp_overlap.tools.cli.output import BadInput, check_writable, writing
from fsdp_overlap.tools.cli.report import show_report, write_report
from fsdp_overlap.tools.profiling import read_report
from fsdp_overlap.tools.simulator import (
    Costs,
    Device,
    Fabric,
    Fsdp2Training,
    Host,
    OffloadPrediction,
    Prediction,
    Profile,
    SearchResult,
    Training,
    TrainingPlan,
    predict_offload,
    search,
    simulate,
)
from fsdp_overlap.tools.simulator.choices import ways_to_save
from fsdp_overlap.tools.simulator.estimate import count_equal_blocks, estimate
from fsdp_overlap.tools.simulator.hardware import GIB, GIGA
from fsdp_overlap.tools.simulator.models import (
    check_positions,
    describe_size,
    model_of,
    on_meta,
    positions_of,
    unpredictable,
    unread_keys,
)
from fsdp_overlap.tools.simulator.plan_code import code_of
from fsdp_overlap.tools.simulator.uncertainty import describe_uncertainty

LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "per-tensor": PerTensor(),
    "tensor-atomic": TensorAtomic(),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LONGEST = 8192
BEST_HEADER = (
    "plan",
    "batch",
    "checkpointing",
    "blocks a unit",
    "prefetch",
    "kept",
    "reduced",
    "layout",
    "step, ms",
    "tokens/s, GPU",
    "GiB",
    "exposed, ms",
)
SECONDS_BETWEEN_LINES = 10.0
PROCESSES = min(2, os.cpu_count() or 1)


@dataclass(frozen=True)
class SimulateOptions:
    """What the command is asked for beside the step: where it runs, and what to show of it.
    ``network`` in Gb/s a device, ``memory`` in GiB, ``price`` in dollars an hour."""

    device: str
    fabric: str
    network: float | None
    attention: str
    rented: bool
    compile: bool
    expandable_segments: bool
    matmul_stretch: float
    other_stretch: float
    profile: Path | None
    memory: float | None
    price: float | None
    best: bool
    against_fsdp2: bool
    offload: str | None
    out: Path | None

    def costs(self) -> Costs:
        device = Device.read(self.device).with_attention(self.attention)
        if self.rented:
            device = device.rented()
        if self.memory is not None:
            device = replace(device, memory_size=int(self.memory * GIB))
        fabric = Fabric.read(self.fabric)
        if self.network is not None:
            if fabric.between is None:
                raise BadInput(f"--network {self.network:g}: {self.fabric} has one node")
            between = replace(fabric.between, bandwidth=self.network * GIGA / 8)
            fabric = replace(fabric, between=between)
        profile = None if self.profile is None else Profile.read(self.profile)
        return Costs(
            device,
            fabric,
            self.matmul_stretch,
            self.other_stretch,
            profile,
            self.compile,
            self.expandable_segments,
        )


def predict(
    layout: str,
    sequence: int | None,
    dtype: str,
    mixed_precision_param: str,
    mixed_precision_reduce: str,
    **arguments: Any,
) -> None:
    """Predict a step, or look for the best plan of it, and show what was found. Write files to
    ``out``. ``arguments`` are those of :class:`SimulateOptions` and of :class:`Training`. Without
    ``sequence``, sequences have as many tokens as the model has positions, at most ``LONGEST``.

    Raises:
        BadInput: unknown hardware, model or layout, numbers that do not go together, or a step that
            does not fit. What a step that does not fit would take is shown all the same.
    """
    options = SimulateOptions(**{f.name: arguments.pop(f.name) for f in fields(SimulateOptions)})
    if layout not in LAYOUTS:
        raise BadInput(f"--layout {layout}: must be one of {', '.join(LAYOUTS)}")
    for name in ("network", "memory", "price", "matmul_stretch", "other_stretch"):
        number = getattr(options, name)
        if number is not None and not 0 < number < math.inf:
            option = f"--{name.replace('_', '-')} {number:g}"
            raise BadInput(f"{option}: must be more than 0, and finite")
    dtypes = {"dtype": dtype, "param_dtype": mixed_precision_param}
    dtypes["reduce_dtype"] = mixed_precision_reduce
    for given in dtypes.values():
        if given not in DTYPES:
            raise BadInput(f"{given}: as a dtype use {' or '.join(DTYPES)}")
    arguments |= {name: DTYPES[given] for name, given in dtypes.items()}
    if options.out is not None:
        check_writable(options.out)
    try:
        costs = options.costs()
        model = on_meta(model_of(arguments["model"]))
        if sequence is None:
            sequence = min(LONGEST, (model and positions_of(model)) or LONGEST)
        if model is not None:
            check_positions(model, sequence)
            if costs.profile is not None:
                costs.profile.check_model(model)
        training = Training(layout=LAYOUTS[layout], sequence=sequence, **arguments)
        if training.loss == "eager" and not options.compile:
            raise BadInput("--loss eager without --compile: all kernels are eager; leave it out")
        about = [("parameters", describe_size(model) if model else "not known before it is made")]
        if unread := unread_keys(training.model):
            about.append(("keys that nothing reads", ", ".join(unread)))
        if options.best:
            print(*(f"{name:<24} {value}" for name, value in about), "", sep="\n")
            _search(training, costs, options)
        else:
            _predict(training, costs, options, about)
    except BadInput:
        raise
    except ValueError as error:  # unknown names, numbers that do not go, a missing package
        raise BadInput(str(error)) from None


def _search(training: Training, costs: Costs, options: SimulateOptions) -> None:
    if options.offload is not None:
        raise BadInput("--best and --offload: leave one of the two out")
    if training.expert_parallel > 1 or options.against_fsdp2:
        other = "--against-fsdp2" if options.against_fsdp2 else "--expert-parallel"
        raise BadInput(f"--best and {other}: leave one of the two out")
    start = time.perf_counter()
    # It may not be able to say all of the plan: better now than after minutes.
    code_of(training, costs.compiles, costs.expandable_segments)
    console = Console(stderr=True)
    with console.status(f"{training.model} on {training.gpus} GPUs") as status:
        tell = status.update if console.is_terminal else _now_and_then()
        found = search(training, costs, processes=PROCESSES, progress=tell)
    _show_best(found, costs, options.price, options.out, time.perf_counter() - start)


def _now_and_then() -> Callable[[str], None]:
    """Return what prints a line to stderr, but not more often than a log takes."""
    last = time.perf_counter()

    def tell(line: str) -> None:
        nonlocal last
        if time.perf_counter() - last >= SECONDS_BETWEEN_LINES:
            last = time.perf_counter()
            print(line, file=sys.stderr, flush=True)

    return tell


def _predict(
    training: Training, costs: Costs, options: SimulateOptions, about: list[tuple[str, str]]
) -> None:
    """``about``: names and values of lines about the model."""
    host = None if options.offload is None else Host.read(options.offload)
    trainings = {training.model: training}
    if options.against_fsdp2:
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
        prediction = predictions[training.model]
        offloaded = None
        if host is not None:
            offloaded = predict_offload(training, costs, host, prediction)
        missing = ""
        if offloaded is None and not prediction.fits(costs.device):
            missing = _why_not(training, prediction, costs)
    took = time.perf_counter() - start
    if missing:
        console.print(missing, markup=False)
    for name, value in (
        *about,
        *_lines(training, prediction, costs, options.price),
        ("predicted in", f"{took:.0f} s"),
    ):
        console.print(f"{name:<24} {value}")
    if options.against_fsdp2:
        console.print()
        console.print(_beside(prediction, predictions["FSDP2"]))
    if offloaded is not None:
        console.print()
        console.print(_offloaded(training, prediction, offloaded))
    console.print()
    reports = {name: read_report(each.trace, steps=1) for name, each in predictions.items()}
    show_report(reports)
    if options.out is not None:
        with writing(options.out) as new:
            _write_trace(prediction, new / "rank0.json.gz")
            if options.against_fsdp2:
                (new / "fsdp2").mkdir()
                _write_trace(predictions["FSDP2"], new / "fsdp2" / "rank0.json.gz")
            write_report(reports, new)
        console.print(f"\n{options.out / 'overlap.html'}, .png and .json")
    if offloaded is not None:
        if offloaded.memory > costs.device.memory_size:
            raise BadInput(
                f"it does not fit: offloaded it needs {offloaded.memory / GIB:.1f} GiB on each "
                f"GPU, and {costs.device.name} has {costs.device.memory_size / GIB:.1f} GiB. Try "
                "--checkpointing full, or a smaller --micro-batch-size or --sequence"
            )
    elif missing:
        raise BadInput(missing)


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


def _offloaded(training: Training, resident: Prediction, offloaded: OffloadPrediction) -> Table:
    table = Table("", "step", "tokens/s, GPU", "GPU", "host, a rank", box=None, pad_edge=False)
    there, host = (
        f"{nbytes / GIB:.1f} GiB" for nbytes in (offloaded.memory, offloaded.host_memory)
    )
    table.add_row(
        "on the GPU", *_pace(training, resident.seconds), f"{resident.memory / GIB:.1f} GiB", ""
    )
    for name, seconds in (
        ("offloaded", offloaded.in_step),
        ("offloaded, overlap, clipped", offloaded.clipped),
        ("offloaded, overlap", offloaded.overlapped),
        ("at least: compute", offloaded.compute),
        ("at least: copies to the GPU", offloaded.copies),
        ("at least: AdamW on the host", offloaded.optimizer),
    ):
        memory = ("", "") if name.startswith("at least") else (there, host)
        table.add_row(name, *_pace(training, seconds), *memory)
    return table


def _pace(training: Training, seconds: float) -> tuple[str, str]:
    return f"{1e3 * seconds:.0f} ms", f"{training.tokens / seconds:.0f}" if seconds else ""


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
        ("uncertainty", describe_uncertainty(prediction.seconds)),
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


def _why_not(training: Training, prediction: Prediction, costs: Costs) -> str:
    """Return what is missing, and the first change that makes the step fit."""
    device = costs.device
    said = (
        f"it does not fit: it needs {prediction.reserved / GIB:.1f} GiB on each GPU, and "
        f"{device.name} has {device.memory_size / GIB:.1f} GiB"
    )
    equal = count_equal_blocks(training.model)
    for change, smaller in ways_to_save(training).items():
        try:
            taken = estimate(smaller, costs, equal)
        except Exception:  # experts may need more tokens, or a model all of a batch
            continue
        if taken.reserved <= device.memory_size:
            return f"{said}; with {change} it does, in {1e3 * taken.seconds:.0f} ms"
    tries = "--best tries several together, or " if _is_searched(training) else ""
    return f"{said}; no single change mends that; {tries}use more GPUs"


def _is_searched(training: Training) -> bool:
    """Return whether ``--best`` takes ``training``."""
    try:
        code_of(training)
    except (ImportError, ValueError):
        return False
    return training.expert_parallel == 1


def _show_best(
    found: SearchResult, costs: Costs, price: float | None, out: Path | None, took: float
) -> None:
    """Print the table, how much better the best plan is than the defaults, and its code. Writes
    the code to ``plan.py`` in ``out``.

    Raises:
        BadInput: no plan fits.
    """
    # A file takes long lines; a terminal says how long.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    skipped = ", ".join(f"{count} skipped: {why}" for why, count in found.skipped.most_common())
    said = f"{found.tried} plans tried in {took:.0f} s{'; ' if skipped else ''}{skipped}"
    if not found.plans:
        least = found.least
        if least is None:
            raise BadInput(f"no plan runs: {said}")
        has, needs = costs.device.memory_size / GIB, least.taken.reserved / GIB
        raise BadInput(f"no plan fits in {has:.1f} GiB; the least needs {needs:.1f} GiB ({said})")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in BEST_HEADER:
        table.add_column(column, justify="right", overflow="fold")
    for number, plan in enumerate(found.plans, 1):
        table.add_row(str(number), *_plan_cells(plan))
    if found.defaults is not None:
        table.add_row("defaults", *_plan_cells(found.defaults))
    console.print(table)
    console.print(f"\n{said}", markup=False)
    console.print(_against_defaults(found), markup=False)
    best = found.plans[0]
    if price is not None:
        cost = best.training.gpus * best.seconds / 3600 * price
        tokens = best.training.tokens * best.training.gpus
        console.print(f"It costs ${cost:.4f} a step, ${cost / tokens * 1e9:.0f} a billion tokens.")
    code = code_of(best.training, costs.compiles, costs.expandable_segments)
    print(f"\nThe best as code:\n\n{code}")
    if out is not None:
        with writing(out) as new:
            (new / "plan.py").write_text(code)
        console.print(f"{out / 'plan.py'}", markup=False)


def _against_defaults(found: SearchResult) -> str:
    if found.speedup is None:
        return "The library's defaults do not fit."
    what = "the library's defaults"
    if not found.given_fits:
        what += " with its microbatches and checkpointing; as given they do not fit"
    return f"The best takes {100 * (1 - 1 / found.speedup):.1f}% less time than {what}."


def _plan_cells(plan: TrainingPlan) -> list[str]:
    training, taken = plan.training, plan.taken
    if training.stage != 3:
        kept = "all"
    elif training.reshard_after_forward is not None:
        kept = f"1/{training.reshard_after_forward}"
    else:
        kept = "nothing"
    exposed = "" if taken.exposed is None else f"{1e3 * taken.exposed:.0f}"
    return [
        f"{training.microbatches} x {training.micro_batch_size}",
        training.checkpointing,
        str(training.blocks_per_unit),
        str(training.prefetch),
        kept,
        "each" if training.reduce_each or training.microbatches == 1 else "last",
        type(training.layout).__name__,
        f"{1e3 * plan.seconds:.1f}",
        f"{training.tokens / plan.seconds:.0f}",
        f"{taken.reserved / GIB:.1f}",
        exposed,
    ]
