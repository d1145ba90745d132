"""Draws docs/precision.svg: what one block of a transformer is made of on its way to compute, and
its gradients on their way back, in bytes."""

from dataclasses import replace
from typing import cast

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from fsdp_overlap import QuantizedCommPolicy
from fsdp_overlap.layout import BlockAtomic, ParamGroupPlan, ParamSpec, plan_units
from pictures import new_picture, save

RANKS = 2
SHAPES = {"qkv": (96, 32), "project": (32, 32), "up": (128, 32), "down": (32, 128), "norms": (256,)}
REST, COMPUTE = torch.float32, torch.bfloat16
POLICY = QuantizedCommPolicy(torch.float8_e4m3fn, torch.bfloat16)
SHARED = "#4477aa", "#66ccee"  # of each rank
CODES, SCALES, KEPT = "#228833", "#aa3377", "#ccbb44"
NAMES = {
    SHARED[0]: "numbers of rank 0's shard",
    SHARED[1]: "of rank 1's",
    CODES: "codes",
    SCALES: "scales",
    KEPT: "norms, in full",
}

Bar = list[tuple[int, str]]
"""Bytes and color of each part."""


def plan_of(policy: QuantizedCommPolicy) -> ParamGroupPlan:
    specs = [ParamSpec(fqn, shape, REST) for fqn, shape in SHAPES.items()]
    specs = [replace(spec, block=policy.block_numel(spec)) for spec in specs]
    [plan] = plan_units([specs], RANKS, BlockAtomic(rows=1))
    return cast(ParamGroupPlan, plan)


def whole(plan: ParamGroupPlan, dtype: torch.dtype) -> Bar:
    sizes = zip(plan.shard_numels, SHARED, strict=True)
    return [(numel * dtype.itemsize, color) for numel, color in sizes]


def segments(plan: ParamGroupPlan, ranks: list[int], dtype: torch.dtype, codes: torch.dtype) -> Bar:
    """What travels for these ranks' shards."""
    parts = POLICY.wire(plan, dtype, codes).parts
    colors = (CODES, SCALES, KEPT)
    return [
        (code + gap, color)
        for rank in ranks
        for code, gap, color in zip(parts[rank][::2], parts[rank][1::2], colors, strict=True)
    ]


def rows(plan: ParamGroupPlan) -> list[tuple[str, Bar]]:
    everyone = list(range(RANKS))
    gather, reduce = POLICY.gather_dtype, POLICY.reduce_dtype
    assert gather is not None
    assert reduce is not None
    return [
        ("at rest, on rank 0: float32", whole(plan, REST)[:1]),
        ("rank 0 sends: float8", segments(plan, [0], COMPUTE, gather)),
        ("gathered: float8", segments(plan, everyone, COMPUTE, gather)),
        ("compute: bfloat16", whole(plan, COMPUTE)),
        ("gradients of rank 0: float32", whole(plan, REST)),
        ("rank 0 sends: bfloat16", segments(plan, everyone[1:], REST, reduce)),
        ("summed, on rank 0: float32", whole(plan, REST)[:1]),
    ]


def draw(axes: Axes, bars: list[tuple[str, Bar]], forward: int) -> None:
    """``forward``: how many of the bars are on the way to compute."""
    for at, (title, bar) in enumerate(bars):
        y = at + (0.6 if at >= forward else 0)
        left = 0
        for size, color in bar:
            axes.barh(y, size, left=left, color=color, height=0.62)
            left += size
        axes.text(left + 400, y, f"{left / 1024:.1f} KiB", va="center", fontsize=8)
        axes.text(-600, y, title, va="center", ha="right", fontsize=9)
    axes.set_ylim(len(bars) + 0.2, -0.6)
    axes.set_axis_off()


def main() -> None:
    """A block of width 32 on two ranks. A bar is as long as its bytes."""
    figure = new_picture(9, 3.6)
    draw(figure.subplots(), rows(plan_of(POLICY)), 4)
    save(
        figure, "precision.svg", [Patch(color=color, label=label) for color, label in NAMES.items()]
    )


if __name__ == "__main__":
    main()
