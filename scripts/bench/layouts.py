"""What each layout makes of real models at real sizes: padding, balance, planning time.

One unit a block, and the root; parameters in bfloat16. Imbalance is the largest rank over the mean.
The headline is the worst imbalance of `Whole()`, of bytes or of Newton-Schulz cost, over the
numbers of ranks that leave each at least BALANCED_FROM matrices: with fewer no assignment is even.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from fsdp_overlap.layout import Blocks, BucketPlan, Flat, Layout, Whole, plan_units
from harness import output
from harness.markdown import markdown_table
from harness.measurement import Figure, Measurement, Spread, Sweep
from harness.real_models import MODELS, units_of

WORLD_SIZES = (8, 32, 64, 256, 1024)
BALANCED_FROM = 4  # matrices per rank
BALANCE_TARGET = 1.05
# Seconds to plan a model of some hundred matrices, and one of tens of thousands.
PLANNING_TARGET, MANY_PLANNING_TARGET, MANY = 0.3, 2.0, 10_000


LAYOUTS: dict[str, Layout] = {
    "whole": Whole(cut=("output.weight",)),
    "flat": Flat(),
    "blocks": Blocks(rows=128),
}


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


@dataclass(frozen=True)
class Planned:
    """A model on so many ranks under a layout. matrices: in the whole model. buckets: per unit.
    padding: a part of all elements. work: imbalance of Newton-Schulz cost, None where matrices are
    cut. ragged: units whose shards are not equal. seconds: to plan."""

    model: str
    ranks: int
    layout: str
    matrices: int
    units: int
    buckets: float
    padding: float
    held: float
    work: float | None
    ragged: int
    seconds: float

    @property
    def imbalance(self) -> float:
        """The worse one."""
        return self.held if self.work is None else max(self.held, self.work)

    def cells(self) -> list[str]:
        return [
            self.model,
            str(self.ranks),
            self.layout,
            f"{self.matrices / self.ranks:.1f}",
            f"{self.buckets:.0f}",
            f"{100 * self.padding:.4f}",
            f"{self.held:.3f}",
            "" if self.work is None else f"{self.work:.3f}",
            "equal" if not self.ragged else f"{self.ragged} of {self.units} ragged",
            f"{self.seconds:.3f}",
        ]


def plan(model: str, ranks: int, kind: str) -> Planned:
    rule, units = LAYOUTS[kind], units_of(model)
    _, _, _, shapes = MODELS[model]
    start = time.perf_counter()
    plans = plan_units(units, ranks, rule)
    seconds = time.perf_counter() - start
    held = [sum(n) for n in zip(*(p.shard_numels for p in plans), strict=True)]
    return Planned(
        model,
        ranks,
        kind,
        (len(units) - 1) * sum(s[0] if len(s) == 3 else 1 for s in shapes),
        len(units),
        len(plans) / len(units),
        sum(plan.padding for plan in plans) / sum(plan.numel for plan in plans),
        imbalance(held),
        imbalance(work_of(plans, rule)) if kind == "whole" else None,
        sum(not plan.is_equal for plan in plans),
        seconds,
    )


def measurement_of(planned: Sequence[Planned]) -> Measurement:
    """Imbalance by number of ranks and, of each model, the headlines."""
    figures = []
    for one in planned:
        if one.layout == "whole":
            spread = Spread.of([one.imbalance])
            figures.append(Figure("imbalance", one.model, "", spread, at=one.ranks))
    for model in dict.fromkeys(one.model for one in planned):
        whole = [one for one in planned if one.model == model and one.layout == "whole"]
        even = [one for one in whole if one.matrices >= BALANCED_FROM * one.ranks]
        if even:
            worst = max(even, key=lambda one: one.imbalance)
            quantity = f"worst imbalance with {BALANCED_FROM} matrices a rank or more"
            spread = Spread.of([worst.imbalance])
            system = f"{model} on {worst.ranks} ranks"
            figures.append(Figure(quantity, system, "", spread, at_most=BALANCE_TARGET))
    for model in dict.fromkeys(one.model for one in planned):
        whole = [one for one in planned if one.model == model and one.layout == "whole"]
        if whole:
            slowest = max(whole, key=lambda one: one.seconds)
            target = MANY_PLANNING_TARGET if slowest.matrices >= MANY else PLANNING_TARGET
            spread = Spread.of([slowest.seconds])
            system = f"{model} on {slowest.ranks} ranks"
            figures.append(Figure("longest planning", system, "s", spread, at_most=target))
    return Measurement(
        "one unit a block; parameters in bfloat16; imbalance: the largest over the mean",
        {"torch": torch.__version__},
        output.repeated_argv(),
        figures,
        sweep=Sweep("ranks"),
    )


def main(
    model: Annotated[str | None, typer.Option(help="Only models whose name holds this.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="whole, flat or blocks; all if left out.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw them: .png or .svg.")] = None,
) -> None:
    """One unit a block. Imbalance is the largest over the mean."""
    columns = "model,ranks,layout,matrices a rank,buckets a unit,padding %,imbalance of bytes"
    columns += ",of Newton-Schulz cost,shards,planning s"
    planned = [
        plan(name, world_size, kind)
        for name in MODELS
        if model is None or model.lower() in name.lower()
        for world_size in WORLD_SIZES
        for kind in LAYOUTS
        if layout in (None, kind)
    ]
    print(markdown_table(columns.split(","), [one.cells() for one in planned]), end="\n\n")
    output.publish(measurement_of(planned), json, plot)


if __name__ == "__main__":
    typer.run(main)
