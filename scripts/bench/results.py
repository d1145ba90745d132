"""Makes docs/performance.md of what all.py found.

    python scripts/bench/all.py --out runs/bench
    python scripts/bench/results.py runs/bench

The figures are kept as docs/performance.json. Without a folder the page is made of these again.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from harness.benchmarks import BENCHMARKS, Benchmark
from harness.markdown import markdown_table
from harness.summary import Circumstances, Row, not_met, read_summary

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES, PAGE, PICTURE = DOCS / "performance.json", DOCS / "performance.md", DOCS / "step_time.png"
HEADER = ("benchmark", "compared", "ours", "other", "ratio (p10-p90)", "at most", "met")
LABELS = 2
INTRODUCTION = """\
# Results

All of this was measured by `python scripts/bench/all.py`, and made into this page by
`scripts/bench/results.py`. [How it is measured](measuring.md) says what is compared, and
[decisions](decisions.md) what was tried.

**No GPU was measured**: processes on the cores of one machine stand for several machines, and a
limited loopback for the network between them.
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
        f"{met} of {len(with_targets)} targets are met. [The others](#targets-that-were-missed) "
        "are at the end.\n",
    ]
    for topic in dict.fromkeys(benchmark.topic for benchmark in BENCHMARKS):
        about = [benchmark for benchmark in BENCHMARKS if benchmark.topic == topic]
        names = {benchmark.name for benchmark in about}
        cells = [row.cells() for row in rows if row.benchmark in names]
        if not cells:
            continue
        parts += [f"## {topic}\n", "\n".join(map(_line_of, about)) + "\n"]
        parts.append(markdown_table(HEADER, cells, LABELS) + "\n")
        if topic == "A slow link":
            parts.append(AFTER_LINK)
    parts.append("## Targets that were missed\n")
    parts.append("\n".join(f"- {line}" for line in not_met(rows)) + "\n")
    return "\n".join(parts)


def _line_of(benchmark: Benchmark) -> str:
    command = shlex.join(["python", *benchmark.command(quick=False)])
    return f"- **{benchmark.name}**: {benchmark.measures}. `{command}`"


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
