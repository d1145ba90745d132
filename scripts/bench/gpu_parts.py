"""What `gpu_suite.py` measures under simulated ranks, each part in a process of its own.

Every part takes the type of a device and a function. It joins simulated ranks, and calls the
function with what it has found as often as that grows: its figures, a page of Markdown about them,
and a line about what is new. So a part that does not finish leaves what it had.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import llama
from fsdp_overlap.tools.profiling import Report, assert_overlapped, read_report
from fsdp_overlap.tools.profiling.report import ROWS
from fsdp_overlap.tools.profiling.tables import ReportTable, kinds_table, ranks_table
from harness import output, simulated_ranks, turns
from harness.markdown import markdown_table
from harness.measurement import Measurement, Sweep
from harness.runner import Results
from harness.simulated_training import (
    FSDP2,
    OURS,
    SCALES,
    UNSHARDED,
    Bench,
    Scale,
    make_step,
    own_range,
    units_of,
)
from memory import samplers

TOLERANCE = 3e-2
"""Of a loss, and of a gradient as a part of the parameter's largest: what kernels that add in
another order may do in bfloat16."""
FIRST = "ours, the first step of a model"


class Outcome(NamedTuple):
    """figures: anything JSON can hold. page: the same in Markdown. said: what is new, in a line."""

    figures: dict[str, Any]
    page: str
    said: str = ""


Tell = Callable[[Outcome], None]


WAITING = (32, 1)
"""Blocks of a collective's kernel that stay on the GPU until it ends: as many as NCCL's do, or
one."""


def errors_of(bench: Bench, name: str) -> tuple[float, float]:
    """Of the loss, relative, and of the worst gradient, as a part of the parameter's largest."""
    model, twin = bench.models[name], bench.models[UNSHARDED]
    bench.give_true_weights(name)
    losses = []
    for each in (model, twin):
        for _ in range(2):
            loss = each(bench.batch).float().square().mean()
            loss.backward()
        losses.append(loss.item())
    worst = 0.0
    for parameter, same in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None
        assert same.grad is not None
        off = parameter.grad.to_local().flatten() - own_range(parameter, same.grad).float()
        if off.numel():
            worst = max(worst, (off.abs().max() / same.grad.abs().max()).item())
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
    return abs(losses[0] / losses[1] - 1), worst


def assert_parity(name: str, loss: float, gradient: float) -> None:
    """Of the errors of a system."""
    for what, found in (("the loss", loss), ("a gradient", gradient)):
        # Not the other way round, which NaN would pass.
        assert found <= TOLERANCE, f"{name}: {what} is off by {found:.1e}, at most {TOLERANCE}"


def memory(device: str, tell: Tell) -> None:
    """How far a step's memory peaks above rest and gradient shards, in blocks of parameters."""
    scale = SCALES[device]
    simulated_ranks.start(device, scale.world_size)
    mesh = init_device_mesh(device, (scale.world_size,))
    blocks, width = scale.memory_blocks, scale.memory_width
    with turns.quiet_gc():
        samples = turns.alternate(samplers(mesh, blocks, width), scale.rounds, warmup=3)
    what = (
        "the caching allocator's own count"
        if device == "cuda"
        else "on a CPU the process's resident memory, which says little of blocks this small"
    )
    results = Results(
        f"{blocks} blocks of width {width} in float32, {scale.world_size} simulated "
        f"ranks; the peak of a step above rest and gradient shards, in blocks' parameters; {what}"
    )
    results.add("peak", "blocks", samples, at_most=BOUNDS)
    tell(outcome_of([measured(results)]))
    if device == "cuda":
        assert_within_bounds(samples)


BOUNDS = {"ours, prefetch 0": 3.1, "ours, prefetch 1": 4.2}
"""Blocks, where the host runs ahead. With prefetch these are two full buffers, two reduce inputs,
and the largest gradient, which autograd makes."""


def assert_within_bounds(samples: Mapping[str, Sequence[float]]) -> None:
    """No step of ours takes more blocks than it may."""
    for name, most in BOUNDS.items():
        found = max(samples[name])
        assert found <= most, f"{name}: a step takes {found:.2f} blocks, at most {most}"


