"""Draws docs/layouts.svg: one block of a transformer under each layout."""

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from fsdp_overlap.layout import (
    BlockAtomic,
    Flat,
    LayoutRule,
    ParamGroupPlan,
    ParamSpec,
    TensorAtomic,
    plan_units,
)
from pictures import new_picture, save

RANKS = 4
SHAPES = {
    "qkv": (768, 256),
    "project": (256, 256),
    "up": (1024, 256),
    "down": (256, 1024),
    "norms": (2048,),
}
COLORS = dict(zip(SHAPES, ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377"], strict=True))
LAYOUTS: dict[str, LayoutRule] = {
    "Flat(): cut anywhere, equal shards": Flat(),
    "BlockAtomic(rows=256): cut between blocks of rows": BlockAtomic(rows=256),
    "TensorAtomic(): no matrix is cut, shards as large as what they hold": TensorAtomic(),
}


def draw(axes: Axes, plan: ParamGroupPlan, title: str, width: int) -> None:
    for spec, offset, block_size in zip(plan.specs, plan.offsets, plan.block_sizes, strict=True):
        is_shown = width // 100 < block_size < spec.numel
        for rank, start, stop in plan.ranges(spec.fqn):
            begin = offset - plan.shard_starts[rank]
            corner = (begin + start, rank - 0.38)
            axes.add_patch(Rectangle(corner, stop - start, 0.76, color=COLORS[spec.fqn], lw=0))
            for cut in range(start, stop, block_size) if is_shown else ():
                axes.plot([begin + cut] * 2, [rank - 0.38, rank + 0.38], color="white", lw=0.6)
    axes.set(xlim=(0, max(plan.shard_numels) * 1.02), ylim=(RANKS - 0.5, -0.5), yticks=range(RANKS))
    axes.set_yticklabels([f"rank {rank}" for rank in range(RANKS)])
    axes.set_xticks([])
    axes.set_title(title, loc="left", fontsize=9)
    axes.spines[:].set_visible(False)


def main() -> None:
    """One block of width 256 on four ranks. A bar is what a rank holds."""
    specs = [ParamSpec(fqn, shape, torch.float32) for fqn, shape in SHAPES.items()]
    figure = new_picture(7.5, 5.2)
    plans = {title: plan_units([specs], RANKS, rule)[0] for title, rule in LAYOUTS.items()}
    width = max(max(plan.shard_numels) for plan in plans.values())
    for axes, (title, plan) in zip(figure.subplots(len(plans)), plans.items(), strict=True):
        draw(axes, plan, title, width)
    names = {fqn: f"{fqn} {' x '.join(map(str, shape))}" for fqn, shape in SHAPES.items()}
    save(figure, "layouts.svg", [Patch(color=COLORS[fqn], label=names[fqn]) for fqn in SHAPES])


if __name__ == "__main__":
    main()
