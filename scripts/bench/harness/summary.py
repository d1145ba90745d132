"""The headline figures of many benchmarks, and their tables."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path

import torch

from fsdp_overlap.tools.cli.process_group import cores
from harness.measurement import Figure, Measurement, Spread, interval, number, three_decimals

_HEADER = ("ours, other", "ratio (p10-p90)", "at most")
_HOW = (
    "Medians over rounds in which systems take turns; a ratio is the median of the ratios round by "
    "round."
)
SWEPT = re.compile(r"(.+) at ([\d.]+) \((.+)\)")
"""What a row of a sweep compares: what, where, and along which axis."""


@dataclass(frozen=True)
class Row:
    """A headline figure. ours, other: medians in `unit`. target: in words, with a unit where it is
    of `ours` itself and not of `ratio`. found: what the target is for, in words; "" for a claim.
    is_met: None where there is no target. failure: why there is no figure."""

    benchmark: str
    compared: str
    command: str
    unit: str = ""
    ours: float | None = None
    other: float | None = None
    ratio: Spread | None = None
    target: str = ""
    found: str = ""
    is_met: bool | None = None
    failure: str = ""

    def medians(self) -> str:
        """Ours and the other's, with one unit."""
        values = (self.ours, self.other)
        found = ", ".join(number(value) for value in values if value is not None)
        return _of_unit(found, self.unit)

    def spread(self) -> str:
        """The ratio."""
        if self.ratio is None:
            return ""
        spread = interval(self.ratio, three_decimals)
        return three_decimals(self.ratio.median) + (f" ({spread})" if spread else "")


@dataclass(frozen=True)
class Circumstances:
    """Where and when it was measured. commit: None where git does not tell."""

    cpu: str
    cores: int
    torch: str
    python: str
    date: str
    commit: str | None
    quick: bool

    @classmethod
    def here(cls, repository: Path, quick: bool) -> Circumstances:
        return cls(
            _cpu_model(),
            cores(),
            torch.__version__,
            platform.python_version(),
            datetime.now().isoformat(" ", "minutes"),
            _commit(repository),
            quick,
        )

    def __str__(self) -> str:
        quick = "a quick run, for smoke and not for figures; " if self.quick else ""
        commit = f", commit {self.commit}" if self.commit else ""
        return (
            f"{quick}{self.cpu}, {self.cores} cores; torch {self.torch}, Python {self.python}; "
            f"{self.date}{commit}"
        )


def rows_of(benchmark: str, measurement: Measurement) -> list[Row]:
    """One for each ratio, each figure with a target that no ratio is of, and each claim."""
    command = shlex.join(["python", *measurement.argv])
    rows: list[Row] = []
    told = set()
    for ratio in measurement.ratios:
        ours = measurement.figure(ratio.quantity, ratio.of, ratio.at)
        other = measurement.figure(ratio.quantity, ratio.to, ratio.at)
        target = found = ""
        is_met = ratio.is_met
        if ratio.at_most is not None:
            target, found = f"{ratio.at_most:g}", three_decimals(ratio.spread.median)
        elif ours.at_most is not None:
            target, found = _of_unit(f"{ours.at_most:g}", ours.unit), _found(ours)
            is_met = ours.is_met
            told.add(ours)
        where = _where(measurement, ratio.at)
        rows.append(
            Row(
                benchmark,
                f"{ratio.quantity}: {ratio.of} / {ratio.to}{where}",
                command,
                ours.unit,
                ours.spread.median,
                other.spread.median,
                ratio.spread,
                target,
                found,
                is_met,
            )
        )
    rows.extend(
        Row(
            benchmark,
            f"{figure.quantity}: {figure.system}{_where(measurement, figure.at)}",
            command,
            figure.unit,
            figure.spread.median,
            target=_of_unit(f"{figure.at_most:g}", figure.unit),
            found=_found(figure),
            is_met=figure.is_met,
        )
        for figure in measurement.figures
        if figure.at_most is not None and figure not in told
    )
    for claim in measurement.claims:
        text = f"{claim.text}: {claim.found}"
        rows.append(Row(benchmark, text, command, target="must hold", is_met=claim.holds))
    return rows


