"""The report as one HTML page that needs no network. Needs plotly and jinja2."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from fsdp_overlap.tools.profiling.diagnosis import diagnose
from fsdp_overlap.tools.profiling.drawing import draw
from fsdp_overlap.tools.profiling.report import Report
from fsdp_overlap.tools.profiling.tables import collectives_table, kinds_table, ranks_table

_PIXELS_PER_ROW = 26
_MAX_COLLECTIVES = 100


def write_html(reports: Mapping[str, Report], path: str | os.PathLike[str]) -> None:
    """Write the reports, by name: what was found, an interactive timeline and tables."""
    environment = Environment(
        loader=PackageLoader("fsdp_overlap.tools.profiling", "."), autoescape=True, trim_blocks=True
    )
    figure = _figure(reports)
    page = environment.get_template("page.html").render(
        title=" against ".join(reports),
        findings={name: diagnose(report) for name, report in reports.items()},
        timeline=figure.to_html(
            full_html=False,
            include_plotlyjs=True,
            div_id="timeline",
            config={"displayModeBar": False},  # on narrow screens it would cover the legend
        ),
        ranks=ranks_table(reports),
        kinds=kinds_table(reports),
        collectives={
            name: collectives_table(report.slowest, _MAX_COLLECTIVES)
            for name, report in reports.items()
        },
    )
    Path(path).write_text(page, encoding="utf-8")


def _figure(reports: Mapping[str, Report]) -> Any:
    import plotly.graph_objects as go  # a third of a second that other commands need not take

    drawing = draw(reports)
    figure = go.Figure()
    for label, color, bars in drawing.kinds:
        figure.add_bar(
            orientation="h",
            base=[bar.start for bar in bars],
            x=[bar.end - bar.start for bar in bars],
            y=[bar.row for bar in bars],
            width=0.8,
            name=label,
            hovertext=[bar.text for bar in bars],
            hoverinfo="text",
            marker={
                "color": color,
                "line": {"color": color, "width": [int(bar.has_line) for bar in bars]},
            },
        )
    rows = len(drawing.rows)
    figure.update_layout(
        barmode="overlay",
        template="plotly_white",
        paper_bgcolor="rgba(0, 0, 0, 0)",  # the page's own, light or dark
        plot_bgcolor="rgba(0, 0, 0, 0)",
        dragmode="zoom",
        hovermode="closest",
        height=140 + _PIXELS_PER_ROW * rows,
        margin={"l": 10, "r": 10, "t": 10, "b": 40},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        xaxis={"title": "ms", "zeroline": False},
        yaxis={
            "range": [rows - 0.4, -0.6],
            "tickvals": list(range(rows)),
            "ticktext": drawing.rows,
            "fixedrange": True,
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
        },
    )
    return figure
