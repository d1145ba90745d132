"""What each layout makes of real models at real sizes: padding, balance, planning time."""

import time
from collections.abc import Sequence
from typing import Annotated

import _bench
import torch
import typer

from fsdp_overlap.layout import Blocks, BucketPlan, Flat, Layout, ParamSpec, Whole, plan_units

Shapes = list[tuple[int, ...]]

WORLD_SIZES = (8, 32, 64, 256, 1024)
BALANCED_FROM = 4  # matrices per rank; with fewer no assignment is even


def llama(width: int, hidden: int) -> Shapes:
    attention: Shapes = [(width, width), (1024, width), (1024, width), (width, width)]
    return [*attention, (hidden, width), (hidden, width), (width, hidden)]


_MLA: Shapes = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]

# Blocks, vocabulary, width, shapes of a block.
MODELS: dict[str, tuple[int, int, int, Shapes]] = {
    "GPT-2 XL": (48, 50257, 1600, [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)]),
    "Llama-3 8B": (32, 128256, 4096, llama(4096, 14336)),
    "Llama-3 70B": (80, 128256, 8192, llama(8192, 28672)),
    "Llama-3 405B": (126, 128256, 16384, llama(16384, 53248)),
    "DeepSeek-V3": (58, 129280, 7168, _MLA + [(2048, 7168)] * 512 + [(7168, 2048)] * 256),
    "DeepSeek-V3, stacked": (
        58,
        129280,
        7168,
        [*_MLA, (256, 2048, 7168), (256, 2048, 7168), (256, 7168, 2048)],
    ),
}

LAYOUTS: dict[str, Layout] = {
    "whole": Whole(cut=("output.weight",)),
    "flat": Flat(),
    "blocks": Blocks(rows=128),
}


def units_of(model: str) -> list[list[ParamSpec]]:
    """One unit a block, and the root with embedding, last norm and output head."""
    blocks, vocabulary, width, shapes = MODELS[model]
    dtype = torch.bfloat16
    block = [ParamSpec("norm1.weight", (width,), dtype)]
    block += [ParamSpec(f"w{i}.weight", shape, dtype) for i, shape in enumerate(shapes)]
    block += [ParamSpec("norm2.weight", (width,), dtype)]
    root = [
        ParamSpec("embedding.weight", (vocabulary, width), dtype, is_embedding=True),
        ParamSpec("norm.weight", (width,), dtype),
        ParamSpec("output.weight", (vocabulary, width), dtype),
    ]
    return [block] * blocks + [root]


def imbalance(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def work_of(plans: list[BucketPlan], layout: Layout) -> list[float]:
    """Newton-Schulz cost by rank."""
    work = [0.0] * plans[0].world_size
    for plan in plans:
        for spec in plan.specs:
            if cost := layout.work(spec):
                for rank, start, stop in plan.ranges(spec.fqn):
                    work[rank] += cost * (stop - start) / spec.numel
    return work


def main(
    model: Annotated[str | None, typer.Option(help="Only models whose name holds this.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="whole, flat or blocks; all if left out.")
    ] = None,
) -> None:
    """One unit a block. Imbalance is the largest over the mean."""
    columns = "model,ranks,layout,matrices a rank,buckets a unit,padding %,imbalance of bytes"
    columns += ",of Newton-Schulz cost,shards,planning s"
    rows = []
    for name in MODELS:
        if model is not None and model.lower() not in name.lower():
            continue
        units = units_of(name)
        _, _, _, shapes = MODELS[name]
        matrices = (len(units) - 1) * sum(s[0] if len(s) == 3 else 1 for s in shapes)
        for world_size in WORLD_SIZES:
            for kind, rule in LAYOUTS.items():
                if layout not in (None, kind):
                    continue
                start = time.perf_counter()
                plans = plan_units(units, world_size, rule)
                seconds = time.perf_counter() - start
                held = [sum(n) for n in zip(*(p.shard_numels for p in plans), strict=True)]
                padding = sum(plan.padding for plan in plans) / sum(plan.numel for plan in plans)
                work = f"{imbalance(work_of(plans, rule)):.3f}" if kind == "whole" else ""
                ragged = sum(not plan.is_equal for plan in plans)
                rows.append(
                    [
                        name,
                        str(world_size),
                        kind,
                        f"{matrices / world_size:.1f}",
                        f"{len(plans) / len(units):.0f}",
                        f"{100 * padding:.4f}",
                        f"{imbalance(held):.3f}",
                        work,
                        "equal" if not ragged else f"{ragged} of {len(plans)} ragged",
                        f"{seconds:.3f}",
                    ]
                )
    print("one unit a block; parameters in bfloat16; imbalance: the largest over the mean\n")
    print(_bench.markdown_table(columns.split(","), rows))


if __name__ == "__main__":
    typer.run(main)
