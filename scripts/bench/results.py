"""Write docs/results.md, and the tables of docs/performance.md, from what all.py measured.

    python scripts/bench/all.py --out runs/bench
    python scripts/bench/results.py runs/bench

The figures are kept as docs/performance.json. Without a folder the pages are written from it again.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from harness.benchmarks import BENCHMARKS
from harness.measurement import three_decimals
from harness.summary import SWEPT, Circumstances, Row, lines_of, read_summary, tables_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES, PICTURE = DOCS / "performance.json", DOCS / "step_time.png"
RESULTS, PERFORMANCE = DOCS / "results.md", DOCS / "performance.md"
LEFT_OUT = "FSDP2, our collectives / FSDP2"
"""What is not compared with this library. These figures are in performance.json alone."""
INTRODUCTION = """\
# All results

Written by `scripts/bench/results.py` from [performance.json](performance.json), which
`python scripts/bench/all.py` measures; with a benchmark's name it repeats that one. See
[how it is measured](performance.md#how-it-is-measured).

**All this is of CPUs** ([a GPU](gpu.md#what-has-run)): ranks are processes on one machine, and a
limited loopback is the network.

- **FSDP2**: of the same torch, with the same units, policies and optimizer. On gloo, not on a GPU,
  it waits for each collective; so `link` also trains it with our collectives.
- **DDP**: `torch.nn.parallel.DistributedDataParallel`.
- **Bound** of a step over a link: the larger of compute alone and communication alone.
- **`--sleep`**: blocks sleep instead of computing, as a host that waits for an accelerator. With
  real compute ranks also pay for gloo's threads.
- **Host time**: CPU time, with a fake process group of 8 ranks.
- **Memory**: peak of a rank's resident memory above rest and gradient shards, in blocks of
  parameters.
- **The network**: a network namespace whose loopback `tc` limits
  (`scripts/bench/harness/slow_link.py`), one link for all ranks, with no added latency.
- **Figures** are medians, with 10th and 90th percentile of a ratio in brackets.
"""
AFTER_LINK = """\
![Step time against the speed of the link, ours, FSDP2 and the bound](step_time.png)
"""


@dataclass(frozen=True)
class Headline:
    """A row of docs/performance.md. where: what it was measured on. compared: which ratios of the
    benchmark are shown, by what stands before each."""

    what: str
    benchmark: str
    where: str
    compared: Mapping[str, str]


GPU = (
    "step of a model of 1.2 billion parameters, bfloat16",
    "**0.82**, which is 1.22 times the tokens/s",
    "`scripts/gpu_suite.sh --parts training --out runs/figures`",
    "one H200 as rank 0 of 8 simulated ranks, 147 GB/s",
)
"""The row that docs/gpu.md has the figures of."""
HEADLINES = tuple(
    Headline(**each)
    for each in tomllib.loads((Path(__file__).parent / "headlines.toml").read_text())["headline"]
)


def performance_of(page: str, where: Circumstances, rows: list[Row]) -> str:
    """Return docs/performance.md with its tables written anew."""
    for name, text in (("headlines", headlines(where, rows)), ("missed", missed(rows))):
        begin = f"<!-- {name}: written by scripts/bench/results.py -->\n"
        before, _, rest = page.partition(begin)
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"{PERFORMANCE.name} has no place for {name}: {begin!r}")
        page = f"{before}{begin}\n{text}\n\n{end}{after}"
    return page


def headlines(where: Circumstances, rows: list[Row]) -> str:
    """Return the table of `HEADLINES`, and what all but the first row were measured on."""
    known = {(row.benchmark, row.compared): row for row in rows}
    lines = [GPU]
    for headline in HEADLINES:
        cells = []
        for name, compared in headline.compared.items():
            row = known[headline.benchmark, compared]
            assert row.ratio is not None
            ratio = f"**{three_decimals(row.ratio.median)}**"
            of = name.startswith("of ")
            cells.append(f"{ratio} {name}" if of else f"{name} {ratio}".strip())
        command = f"`python scripts/bench/all.py {headline.benchmark}`"
        lines.append((headline.what, "; ".join(cells), command, headline.where))
    head = ("", "ours / FSDP2", "command", "measured on")
    below = f"{where.cpu}, {where.cores} cores; torch {where.torch}, Python {where.python}."
    return f"{lines_of(head, lines, numbers=False)}\n\nAll rows but the first: {below}"


def missed(rows: list[Row]) -> str:
    """Return a table of all targets that are missed: those of one comparison in one row."""
    with_targets = [row for row in rows if row.is_met is not None]
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in with_targets:
        if row.is_met is False:
            swept = SWEPT.fullmatch(row.compared)
            compared = swept[1] if swept else row.compared
            of_each = found.setdefault((compared, row.target), {})
            of_each.setdefault(row.benchmark, []).append(row.found)
    lines = [
        (compared, target, "; ".join(f"{name} {', '.join(each)}" for name, each in found.items()))
        for (compared, target), found in found.items()
    ]
    count = sum(row.is_met is False for row in with_targets)
    return (
        f"{count} of {len(with_targets)} targets are missed, here by benchmark; several figures of "
        "one are a sweep's.\n\n" + lines_of(("what", "at most", "measured"), lines, numbers=False)
    )


def results_of(where: Circumstances, rows: list[Row]) -> str:
    """Return docs/results.md."""
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
        parts.append(tables_of(found) + "\n")
    return "\n".join(parts)


def is_shown(row: Row) -> bool:
    return bool(row.target) or not row.compared.partition(" at ")[0].endswith(LEFT_OUT)


def main(
    folder: Annotated[
        Path | None, typer.Argument(help="What all.py was given as --out.", exists=True)
    ] = None,
) -> None:
    """Write docs/results.md, and the tables of docs/performance.md, from what all.py measured."""
    if folder is not None:
        if json.loads((folder / "summary.json").read_text())["quick"]:
            raise typer.BadParameter(f"{folder} holds a quick run, whose figures are not for show")
        shutil.copyfile(folder / "summary.json", FIGURES)
        shutil.copyfile(folder / "link_speed.png", PICTURE)
    where, rows = read_summary(FIGURES)
    RESULTS.write_text(results_of(where, rows))
    PERFORMANCE.write_text(performance_of(PERFORMANCE.read_text(), where, rows))


if __name__ == "__main__":
    typer.run(main)