def overlap(device: str, tell: Tell) -> None:
    """What is exposed in a profile of a few steps, and of a first one, as the library's own report
    says."""
    scale = SCALES[device]
    bench = Bench.start(scale, device)
    bench.limit(scale.profiled, bench.sent_by(OURS), bench.compute_alone())
    found = "" if device == "cuda" else ", of which a CPU's trace shows none"
    reports: dict[str, Report] = {}

    def report(name: str, step: Callable[[], object], steps: int) -> None:
        reports[name] = profiled(bench, step, steps)
        tables = "\n\n".join(map(_markdown, (ranks_table(reports), kinds_table(reports))))
        page = (
            f"Communication alone takes {scale.profiled} of compute alone, at "
            f"{bench.link.gigabytes_per_s:.3g} GB/s. The report knows collectives by NCCL's kernels"
            f"{found}. One block of a collective's kernel waits for its end, or as many as are "
            f"named.\n\n{tables}"
        )
        figures = {name: per_step(report) for name, report in reports.items()}
        said = f"{name}: exposed {figures[name]['exposed_ms']:.3g} ms"
        tell(Outcome({"gigabytes_per_s": bench.link.gigabytes_per_s, **figures}, page, said))

    for blocks in WAITING:
        bench.link.waiting_blocks = blocks
        for name in (OURS, FSDP2):
            step = bench.steps()[name]
            for _ in range(3):
                step()
            report(waiting(name, blocks), step, scale.steps)
    first = bench.new_ours()
    report(FIRST, make_step(first, bench.batch), 1)
    assert_is_first_step(first)
    if device == "cuda":
        assert_hidden(reports, scale.blocks)


def waiting(name: str, blocks: int) -> str:
    return name if blocks == 1 else f"{name}, {blocks} waiting blocks"


def profiled(bench: Bench, step: Callable[[], object], steps: int) -> Report:
    activities = [ProfilerActivity.CPU]
    if bench.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    bench.synchronize()
    with turns.quiet_gc(), profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        bench.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return read_report(trace, steps=steps)


def assert_is_first_step(model: nn.Module) -> None:
    """In which each all-gather but the first was issued ahead, as units are registered."""
    units = units_of(model)
    stats = units[0].context.stats
    gathered = sum(bool(unit.param_groups) for unit in units)
    # Backward gathers all but the two units that were kept, and finds one of them.
    assert stats.prefetch_misses == 1, stats
    assert stats.prefetch_hits <= 2 * gathered - 2, stats


def assert_hidden(reports: Mapping[str, Report], blocks: int) -> None:
    """All of ours runs under compute that can: not the root's and the first block's gathers, before
    which nothing computes, nor the last two reductions. In a first backward too. In a first forward
    the host allocates, and is not ahead yet."""
    assert_overlapped(reports[OURS], all_gathers=blocks - 1, reduce_scatters=blocks - 1)
    assert_overlapped(reports[FIRST], backward_all_gathers=blocks - 1, reduce_scatters=blocks - 1)


def per_step(report: Report) -> dict[str, Any]:
    """Milliseconds a step, and how many of a step's collectives ran under compute."""
    rank = report.slowest
    ms = 1e3 * rank.steps
    figures: dict[str, Any] = {
        "step_ms": rank.duration / ms,
        "compute_ms": rank.compute_time / ms,
        "communication_ms": rank.communication_time / ms,
        "exposed_ms": rank.exposed_time / ms,
    }
    for label, kind, pass_ in ROWS:
        total = rank.total(kind, pass_)
        figures[label] = {
            "count": total.count / rank.steps,
            "under_compute": total.under_compute / rank.steps,
            "in_flight_ms": total.duration / ms,
            "exposed_ms": total.exposed / ms,
        }
    return figures


def _markdown(table: ReportTable) -> str:
    return markdown_table(table.header, table.rows)


