"""Draws docs/memory.svg: what a rank holds of a model, by optimizer, layout and ZeRO stage.

The figures are of formulas. `tests/docs/test_memory_formulas.py` compares them with what a small
model really allocates: the bytes of its tensors, on two ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from fsdp_overlap import Flat, TensorAtomic
from fsdp_overlap.layout import Layout, ParamGroupPlan, ParamSpec, plan_units

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from harness.real_models import units_of
from pictures import new_picture, save

MODEL, RANKS = "Llama-3 8B", 8
HEAD = "output.weight"
LAYOUTS: dict[str, Layout] = {"AdamW": Flat(), "Muon": TensorAtomic(split=(HEAD,))}
STAGES = (3, 2, 1)
PREFETCH = 1
# Bytes of an element: shards, gradients, states and reduce inputs in float32, compute in bfloat16.
WIDE, NARROW = 4, 2
GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank; of buffers that come and go, the most at once."""

    parameters: int
    gradients: int
    states: int
    full_buffers: int
    reduce_inputs: int


def estimate(plans: Sequence[ParamGroupPlan], rank: int, optimizer: str, stage: int) -> Memory:
    """`plans` are those of equal blocks, one param group each, and of the root, the last."""
    *blocks, root = plans
    shard = sum(plan.shard_numels[rank] for plan in plans)
    moments = 0
    for plan in plans:
        for spec in plan.specs:
            held = sum(
                stop - start for other, start, stop in plan.ranges(spec.fqn) if other == rank
            )
            moments += held * (1 if optimizer == "Muon" and is_matrix(spec) else 2)
    everything = sum(plan.numel for plan in plans)
    block = blocks[0].numel
    # The root is in use around the blocks, of which one computes and `prefetch` are ahead or wait
    # for their delayed release. Of reduce inputs one travels while the next is filled.
    full = root.numel + (1 + PREFETCH) * block if stage == 3 else everything
    reduced = everything if stage == 1 else block + max(block, root.numel)
    return Memory(WIDE * shard, WIDE * shard, WIDE * moments, NARROW * full, WIDE * reduced)


def is_matrix(spec: ParamSpec) -> bool:
    return spec.ndim >= 2 and not spec.is_embedding and spec.fqn != HEAD


def draw() -> None:
    """Draw it, and print what it shows."""
    units = units_of(MODEL)
    bars = {}
    for optimizer, layout in LAYOUTS.items():
        plans = plan_units(units, RANKS, layout)
        for stage in STAGES:
            ranks = [estimate(plans, rank, optimizer, stage) for rank in range(RANKS)]
            most = max(ranks, key=lambda memory: sum(astuple(memory)))
            bars[f"{optimizer}, {type(layout).__name__}(), stage {stage}"] = most
    figure = new_picture(7.5, 3.6)
    axes = figure.subplots()
    colors = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377"]
    left = [0.0] * len(bars)
    for field, color in zip(fields(Memory), colors, strict=True):
        sizes = [getattr(memory, field.name) / GIB for memory in bars.values()]
        label = field.name.replace("_", " ")
        axes.barh(list(bars), sizes, left=left, color=color, label=label)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="GiB", xlim=(0, max(left) * 1.1))
    axes.set_title(f"{MODEL} on {RANKS} ranks, the rank that holds most", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "memory.svg", axes.get_legend_handles_labels()[0])
    for name, memory in bars.items():
        parts = ", ".join(
            f"{field.name.replace('_', ' ')} {getattr(memory, field.name) / GIB:.2f}"
            for field in fields(Memory)
        )
        print(f"{name}: {sum(astuple(memory)) / GIB:.2f} GiB: {parts}")


if __name__ == "__main__":
    draw()
