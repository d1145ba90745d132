"""Make docs/performance.md of what all.py found.

    python scripts/bench/all.py --out runs/bench
    python scripts/bench/results.py runs/bench

The figures are kept as docs/performance.json. Without a folder the page is made of these again.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness.benchmarks import BENCHMARKS
from harness.measurement import three_decimals
from harness.summary import Circumstances, Row, read_summary

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES, PAGE, PICTURE = DOCS / "performance.json", DOCS / "performance.md", DOCS / "step_time.png"
HEADER = ("ours, other", "ratio (p10-p90)", "at most")
MISSED = ", missed"
SWEPT = re.compile(r"(.+) at ([\d.]+) \((.+)\)")
"""What a row of a sweep compares: what, where, and along which axis."""
LEFT_OUT = (" bare / FSDP2", "FSDP2, our collectives / FSDP2")
"""What is not compared with this library. These figures are in performance.json alone."""
INTRODUCTION = """\
# Results

`scripts/bench/results.py` makes this page from [performance.json](performance.json), which
`python scripts/bench/all.py` measures; with a benchmark's name it repeats that one. See
[how it is measured](measuring.md).

**All this is of CPUs** ([a GPU](gpu.md#what-has-run)): ranks are processes on one machine, and a
limited loopback is the network.
"""
AFTER_LINK = """\
![Step time against the speed of the link, ours, FSDP2 and the bound](step_time.png)
"""


def page_of(where: Circumstances, rows: list[Row]) -> str:
    """Return the page in Markdown."""
    with_targets = [row for row in rows if row.is_met is not None]
    met = sum(row.is_met is True for row in with_targets)
    parts = [
        INTRODUCTION,
        f"Measured on: {where}.\n",
        f'{met} of {len(with_targets)} targets are met; the others are marked, in sweeps by ">".\n',
    ]
    topic = ""
    for benchmark in BENCHMARKS:
        found = [row for row in rows if row.benchmark == benchmark.name and is_shown(row)]
        if not found:
            continue
        if benchmark.topic != topic:
            if topic == "A slow link":
                parts.append(AFTER_LINK)
            topic = benchmark.topic
            parts.append(f"## {topic}\n")
        parts.append(f"**{benchmark.name}**: {benchmark.measures}.\n")
        claims = [row for row in found if not row.unit and row.target == "must hold"]
        if figures := [row for row in found if row not in claims]:
            parts.append(_table_of(figures) + "\n")
        if claims:
            parts.append("\n".join(f"- {row.compared}{_missed(row)}" for row in claims) + "\n")
    return "\n".join(parts)


def is_shown(row: Row) -> bool:
    return bool(row.target) or not row.compared.partition(" at ")[0].endswith(LEFT_OUT)


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
            _, compared, ours, other, ratio, target, _ = row.cells()
            compared = compared.removeprefix(f"{quantity}: ")
            lines.append((compared, _both(ours, other), ratio, target + _missed(row)))
        tables.append(_lines_of((quantity, *HEADER), lines))
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
        ratio = three_decimals(row.ratio.median) if row.ratio else row.cells()[1]
        sign = {True: " ≤ ", False: " > ", None: ""}[row.is_met]
        lines.setdefault(compared, {})[point] = f"{ratio}{sign}{row.target}"
    head = (f"by {axis}", *points)
    return _lines_of(head, [(name, *line.values()) for name, line in lines.items()])


def _lines_of(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (head, *lines))
    return "\n".join([first, "|---" + "|---:" * (len(head) - 1) + "|", *rest])


def _missed(row: Row) -> str:
    return MISSED if row.is_met is False else ""


def _both(ours: str, other: str) -> str:
    """``ours`` and ``other``, with one unit if they have the same."""
    value, _, unit = ours.partition(" ")
    if unit and other.endswith(f" {unit}"):
        return f"{value}, {other}"
    return ", ".join(filter(None, (ours, other)))


def main(
    folder: Annotated[
        Path | None, typer.Argument(help="What all.py was given as --out.", exists=True)
    ] = None,
) -> None:
    """Make docs/performance.md of what all.py found."""
    if folder is not None:
        if json.loads((folder / "summary.json").read_text())["quick"]:
            raise typer.BadParameter(f"{folder} holds a quick run, whose figures are not for show")
        shutil.copyfile(folder / "summary.json", FIGURES)
        shutil.copyfile(folder / "link_speed.png", PICTURE)
    PAGE.write_text(page_of(*read_summary(FIGURES)))


if __name__ == "__main__":
    typer.run(main)
