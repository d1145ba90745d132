"""A picture of what one benchmark measured."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, NullFormatter

from harness.measurement import Figure, Measurement, Sweep, number

_COLORS = ("#4477aa", "#ee6677", "#777777", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def plot(measurement: Measurement, title: str, path: Path) -> None:
    """Draws the first quantity that is compared, along the sweep, as lines with bands from 10th to
    90th percentile. `path` may end in .png or .svg. Does nothing without a sweep."""
    figures = [figure for figure in measurement.figures if figure.at is not None]
    if measurement.sweep is None or not figures:
        return
    compared = (measurement.ratios[0] if measurement.ratios else figures[0]).quantity
    figures = [figure for figure in figures if figure.quantity == compared]
    matplotlib.use("agg")
    picture = Picture(figsize=(7.5, 4.7), layout="constrained")
    _draw_lines(picture.subplots(), figures, measurement.sweep)
    picture.suptitle("\n".join(textwrap.wrap(title, 100)), fontsize=9)
    picture.savefig(path, dpi=150)


def _draw_lines(axes: Axes, figures: Sequence[Figure], sweep: Sweep) -> None:
    places = sorted({figure.at for figure in figures if figure.at is not None})
    for k, system in enumerate(dict.fromkeys(figure.system for figure in figures)):
        points = sorted(
            (figure.at, figure.spread)
            for figure in figures
            if figure.system == system and figure.at is not None
        )
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
    axes.set_ylabel(", ".join(filter(None, (figures[0].quantity, figures[0].unit))))
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
