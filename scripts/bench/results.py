"""Make docs/performance.md of what all.py found.

    python scripts/bench/all.py --out runs/bench
    python scripts/bench/results.py runs/bench

The figures are kept as docs/performance.json. Without a folder the page is made of these again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from harness.benchmarks import BENCHMARKS, Benchmark
from harness.markdown import markdown_table
from harness.summary import Circumstances, Row, read_summary

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES, PAGE, PICTURE = DOCS / "performance.json", DOCS / "performance.md", DOCS / "step_time.png"
HEADER = ("benchmark", "compared", "ours, other", "ratio (p10-p90)", "at most")
LABELS = 2
LEFT_OUT = (" bare / FSDP2", "FSDP2, our collectives / FSDP2")
"""What is not compared with this library. These figures are in performance.json alone."""
INTRODUCTION = """\
# Results

`scripts/bench/results.py` makes this page from [performance.json](performance.json), which
`python scripts/bench/all.py` measures; with a benchmark's name it repeats that one. See
[how it is measured](measuring.md).

**No GPU was measured**: ranks are processes on one machine, and a limited loopback is the network.
"""
AFTER_LINK = """\
![Step time against the speed of the link, ours, FSDP2 and the bound](step_time.png)
"""


def page_of(where: Circumstances, rows: list[Row]) -> str:
    """The page in Markdown."""
    with_targets = [row for row in rows if row.is_met is not None]
    met = sum(row.is_met is True for row in with_targets)
    parts = [
        INTRODUCTION,
        f"Measured on: {where}.\n",
        f"{met} of {len(with_targets)} targets are met; the others are marked.\n",
    ]
    for topic in dict.fromkeys(benchmark.topic for benchmark in BENCHMARKS):
        about = [benchmark for benchmark in BENCHMARKS if benchmark.topic == topic]
        names = {benchmark.name for benchmark in about}
        cells = _cells_of([row for row in rows if row.benchmark in names and is_shown(row)])
        if not cells:
            continue
        parts += [f"## {topic}\n", "\n".join(map(_line_of, about)) + "\n"]
        parts.append(markdown_table(HEADER, cells, LABELS) + "\n")
        if topic == "A slow link":
            parts.append(AFTER_LINK)
    return "\n".join(parts)


def is_shown(row: Row) -> bool:
    return bool(row.target) or not row.compared.partition(" at ")[0].endswith(LEFT_OUT)


def _cells_of(rows: list[Row]) -> list[tuple[str, ...]]:
    """The cells of a topic's table. A benchmark is named in its first row."""
    cells = []
    last = ""
    for row in rows:
        name, compared, ours, other, ratio, target, met = row.cells()
        missed = ", missed" if met == "no" else ""
        cells.append(
            ("" if name == last else name, compared, _both(ours, other), ratio, target + missed)
        )
        last = name
    return cells


def _both(ours: str, other: str) -> str:
    """``ours`` and ``other``, with one unit if they have the same."""
    value, _, unit = ours.partition(" ")
    if unit and other.endswith(f" {unit}"):
        return f"{value}, {other}"
    return ", ".join(filter(None, (ours, other)))


def _line_of(benchmark: Benchmark) -> str:
    return f"- **{benchmark.name}**: {benchmark.measures}."


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