def write_summary(rows: Sequence[Row], where: Circumstances, folder: Path) -> None:
    """summary.json and summary.md in `folder`."""
    record = {**asdict(where), "rows": [asdict(row) for row in rows]}
    (folder / "summary.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / "summary.md").write_text(page_of(rows, where))


def page_of(rows: Sequence[Row], where: Circumstances) -> str:
    """The tables of each benchmark, and what was not met."""
    parts = [f"{where}.", _HOW]
    for name, found in groupby(rows, lambda row: row.benchmark):
        of_one = list(found)
        parts += filter(None, (f"**{name}**: `{of_one[0].command}`", tables_of(of_one)))
    missed = "\n".join(f"- {line}" for line in not_met(rows)) or "Nothing: all targets are met."
    return "\n\n".join([*parts, "## Not met", missed]) + "\n"


def tables_of(rows: Sequence[Row]) -> str:
    """Return the tables of a benchmark's figures, and a list of its claims."""
    claims = [row for row in rows if not row.unit and row.target == "must hold"]
    figures = [row for row in rows if row not in claims and not row.failure]
    parts = [_table_of(figures)] if figures else []
    if claims:
        parts.append("\n".join(f"- {row.compared}{_missed(row)}" for row in claims))
    return "\n\n".join(parts)


def _table_of(rows: list[Row]) -> str:
    """Return the table of a benchmark, or one for each quantity, in the head, if these are long."""
    if all(SWEPT.fullmatch(row.compared) for row in rows):
        return _sweep_of(rows)
    of_quantity: dict[str, list[Row]] = {}
    for row in rows:
        of_quantity.setdefault(row.compared.partition(": ")[0], []).append(row)
    if len(of_quantity) > 1 and len(rows) < 4 * len(of_quantity):
        of_quantity = {"": rows}  # tables of less than four rows are hard to read
    tables = []
    for quantity, alike in of_quantity.items():
        lines = []
        for row in alike:
            compared = row.compared.removeprefix(f"{quantity}: ")
            lines.append((compared, row.medians(), row.spread(), row.target + _missed(row)))
        tables.append(lines_of((quantity, *_HEADER), lines))
    return "\n\n".join(tables)


def _sweep_of(rows: list[Row]) -> str:
    """Return a table of ratios with a column for each point of the sweep."""
    points: dict[str, None] = {}
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        match = SWEPT.fullmatch(row.compared)
        assert match
        compared, point, axis = match.groups()
        points[point] = None
        ratio = three_decimals(row.ratio.median) if row.ratio else row.medians()
        sign = {True: " ≤ ", False: " > ", None: ""}[row.is_met]
        lines.setdefault(compared, {})[point] = f"{ratio}{sign}{row.target}"
    head = (f"by {axis}", *points)
    cells = [(name, *(line.get(point, "") for point in points)) for name, line in lines.items()]
    return lines_of(head, cells)


def lines_of(head: Sequence[str], lines: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Return a table whose columns but the first are ``numbers``, or text."""
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (head, *lines))
    rule = "|---:" if numbers else "|---"
    return "\n".join([first, "|---" + rule * (len(head) - 1) + "|", *rest])


def _missed(row: Row) -> str:
    return ", missed" if row.is_met is False else ""


def read_summary(path: Path) -> tuple[Circumstances, list[Row]]:
    """What `write_summary` wrote as summary.json."""
    record = json.loads(path.read_text())
    rows = [
        Row(**{**row, "ratio": None if row["ratio"] is None else Spread(**row["ratio"])})
        for row in record.pop("rows")
    ]
    return Circumstances(**record), rows


def not_met(rows: Sequence[Row]) -> list[str]:
    """A line for each target that was missed, each claim that does not hold, and each benchmark
    that measured nothing."""
    lines = []
    for row in rows:
        if row.failure:
            lines.append(f"{row.benchmark}: not measured: {row.failure}")
        elif row.is_met is False:
            found = f": {row.found}, at most {row.target}" if row.found else ""
            lines.append(f"{row.benchmark}: {row.compared}{found}")
    return lines


def _where(measurement: Measurement, at: float | None) -> str:
    if at is None or measurement.sweep is None:
        return ""
    return f" at {number(at)} ({measurement.sweep.name})"


def _of_unit(value: str, unit: str) -> str:
    return f"{value} {unit}".rstrip()


def _found(figure: Figure) -> str:
    return _of_unit(number(figure.spread.median), figure.unit)


def _cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _commit(repository: Path) -> str | None:
    """The commit that is checked out, with a word where files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
