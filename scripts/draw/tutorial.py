"""Draws docs/tutorial.svg: what each of two ranks holds of four blocks, unsharded and sharded.

``HELD`` is the picture in words. tests/docs/test_tutorial.py compares it with what ranks hold."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from pictures import new_picture, save

BLOCKS = 4
KINDS = ("parameters", "gradients", "optimizer states")
MOMENTS = ("between steps", "forward, in block 2", "backward, in block 2")
# What a rank holds of each block at these moments: nothing (-), its own half (h), or all (W).
HELD = {
    "plain": {
        "parameters": ("WWWW", "WWWW", "WWWW"),
        "gradients": ("----", "----", "-WWW"),
        "optimizer states": ("WWWW", "WWWW", "WWWW"),
    },
    "sharded": {
        "parameters": ("hhhh", "hWWh", "WWhh"),
        "gradients": ("----", "----", "-WWh"),
        "optimizer states": ("hhhh", "hhhh", "hhhh"),
    },
}
HALVES = ("#4477aa", "#66ccee")  # of rank 0 and of rank 1
EDGE = "#bbbbbb"


def draw(axes: Axes, held: dict[str, tuple[str, ...]], moment: int, rank: int) -> None:
    """A row of blocks for each kind. Half of a block is the upper or the lower half of a square."""
    for row, kind in enumerate(KINDS):
        for block, part in enumerate(held[kind][moment]):
            left, bottom = 1.25 * block, -1.4 * row
            halves = {"-": (), "h": (rank,), "W": (0, 1)}[part]
            for half in halves:
                corner = (left, bottom + 0.5 * (1 - half))
                axes.add_patch(Rectangle(corner, 1, 0.5, color=HALVES[half], linewidth=0))
            axes.add_patch(Rectangle((left, bottom), 1, 1, fill=False, edgecolor=EDGE))
    axes.set(xlim=(-0.2, 1.25 * BLOCKS), ylim=(-1.4 * len(KINDS) + 1.2, 1.2), aspect="equal")
    axes.set_xticks([1.25 * block + 0.5 for block in range(BLOCKS)], range(1, BLOCKS + 1))
    axes.set_yticks([-1.4 * row + 0.5 for row in range(len(KINDS))], KINDS)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def main() -> None:
    rows = [("each rank,\nunsharded", "plain", 0)]
    rows += [(f"rank {rank},\nsharded", "sharded", rank) for rank in range(2)]
    figure = new_picture(7.5, 5.2)
    grid = figure.subplots(len(rows), len(MOMENTS))
    for (title, way, rank), line in zip(rows, grid, strict=True):
        for moment, axes in enumerate(line):
            draw(axes, HELD[way], moment, rank)
            if moment:
                axes.set_yticks([])
        line[0].set_ylabel(title, fontsize=9, rotation=0, ha="right", va="center")
    for axes, title in zip(grid[0], MOMENTS, strict=True):
        axes.set_title(title, fontsize=9)
    legend = [
        Patch(color=HALVES[0], label="the half that rank 0 keeps"),
        Patch(color=HALVES[1], label="the half that rank 1 keeps"),
        Patch(facecolor="white", edgecolor=EDGE, label="not in memory"),
    ]
    save(figure, "tutorial.svg", legend)


if __name__ == "__main__":
    main()
