"""The timeline as a PNG. Needs matplotlib."""

import os
from collections.abc import Mapping

from fsdp_overlap.profiling.drawing import COLOURS, LEGEND, draw
from fsdp_overlap.profiling.report import Report

_INCHES_PER_ROW = 0.3


def write_png(reports: Mapping[str, Report], path: str | os.PathLike[str]) -> None:
    """Draws the timelines of the reports, by name, one below the other."""
    # Takes half a second, which a program that draws at its end, if at all, need not take at its
    # start.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawing = draw(reports)
    matplotlib.use("agg")
    figure = Figure(figsize=(12, 1.4 + _INCHES_PER_ROW * len(drawing.rows)), layout="constrained")
    axes = figure.subplots()
    for what, colour in COLOURS.items():
        for row in range(len(drawing.rows)):
            spans = [
                (bar.start, bar.end - bar.start)
                for bar in drawing.bars
                if bar.what == what and bar.row == row
            ]
            # A line around them, so that the shortest can be seen.
            line = 0.8 if what == "exposed" else 0.0
            axes.broken_barh(spans, (row - 0.4, 0.8), color=colour, linewidth=line)
    axes.set_yticks(range(len(drawing.rows)), drawing.rows)
    axes.set_ylim(len(drawing.rows) - 0.4, -0.6)
    axes.set_xlabel("ms")
    axes.margins(x=0.005)
    axes.spines[["top", "right"]].set_visible(False)
    used = {bar.what for bar in drawing.bars}
    handles = [
        Patch(color=colour, label=LEGEND.get(what, what))
        for what, colour in COLOURS.items()
        if what in used
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)
