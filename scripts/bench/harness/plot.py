"""A picture of what one benchmark measured."""

import textwrap
from collections.abc import Sequence, Set
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, NullFormatter

from harness.measurement import Figure, Measurement, Sweep, number

_COLORS = ("#4477aa", "#ee6677", "#777777", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_LINES_INCHES = 4.2
_ROW_INCHES = 0.32
_CLAIM_INCHES = 0.42


def plot(measurement: Measurement, title: str, path: Path) -> None:
    """Draws the quantities that are compared, have a target or vary along the sweep, each in a
    panel of bars or lines; whiskers and bands are 10th to 90th percentile. Where there are claims,
    those instead. `path` may end in .png or .svg."""
    matplotlib.use("agg")
    panels = _panels(measurement)
    if measurement.claims:
        picture = Picture(figsize=(9, 0.8 + _CLAIM_INCHES * len(measurement.claims)))
        _draw_claims(picture, measurement)
    else:
        heights = [
            _LINES_INCHES if _is_swept(figures) else 0.8 + _ROW_INCHES * len(figures)
            for figures in panels
        ]
        picture = Picture(figsize=(7.5, sum(heights) + 0.5), layout="constrained")
        drawn = picture.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, figures in zip(drawn, panels, strict=True):
            if measurement.sweep is not None and _is_swept(figures):
                _draw_lines(axes, figures, measurement.sweep)
            else:
                _draw_bars(axes, figures, {ratio.of for ratio in measurement.ratios})
    picture.suptitle("\n".join(textwrap.wrap(title, 100)), fontsize=9)
    picture.savefig(path, dpi=150)


def _panels(measurement: Measurement) -> list[list[Figure]]:
    wanted = {ratio.quantity for ratio in measurement.ratios}
    wanted |= {figure.quantity for figure in measurement.figures if figure.at_most is not None}
    if not measurement.ratios:  # else the sweep is of what is compared
        wanted |= {figure.quantity for figure in measurement.figures if figure.at is not None}
    quantities = dict.fromkeys(figure.quantity for figure in measurement.figures)
    return [
        [figure for figure in measurement.figures if figure.quantity == quantity]
        for quantity in quantities
        if quantity in wanted or not wanted
    ]


def _is_swept(figures: Sequence[Figure]) -> bool:
    return any(figure.at is not None for figure in figures)


def _draw_bars(axes: Axes, figures: Sequence[Figure], compared: Set[str]) -> None:
    """`compared`: the systems that ratios are of."""
    for row, figure in enumerate(figures):
        spread = figure.spread
        is_headline = figure.system in compared or figure.at_most is not None
        color = _COLORS[0] if is_headline else _COLORS[2]
        whiskers = [[spread.median - spread.p10], [spread.p90 - spread.median]]
        axes.barh(row, spread.median, xerr=whiskers, color=color, ecolor="black", height=0.7)
        end = max(spread.p90, figure.at_most or 0)
        axes.text(end, row, f"  {number(spread.median)}", va="center", fontsize=8, clip_on=True)
        if figure.at_most is not None:
            axes.plot([figure.at_most] * 2, [row - 0.45, row + 0.45], color="red", lw=1.5)
    axes.set_yticks(range(len(figures)), [figure.system for figure in figures], fontsize=8)
    axes.set_xlim(0, 1.15 * max(max(f.spread.p90, f.at_most or 0) for f in figures) or 1)
    axes.invert_yaxis()
    has_targets = any(figure.at_most is not None for figure in figures)
    axes.set_title(_name(figures[0]) + (" (red: target)" if has_targets else ""), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_lines(axes: Axes, figures: Sequence[Figure], sweep: Sweep) -> None:
    places = sorted({figure.at for figure in figures if figure.at is not None})
    for k, system in enumerate(dict.fromkeys(figure.system for figure in figures)):
        points = sorted(
            (figure.at, figure.spread)
            for figure in figures
            if figure.system == system and figure.at is not None
        )
        if not points:
            continue
        at = [where for where, _ in points]
        spreads = [spread for _, spread in points]
        color = _COLORS[k % len(_COLORS)]
        style = "--" if system == "bound" else "-"
        axes.plot(
            at, [s.median for s in spreads], style, marker="o", ms=4, color=color, label=system
        )
        axes.fill_between(
            at, [s.p10 for s in spreads], [s.p90 for s in spreads], color=color, alpha=0.2, lw=0
        )
    axes.set_xscale("log")
    # Labels that would overlap are left out.
    ticks = [a for a, b in zip(places, [*places[1:], float("inf")], strict=True) if b > 1.15 * a]
    axes.set_xticks(ticks, [number(place) for place in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    if sweep.log_y:
        axes.set_yscale("log")
        plain = FuncFormatter(lambda value, _: number(value))
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(plain)
        axes.tick_params(axis="y", which="minor", labelsize=7)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(sweep.name)
    axes.set_ylabel(_name(figures[0]))
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)


def _draw_claims(picture: Picture, measurement: Measurement) -> None:
    for k, claim in enumerate(measurement.claims):
        height = 1 - (k + 1.5) / (len(measurement.claims) + 2)
        mark, color = ("holds", "#228833") if claim.holds else ("broken", "#cc3311")
        picture.text(0.02, height, mark, color=color, fontsize=9, weight="bold", va="center")
        text = textwrap.fill(f"{claim.text}: {claim.found}", 120)
        picture.text(0.12, height, text, fontsize=8, va="center")


def _name(figure: Figure) -> str:
    return f"{figure.quantity}, {figure.unit}" if figure.unit else figure.quantity
