"""A timeline as rows of colored bars, which the page and the picture both draw."""

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_overlap.tools.profiling.backends import Compute
from fsdp_overlap.tools.profiling.overlap import Collective, RankReport
from fsdp_overlap.tools.profiling.ranges import OPTIMIZER
from fsdp_overlap.tools.profiling.report import Report
from fsdp_overlap.tools.profiling.tables import describe, describe_under

# The kinds of bars and their colors: pale where all is well, striking for what is exposed.
COLORS = {
    "forward": "#9ecae1",
    "backward": "#6baed6",
    "optimizer": "#bcbddc",
    "other compute": "#d9d9d9",
    "hidden": "#a1d99b",
    "exposed": "#d7191c",
}
_LEGEND = {"hidden": "communication, hidden", "exposed": "communication, exposed"}
_ROWS = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "other": "other"}
# Stretches of one unit's compute become one bar if the gaps between them are shorter than this part
# of the picture.
_GAP = 1 / 2000


@dataclass(frozen=True)
class Bar:
    """start, end: milliseconds from the left end. text: shown when the mouse points at the bar.
    has_line: whether a line around it shows it however short it is."""

    row: int
    start: float
    end: float
    what: str
    text: str
    has_line: bool = False


class Kind(NamedTuple):
    """Bars of one color, and their label in the legend."""

    label: str
    color: str
    bars: list[Bar]


@dataclass(frozen=True)
class Drawing:
    """rows: labels from the top down; "" continues the row above. bars: the collectives of one row
    do not overlap, and the bars of a collective's exposed parts come after that of the whole."""

    rows: tuple[str, ...]
    bars: tuple[Bar, ...]

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that have bars, in the order in which they are drawn and in the legend."""
        bars = {what: [bar for bar in self.bars if bar.what == what] for what in COLORS}
        return [
            Kind(_LEGEND.get(what, what), color, bars[what])
            for what, color in COLORS.items()
            if bars[what]
        ]


def draw(reports: Mapping[str, Report]) -> Drawing:
    """Return rows for the compute and each kind of collective of every rank. Each report has one
    clock."""
    rows: list[str] = []
    bars: list[Bar] = []
    for name, report in reports.items():
        starts = [
            rank.window[0] - offset
            for rank, offset in zip(report.ranks, report.clock_offsets, strict=True)
        ]
        for rank, offset in zip(report.ranks, report.clock_offsets, strict=True):
            left = min(starts) + offset
            who = f"{name} · " if len(reports) > 1 else ""
            who += "" if rank.rank is None or len(report.ranks) == 1 else f"rank {rank.rank} · "
            bars += _compute_bars(rank, len(rows), left)
            rows.append(f"{who}compute")
            for kind, label in _ROWS.items():
                same = [c for c in rank.collectives if c.kind == kind]
                levels = _levels(same)
                bars += _collective_bars(same, levels, len(rows), left)
                rows += [f"{who}{label}", *[""] * max(levels)] if same else []
    return Drawing(tuple(rows), tuple(bars))


def _compute_bars(rank: RankReport, row: int, left: float) -> Iterator[Bar]:
    gap = rank.duration * _GAP
    for label, start, end, busy in _joined(rank.compute, gap):
        what = label.split(" ", 1)[0] if label.startswith(("forward ", "backward ")) else label
        what = what if what in ("forward", "backward", OPTIMIZER) else "other compute"
        text = f"<b>{html.escape(label)}</b><br>{_ms(busy)} of compute in {_ms(end - start)}"
        yield Bar(row, (start - left) / 1e3, (end - left) / 1e3, what, text)


def _joined(compute: Iterable[Compute], gap: float) -> Iterator[tuple[str, float, float, float]]:
    """Join neighbors with the same label; yield the label, start, end and time busy of each."""
    current: tuple[str, float, float, float] | None = None
    for c in compute:
        if current is not None and c.label == current[0] and c.start - current[2] <= gap:
            label, start, end, busy = current
            added = max(0.0, c.end - max(c.start, end))
            current = label, start, max(end, c.end), busy + added
            continue
        if current is not None:
            yield current
        current = c.label, c.start, c.end, c.end - c.start
    if current is not None:
        yield current


def _levels(collectives: list[Collective]) -> list[int]:
    """Return a level for each within its row, so that none covers another in flight at the same
    time."""
    ends: list[float] = []
    levels = []
    for c in collectives:
        level = next((k for k, end in enumerate(ends) if end <= c.start), len(ends))
        ends[level : level + 1] = [c.spans[-1][1]]
        levels.append(level)
    return levels


def _collective_bars(
    collectives: list[Collective], levels: list[int], row: int, left: float
) -> Iterator[Bar]:
    for c, level in zip(collectives, levels, strict=True):
        text = _text(c)
        # Between two kernels the hidden ones are exposed too, for too short a time to be seen.
        is_exposed = c.exposed > c.duration / 2
        for what, spans in (("hidden", c.spans), ("exposed", c.exposed_spans)):
            has_line = is_exposed if what == "exposed" else not is_exposed
            for start, end in spans:
                at = (start - left) / 1e3, (end - left) / 1e3
                yield Bar(row + level, *at, what, text, has_line)


def _text(c: Collective) -> str:
    lines = [f"<b>{html.escape(describe(c))}</b>" + (f" in {c.pass_}" if c.pass_ else "")]
    part = f" ({c.exposed / c.duration:.0%})" if c.duration else ""
    lines.append(f"in flight {_ms(c.duration)}, exposed {_ms(c.exposed)}{part}")
    if c.nbytes is not None and c.bandwidth is not None:
        lines.append(f"{c.nbytes / 1e6:.2f} MB, {c.bandwidth / 1e9:.2f} GB/s")
    lines.append(f"ran under {html.escape(describe_under(c))}")
    if c.held_up:
        lines.append(f"held up {html.escape(c.held_up)}")
    lines.append(html.escape(", ".join(c.lanes)))
    return "<br>".join(lines)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms"
