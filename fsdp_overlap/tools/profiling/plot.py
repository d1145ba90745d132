"""The timeline as a PNG. Needs matplotlib."""

import os
from collections.abc import Mapping

from fsdp_overlap.tools.profiling.drawing import Bar, draw
from fsdp_overlap.tools.profiling.report import Report

_INCHES_PER_ROW = 0.3


def write_png(reports: Mapping[str, Report], path: str | os.PathLike[str]) -> None:
    """Draw the timelines of the reports, by name, one below the other."""
    # Takes half a second, which a program that draws at its end, if at all, need not take at its
    # start.
    import matplotlib
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawing = draw(reports)
    rows = len(drawing.rows)
    matplotlib.use("agg")
    figure = Figure(figsize=(12, 1.4 + _INCHES_PER_ROW * rows), layout="constrained")
    axes = figure.subplots()
    for kind in drawing.kinds:
        axes.add_collection(
            PolyCollection(
                [_corners(bar) for bar in kind.bars],
                color=kind.color,
                linewidths=[0.8 if bar.has_line else 0.0 for bar in kind.bars],
            )
        )
    axes.autoscale_view()
    axes.set_yticks(range(rows), drawing.rows)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlabel("ms")
    axes.margins(x=0.005)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=kind.color, label=kind.label) for kind in drawing.kinds]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)


def _corners(bar: Bar) -> list[tuple[float, float]]:
    top, bottom = bar.row - 0.4, bar.row + 0.4
    return [(bar.start, top), (bar.end, top), (bar.end, bottom), (bar.start, bottom)]
