"""Reports of comparisons: tables and sentences for a terminal, JSON and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal

from jinja2 import ChoiceLoader, Environment, PackageLoader

from fsdp_overlap.tools.comparison.differences import Comparison
from fsdp_overlap.tools.comparison.program import RankResult
from fsdp_overlap.tools.profiling import Report, diagnose
from fsdp_overlap.tools.profiling.tables import UNKNOWN, ReportTable

LABELS = {"fsdp2": "FSDP2", "ours": "fsdp_overlap", "replicated": "replicated"}
_MIB = 1 << 20


@dataclass
class Way:
    """What one way of running the program has shown.

    Attributes:
        way: one of :data:`~fsdp_overlap.tools.comparison.program.WAYS`.
        rounds: what each rank has seen, in each round.
        overlap: the report of its traces, if there are any.
    """

    way: str
    rounds: list[list[RankResult]] = field(default_factory=list)
    overlap: Report | None = None

    @property
    def label(self) -> str:
        return LABELS[self.way]

    @property
    def step_seconds(self) -> list[float]:
        """The seconds of each timed step of all rounds, on the rank where it took longest."""
        return [
            max(step)
            for ranks in self.rounds
            for step in zip(*(rank.seconds for rank in ranks), strict=False)
        ]

    @property
    def host_seconds(self) -> list[float]:
        return [
            max(step)
            for ranks in self.rounds
            for step in zip(*(rank.host for rank in ranks), strict=False)
        ]

    @property
    def peak(self) -> int:
        return max(rank.peak for ranks in self.rounds for rank in ranks)

    @property
    def reserved(self) -> int | None:
        found = [r.reserved for ranks in self.rounds for r in ranks if r.reserved is not None]
        return max(found, default=None)

    @property
    def losses(self) -> list[float]:
        """The loss of each step of the first round: a mean over ranks, and over backwards."""
        ranks = [rank.losses for rank in self.rounds[0]]
        steps = []
        for each in zip(*ranks, strict=False):
            values = [value for losses in each for value in losses]
            if values:
                steps.append(sum(values) / len(values))
        return steps

    @property
    def notes(self) -> list[str]:
        """What ranks noted, each once."""
        notes = (note for ranks in self.rounds for rank in ranks for note in rank.notes)
        return list(dict.fromkeys(notes))


@dataclass
class CompareReport:
    """Two or three ways of one program, side by side.

    Attributes:
        program: its command line.
        against: comparisons of what ways computed, each against the first named.
        failures: what could not be run, and what to do.
    """

    program: str
    ways: list[Way]
    against: list[Comparison] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def time_ratio(self) -> float | None:
        """Our median step over FSDP2's, ``None`` if one was not timed."""
        seconds = {way.way: way.step_seconds for way in self.ways}
        if not seconds.get("ours") or not seconds.get("fsdp2"):
            return None
        return median(seconds["ours"]) / median(seconds["fsdp2"])

    @property
    def loss_difference(self) -> float | None:
        """The largest difference between our loss of a step and FSDP2's, relative to it."""
        losses = {way.way: way.losses for way in self.ways if way.rounds}
        pairs = list(zip(losses.get("fsdp2", ()), losses.get("ours", ()), strict=False))
        if not pairs:
            return None
        worst = 0.0
        for theirs, own in pairs:
            if theirs != own:
                difference = abs(own - theirs) / max(abs(theirs), 1e-12)
                worst = max(worst, difference if isfinite(difference) else float("inf"))
        return worst

    @property
    def sentences(self) -> list[str]:
        """The answer, the most important first."""
        said = list(self.failures)
        for comparison in self.against:
            first, second = comparison.names
            said.append(f"{second} beside {first}: {comparison.text}")
        said += self._later_losses()
        if (ratio := self.time_ratio) is not None:
            said.append(f"A step takes {ratio:.2f} of FSDP2's time.")
        for way in self.ways:
            said += [f"{way.label}: {note}." for note in way.notes]
        return said

    def _later_losses(self) -> list[str]:
        """Return what is to be said of the losses of steps that were not recorded."""
        if not self.against or not self.against[0].is_equal:
            return []
        losses = {way.way: way.losses for way in self.ways if way.rounds}
        both = zip(losses.get("fsdp2", ()), losses.get("ours", ()), strict=False)
        unlike = [step for step, (one, other) in enumerate(both) if repr(one) != repr(other)]
        if not unlike:
            return []
        return [
            f"But from step {unlike[0]} on, which was not recorded, losses differ: "
            f"record it by --steps {unlike[0] + 1}."
        ]

    def table(self) -> ReportTable:
        """Return time, memory and communication of a step, a column for each way."""
        ways = [way for way in self.ways if way.rounds]
        rows = [
            ("step, ms", *(_spread(way.step_seconds) for way in ways)),
            ("  main thread's processor time", *(_spread(way.host_seconds) for way in ways)),
            ("exposed communication, ms", *(_of(way, _exposed) for way in ways)),
            ("peak memory, MiB", *(f"{way.peak / _MIB:,.0f}" for way in ways)),
        ]
        if any(way.reserved is not None for way in ways):
            rows.append(("reserved memory, MiB", *(_mib(way.reserved) for way in ways)))
        rows += [
            (f"{label}, MB", *(_of(way, _collectives(label)) for way in ways)) for label in _KINDS
        ]
        losses = [way.losses for way in ways]
        steps = min(map(len, losses), default=0)
        rows += [
            (f"loss of step {step}", *(f"{each[step]:.8g}" for each in losses))
            for step in (sorted({0, steps // 2, steps - 1}) if steps else ())
        ]
        return ReportTable(("", *(way.label for way in ways)), tuple(rows))

    @property
    def dtypes(self) -> str:
        """A table of the dtypes in which our units compute, empty if there is one dtype only."""
        ranks = [way.rounds[0][0] for way in self.ways if way.way == "ours" and way.rounds]
        return "\n".join(line for rank in ranks for line in rank.dtypes)

    def findings(self) -> dict[str, list[str]]:
        """Return which communication is exposed, and why, for each way."""
        return {
            way.label: [finding.text for finding in diagnose(way.overlap)]
            for way in self.ways
            if way.overlap is not None
        }

    def write(self, folder: Path) -> None:
        """Write ``compare.json`` and ``compare.html``."""
        told = {
            "program": self.program,
            "sentences": self.sentences,
            "time_ratio": self.time_ratio,
            "loss_difference": self.loss_difference,
            "ways": {
                way.way: {
                    "step_seconds": way.step_seconds,
                    "host_seconds": way.host_seconds,
                    "peak": way.peak,
                    "reserved": way.reserved,
                    "losses": way.losses,
                    "ranks": [[asdict(rank) for rank in ranks] for ranks in way.rounds],
                }
                for way in self.ways
                if way.rounds
            },
            "against": [comparison.to_json() for comparison in self.against],
            "dtypes": self.dtypes,
            "findings": self.findings(),
            "failures": self.failures,
        }
        (folder / "compare.json").write_text(as_json(told), encoding="utf-8")
        (folder / "compare.html").write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        loader = ChoiceLoader(
            [
                PackageLoader("fsdp_overlap.tools.comparison", "."),
                PackageLoader("fsdp_overlap.tools.profiling", "."),
            ]
        )
        environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
        ways = [way for way in self.ways if way.rounds]
        losses = {way.label: way.losses for way in ways if way.losses}
        seconds = {way.label: way.step_seconds for way in ways if way.step_seconds}
        return environment.get_template("compare.html").render(
            title=self.program,
            sentences=self.sentences,
            table=self.table(),
            pictures=_pictures(losses, seconds),
            dtypes=self.dtypes,
            findings=self.findings(),
            differences=[
                (f"{comparison.names[1]} beside {comparison.names[0]}", comparison)
                for comparison in self.against
            ],
        )


def as_json(told: Any) -> str:
    """Return the text of a JSON file, in which infinity and nan are ``null``."""
    finite = json.loads(json.dumps(told), parse_constant=lambda _: None)
    return json.dumps(finite, indent=1) + "\n"


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return UNKNOWN
    least, most = min(seconds) * 1e3, max(seconds) * 1e3
    return f"{median(seconds) * 1e3:,.1f} ({least:,.1f} to {most:,.1f})"


def _mib(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else f"{nbytes / _MIB:,.0f}"


def _of(way: Way, text: Callable[[Report], str]) -> str:
    return UNKNOWN if way.overlap is None else text(way.overlap)


def _exposed(report: Report) -> str:
    rank = report.slowest
    return f"{rank.exposed_time / rank.steps / 1e3:,.1f}"


_KINDS: dict[str, Literal["all_gather", "reduce_scatter", "other"]] = {
    "all-gathers": "all_gather",
    "reduce-scatters": "reduce_scatter",
    "other collectives": "other",
}


def _collectives(label: str) -> Callable[[Report], str]:
    def text(report: Report) -> str:
        rank = report.slowest
        total = rank.total(_KINDS[label], None)
        if not total.count:
            return "none"
        size = UNKNOWN if total.nbytes is None else f"{total.nbytes / rank.steps / 1e6:,.1f}"
        return f"{size} in {total.count / rank.steps:g}"

    return text


def _pictures(losses: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the losses and the times of steps as pictures, in HTML."""
    import plotly.graph_objects as go  # a third of a second that other commands need not take
    from plotly.subplots import make_subplots

    if not losses and not seconds:
        return ""
    colors = {"FSDP2": "#8a8f98", "fsdp_overlap": "#2f6fde", "replicated": "#d08a1d"}
    dashes = {"FSDP2": "solid", "fsdp_overlap": "dash", "replicated": "dot"}
    figure: Any = make_subplots(1, 2, subplot_titles=("loss of a step", "ms of a step"))
    for label, values in losses.items():
        line = {"color": colors[label], "dash": dashes[label], "width": 3}
        trace = go.Scatter(y=list(values), name=label, mode="lines+markers", line=line)
        figure.add_trace(trace, row=1, col=1)
    for label, values in seconds.items():
        figure.add_trace(
            go.Box(
                y=[value * 1e3 for value in values],
                name=label,
                marker_color=colors[label],
                boxpoints="all",
                showlegend=False,
            ),
            row=1,
            col=2,
        )
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    figure.update_layout(
        template="plotly_white",
        paper_bgcolor="rgba(0, 0, 0, 0)",  # the page's own, light or dark
        plot_bgcolor="rgba(0, 0, 0, 0)",
        height=380,
        margin={"l": 10, "r": 10, "t": 40, "b": 40},
        legend={"orientation": "h", "y": -0.12},
    )
    return str(
        figure.to_html(
            full_html=False,
            include_plotlyjs=True,
            div_id="timeline",
            config={"displayModeBar": False},
        )
    )
