"""Pictures of docs/ that come out the same, byte by byte, from the same versions of packages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[2] / "docs"


def new_picture(width: float, height: float) -> Figure:
    """Begin an SVG, in inches, whose text stays text. The script's name seeds the names in it."""
    matplotlib.rcParams.update({"svg.hashsalt": Path(sys.argv[0]).stem, "svg.fonttype": "none"})
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, name: str, legend: Sequence[Artist] = ()) -> None:
    """Write it into docs/, with a legend below if there is one."""
    if legend:
        figure.legend(
            handles=legend,
            loc="outside lower center",
            ncols=len(legend),
            fontsize=8,
            frameon=False,
        )
    figure.savefig(DOCS / name, metadata={"Date": None})