def speed(device: str, tell: Tell) -> None:
    """Step times against the larger of compute alone and communication alone."""
    scale = SCALES[device]
    bench = Bench.start(scale, device)
    for name in (OURS, FSDP2):
        assert_parity(name, *errors_of(bench, name))
    compute = bench.compute_alone()
    sent = {name: bench.sent_by(name) for name in (OURS, FSDP2)}
    bytes_sent = {name: sum(t.nbytes for t in found) for name, found in sent.items()}
    # The fewer bytes: no system can do with less time.
    least = sent[min(bytes_sent, key=bytes_sent.__getitem__)]
    runs: dict[str, Callable[[], object]] = {**bench.steps(), "sending": bench.replay(least)}
    systems = {name: bench.timed(run, scale.steps) for name, run in runs.items()}
    rounds = rounds_within(60 / len(WAITING), scale, compute / 1e3)
    page = (
        f"{scale.blocks} Llama-like blocks of width {scale.width}, {scale.tokens} tokens, "
        f"{scale.world_size} simulated ranks, bfloat16 with float32 reduction; a step is forward, "
        f"backward and zero_grad. Medians of {rounds} alternating rounds. The "
        "bound is the larger of compute (the unsharded model) and sending (the same transfers with "
        "no compute). A rank receives and sends "
    )
    page += ", ".join(f"{n / 1e9:.3g} GB a step ({name})" for name, n in bytes_sent.items())
    done: dict[int, Measurement] = {}
    for blocks in WAITING:
        bench.link.waiting_blocks = blocks
        about = f"{blocks} waiting blocks"
        results = Results(f"{about}: {page}", Sweep("sending was to be, of compute"))
        for ratio in scale.ratios:
            bench.limit(ratio, least, compute)
            with turns.quiet_gc():
                samples = turns.alternate(systems, rounds, scale.warmup)
            medians = {name: statistics.median(found) for name, found in samples.items()}
            bound = max((UNSHARDED, "sending"), key=medians.__getitem__)
            samples["bound"] = samples[bound]
            compared = (OURS, "bound"), (FSDP2, "bound"), (OURS, FSDP2)
            results.add("step", "ms", samples, *compared, at=ratio)
            speeds = {"measured": [min(bytes_sent.values()) / medians["sending"] / 1e6]}
            if bench.link.gigabytes_per_s is not None:
                speeds["asked"] = [bench.link.gigabytes_per_s]
            results.add("link", "GB/s", speeds, at=ratio)
            done[blocks] = measured(results)
            said = ", ".join(f"{n} {v:.4g} ms" for n, v in medians.items())
            tell(outcome_of(done.values(), f"{about}, {ratio:g}: {said}"))


def measured(results: Results) -> Measurement:
    return results.measurement(argparse.Namespace())


def outcome_of(found: Iterable[Measurement], said: str = "") -> Outcome:
    """Measurements, and a page of their tables and of what they compare."""
    shown = [part for one in found for part in (one.about, *output.tables(one), *output.lines(one))]
    return Outcome({"measurements": [asdict(one) for one in found]}, "\n\n".join(shown), said)


def training(device: str, tell: Tell) -> None:
    """Whole steps of a Llama-like model, of all systems; and of large matrices, stepped by Muon."""
    prefix = "" if device == "cuda" else "tiny "
    done: list[Measurement] = []
    of_muon = [name for name in llama.SYSTEMS if "Muon" in name]
    for model, systems in (("1b" if not prefix else "tiny", []), (f"{prefix}matrices", of_muon)):
        turns_of = "--rounds 1 --steps 2" if prefix else "--rounds 2 --steps 4"
        options = f"--device {device} {turns_of} --model".split()
        chosen = ["--systems", *systems] if systems else []
        args = llama.parse([*options, model, *chosen])

        def told(measurement: Measurement, said: str, model: str = model) -> None:
            tell(outcome_of([*done, measurement], f"{model}, {said}"))

        whole = llama.measured(args, told)
        told(whole, "done")
        done.append(whole)
        dist.destroy_process_group()


def rounds_within(seconds: float, scale: Scale, compute: float) -> int:
    """How many rounds of all ratios fit, at least 3, where a step computes for so many seconds: on
    slower GPUs fewer than the scale's."""
    # Compute, sending, and two systems that hide at least a half of the shorter.
    steps = sum(1 + ratio + 2 * max(1 + ratio / 2, ratio + 0.5) for ratio in scale.ratios)
    fitting = seconds / (steps * scale.steps * compute) - scale.warmup
    return max(3, min(scale.rounds, int(fitting)))
