"""Compare a user's program as it is with the same program on this library."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from fsdp_overlap.recording.recording import Recording
from fsdp_overlap.tools.cli.output import BadInput, check_writable
from fsdp_overlap.tools.cli.report import find_traces, show_table, write_report
from fsdp_overlap.tools.comparison.differences import Comparison, compare
from fsdp_overlap.tools.comparison.options import OursOptions
from fsdp_overlap.tools.comparison.program import ProgramRun, RankResult
from fsdp_overlap.tools.comparison.report import LABELS, CompareReport, Way, as_json
from fsdp_overlap.tools.comparison.runs import Ranks, last_words
from fsdp_overlap.tools.profiling import Report, read_report
from fsdp_overlap.tools.profiling.tables import ReportTable
from fsdp_overlap.tools.races.runner import Program

if TYPE_CHECKING:
    from fsdp_overlap.tools.simulator.program import ProgramPrediction

ALIKE, DIFFERENT, FAILED = 0, 1, 2
"""Exit codes."""
_PROFILED = 2
_GIB = 1 << 30
_SHOWN = 2
"""Findings about the communication of each way, in a terminal; the page has all."""


@dataclass(frozen=True)
class Limits:
    """What ``--assert-loss`` and ``--assert-time`` ask for, ``None`` if they were not given."""

    loss: float | None = None
    time: float | None = None


def compare_program(
    program: Program,
    ranks: int | None,
    steps: int,
    rounds: int,
    truth: bool,
    on_emulated_gpus: bool,
    options: Path | None,
    keep: str | None,
    seed: int,
    timeout: float,
    limits: Limits,
    out: Path,
) -> int:
    """Run ``program`` in two ways, or three, and report. Return the exit code."""
    check_writable(out)
    if options is not None:
        try:
            OursOptions.read(options)
        except ValueError as error:
            raise BadInput(f"--options {error}") from None
    started = _ranks(ranks, timeout)
    ways = [Way("fsdp2"), Way("ours"), *([Way("replicated")] if truth else [])]
    report = CompareReport(" ".join([program.target, *program.args]), ways)
    console = Console(stderr=True, quiet=not started.is_first, highlight=False)
    first: Path | None = None
    if started.is_first:
        for old in [run for way in ways for run in (out / way.way).glob("round-*/run.json")]:
            shutil.rmtree(old.parent)  # of an earlier comparison
    for number in range(rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            folder = out / way.way / f"round-{number}"
            args = [arg.replace("{run}", f"{way.way}-{number}") for arg in program.args]
            run = ProgramRun(
                replace(program, args=args),
                way.way,
                folder,
                0 if number else steps,
                0 if on_emulated_gpus else steps,
                0 if number or on_emulated_gpus else _PROFILED,
                seed,
                on_emulated_gpus,
                keep,
                first,
                options if way.way == "ours" else None,
            )
            what = f"{way.label}, round {number + 1} of {rounds}, {run.steps} steps"
            with console.status(what):
                results = started.run(run)
            console.print(f"{what}: done", markup=False)
            way.rounds.append(results)
            said = _failures(way, results, run)
            report.failures += [each for each in said if each not in report.failures]
            first = first or folder
            if _has_failed(way, results):
                break
        if report.failures:
            break
    if not started.is_first:
        return ALIKE
    is_whole = _read(report, out)
    _show(report, out)
    if any(_has_failed(way, ranks) for way in ways for ranks in way.rounds) or not is_whole:
        return FAILED
    return _judge(report, limits)


def _ranks(count: int | None, timeout: float) -> Ranks:
    if count is not None and count < 1:
        raise BadInput(f"--ranks {count}: must be at least 1")
    if "RANK" not in os.environ:
        return Ranks(count or 2, None, timeout)
    started = Ranks.of_torchrun(timeout)
    if count not in (None, started.count):
        raise BadInput(f"--ranks {count}: torchrun has started {started.count}; leave it out")
    return started


def _has_failed(way: Way, results: Sequence[RankResult]) -> bool:
    """Return whether a run shows nothing that can be compared."""
    is_sharded = way.way == "replicated" or way.way in results[0].units
    return any(rank.error for rank in results) or not results[0].steps or not is_sharded


def _failures(way: Way, results: Sequence[RankResult], run: ProgramRun) -> list[str]:
    """Return what went wrong in a run, each with what to do."""
    said = []
    units = results[0].units
    for rank in results:
        if rank.error is not None:
            hint = _hint(rank.error)
            words = last_words(run.folder, rank.rank)
            said.append(
                f"{way.label} failed on rank {rank.rank}: {rank.error}{hint}; "
                f"{run.folder / f'rank-{rank.rank}.log'} ends with\n{words}"
            )
            return said
    if not results[0].steps:
        return [
            f"{way.label}: the program ended before a backward, so there is nothing to compare: "
            "let it train"
        ]
    if way.way == "fsdp2" and not units.get("fsdp2"):
        if units.get("fsdp1"):
            said.append(
                "the program uses FullyShardedDataParallel (FSDP1), and only fully_shard() of "
                "torch.distributed.fsdp can be replaced: migrate it, or choose version 2 where "
                "a trainer has it (accelerate: fsdp_version: 2)"
            )
        else:
            said.append(
                "the program calls no fully_shard() of torch.distributed.fsdp in its first model, "
                "so there is nothing to compare: choose FSDP2 among its options"
            )
    if way.way == "ours" and not units.get("ours"):
        said.append(
            "the program keeps torch's fully_shard(), which was imported before it began; "
            "use patch_fsdp2() in it"
        )
    if results[0].steps < run.steps:
        said.append(
            f"the program ended after {results[0].steps} of {run.steps} steps, so that some were "
            "not timed: let it train longer, or give fewer --steps"
        )
    return said


def _hint(error: str) -> str:
    low = error.lower()
    if not torch.cuda.is_available() and any(w in low for w in ("cuda", "nccl", "nvidia")):
        return (
            " (it needs GPUs: run it where they are, on emulated ones by --emulate-gpus, or "
            "predict its steps by --predict h100_sxm)"
        )
    if "world size" in low or "world_size" in low:
        return " (it needs another number of --ranks)"
    if "modulenotfounderror" in low:
        return " (install what it imports)"
    return ""


def _read(report: CompareReport, out: Path) -> bool:
    """Read recordings and traces, and compare them. Return whether all have recordings."""
    found: dict[str, Recording] = {}
    reports: dict[str, Report] = {}
    for way in report.ways:
        folder = out / way.way / "round-0"
        if not way.rounds or any(rank.error for rank in way.rounds[0]):
            continue
        try:
            found[way.way] = Recording.read(folder)
        except ValueError as error:
            if not _has_failed(way, way.rounds[0]):
                report.failures.append(f"{way.label}: {error}: let all ranks train")
            continue
        if (folder / "traces").is_dir():
            try:
                way.overlap = reports[way.label] = read_report(*find_traces([folder / "traces"]))
            except ValueError as error:
                report.failures.append(f"{way.label}: its traces tell nothing: {error}")
    pairs = [("fsdp2", "ours"), ("replicated", "fsdp2"), ("replicated", "ours")]
    for one, other in pairs:
        if one in found and other in found:
            names = LABELS[one], LABELS[other]
            report.against.append(compare(found[one], found[other], names))
    out.mkdir(parents=True, exist_ok=True)
    if reports:
        write_report(reports, out)
    report.write(out)
    return len(found) == len(report.ways)


def _show(report: CompareReport, out: Path) -> None:
    width = None if sys.stdout.isatty() else 160
    console = Console(highlight=False, soft_wrap=True, width=width)
    if report.against:
        show_table(console, report.table())
    for label, findings in report.findings().items():
        console.print(f"{label}, communication:", markup=False)
        for text in findings[:_SHOWN]:
            console.print(f"- {text}", markup=False)
    if report.dtypes:
        console.print(f"\n{report.dtypes}", markup=False)
    console.print()
    for sentence in report.sentences:
        console.print(sentence, markup=False)
    console.print(f"\n{out / 'compare.html'} and .json", markup=False)


def _judge(report: CompareReport, limits: Limits) -> int:
    status = ALIKE
    if report.against[0].unexplained is not None or report.against[0].more_steps is not None:
        status = DIFFERENT
    difference, ratio = report.loss_difference, report.time_ratio
    if limits.loss is not None:
        if difference is not None and difference <= limits.loss:
            # Asked for losses: a difference within is no failure.
            status = ALIKE
        else:
            print(f"--assert-loss {limits.loss:g}: losses differ by {difference}")
            status = DIFFERENT
    if limits.time is not None and (ratio is None or ratio > limits.time):
        print(f"--assert-time {limits.time:g}: a step takes {ratio} of FSDP2's time")
        status = DIFFERENT
    return status


def predict_both(program: Program, device: str, fabric: str, gpus: int, out: Path) -> None:
    """Predict a step of ``program``, which is written for GPUs, on both libraries, and report."""
    # Gives torch one more kind of device.
    from fsdp_overlap.tools.simulator import Costs, Device, Fabric
    from fsdp_overlap.tools.simulator.program import ProgramError, predict_program

    check_writable(out)
    try:
        costs = Costs(Device.read(device), Fabric.read(fabric))
        found = {
            LABELS[way]: predict_program(program, costs, gpus, ours=way == "ours")
            for way in ("fsdp2", "ours")
        }
    except (ProgramError, ValueError, FileNotFoundError) as error:
        raise BadInput(f"{program.target}: {error}") from None
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(f"Predicted: a step on {gpus} {device}, as rank 0", markup=False)
    show_table(console, _predicted_table(found))
    for name, each in found.items():
        for what, where in each.not_seen.items():
            console.print(f"{name}: {what}, called at {where}, was not seen", markup=False)
    theirs, ours = (each.seconds for each in found.values())
    console.print(f"A step takes {ours / theirs:.2f} of FSDP2's time.", markup=False)
    out.mkdir(parents=True, exist_ok=True)
    write_report({name: read_report(each.trace) for name, each in found.items()}, out)
    told = {name: _prediction_json(each) for name, each in found.items()}
    (out / "compare.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    console.print(f"\n{out / 'compare.json'} and overlap.html", markup=False)


def _predicted_table(found: Mapping[str, ProgramPrediction]) -> ReportTable:
    columns = list(found.values())
    kinds = dict.fromkeys(kind for each in found.values() for kind in each.collectives)
    rows = [
        ("step, ms", *(f"{each.seconds * 1e3:,.1f}" for each in columns)),
        (
            "  as published steps were off",
            *(f"{e.low * 1e3:,.1f} to {e.high * 1e3:,.1f}" for e in columns),
        ),
        ("exposed communication, ms", *(f"{each.exposed * 1e3:,.1f}" for each in columns)),
        ("waiting for the host, ms", *(f"{each.host_bound * 1e3:,.1f}" for each in columns)),
        ("peak memory, GiB", *(f"{each.allocated / _GIB:,.2f}" for each in columns)),
        ("reserved memory, GiB", *(f"{each.reserved / _GIB:,.2f}" for each in columns)),
    ]
    for kind in kinds:
        totals = [each.collectives.get(kind) for each in columns]
        cells = ("none" if t is None else f"{t.nbytes / 1e6:,.1f} in {t.count}" for t in totals)
        rows.append((f"{kind.replace('_', '-')}s, MB", *cells))
    return ReportTable(("", *found), tuple(rows))


def _prediction_json(prediction: ProgramPrediction) -> dict[str, Any]:
    told = {each.name: getattr(prediction, each.name) for each in fields(prediction)}
    del told["trace"]
    told["collectives"] = {kind: asdict(each) for kind, each in told["collectives"].items()}
    return told


def diff_recordings(folders: tuple[Path, Path], json_path: Path | None) -> int:
    """Say where two recorded runs part. Return the exit code."""
    try:
        one, other = (Recording.read(folder) for folder in folders)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(str(error)) from None
    names = ("A", "B") if folders[0].name == folders[1].name else tuple(f.name for f in folders)
    comparison = compare(one, other, (names[0], names[1]))
    _show_losses(comparison)
    print(comparison.text)
    if json_path is not None:
        json_path.write_text(as_json(comparison.to_json()), encoding="utf-8")
    return ALIKE if comparison.unexplained is None else DIFFERENT


def _show_losses(comparison: Comparison) -> None:
    for step, (one, other) in enumerate(comparison.losses):
        for left, right in zip(one, other, strict=False):
            same = "equal" if left == right else f"differs by {abs(left - right):.1e}"
            print(f"step {step}: loss {left:.8g} and {right:.8g}, {same}")
