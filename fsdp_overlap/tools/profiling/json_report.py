"""The report as JSON."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_overlap.tools.profiling.diagnosis import diagnose
from fsdp_overlap.tools.profiling.overlap import Collective, RankReport
from fsdp_overlap.tools.profiling.report import ROWS, Report

_OPS = 20


def write_json(reports: Mapping[str, Report], path: str | os.PathLike[str]) -> None:
    """Write the reports, by name: all that the page shows, and every collective. Times are in
    microseconds, bandwidths in bytes a second. `per_step` and `cost` are for one step, all else is
    for all steps."""
    runs = {name: _run(report) for name, report in reports.items()}
    Path(path).write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


def _run(report: Report) -> dict[str, Any]:
    return {
        "findings": [asdict(finding) for finding in diagnose(report)],
        "slowest_rank": report.slowest.rank,
        "ranks": [
            _rank(rank, waits)
            for rank, waits in zip(report.ranks, report.waits_for_ranks, strict=True)
        ],
    }


def _rank(rank: RankReport, waits: float | None) -> dict[str, Any]:
    times = {
        "step": rank.duration,
        "compute": rank.compute_time,
        "gemms": rank.gemm_time,
        "communication": rank.communication_time,
        "exposed": rank.exposed_time,
        "waiting_for_ranks": waits,
        "issuing": rank.engine_time,
        "idle": rank.idle_time,
        "bound": rank.bound,
    }
    return {
        "rank": rank.rank,
        "world_size": rank.world_size,
        "steps": rank.steps,
        "per_step": {k: None if v is None else v / rank.steps for k, v in times.items()},
        "totals": {
            label: asdict(total) | {"hidden": total.hidden, "bandwidth": total.bandwidth}
            for label, kind, pass_ in ROWS
            for total in [rank.total(kind, pass_)]
        },
        "compute_by_op": dict(rank.compute_by_op()[:_OPS]),
        "unknown_kernels": dict(rank.unknown_kernels),
        "other_devices": dict(rank.other_devices),
        "left_out": rank.left_out,
        "collectives": [_collective(c, rank) for c in rank.collectives],
    }


def _collective(c: Collective, rank: RankReport) -> dict[str, Any]:
    start = rank.window[0]
    fields = asdict(c) | {
        "start": c.start - start,
        "duration": c.duration,
        "exposed": c.exposed,
        "ran_under_compute": c.ran_under_compute,
        "bandwidth": c.bandwidth,
        "under": dict(c.under),
        "spans": [(a - start, b - start) for a, b in c.spans],
        "exposed_spans": [(a - start, b - start) for a, b in c.exposed_spans],
    }
    return {key.rstrip("_"): value for key, value in fields.items()}
