"""What each layout makes of real models at real sizes: padding, balance, planning time.

One unit a block, and the root; parameters in bfloat16. Imbalance is the largest rank over the mean.
What cannot be cut sets a bound to it (harness/balance_bound.py), so it is also given over that.
The headlines are the worst imbalance of `TensorAtomic()`, of bytes or of Newton-Schulz cost, over
the bound. They leave out numbers of ranks with less than BALANCED_FROM matrices each.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_overlap.layout import (
    BlockAtomic,
    Flat,
    Layout,
    ParamGroupPlan,
    ParamSpec,
    TensorAtomic,
    plan_units,
)
from harness import options, runner
from harness.balance_bound import least_imbalance
from harness.measurement import Sweep
from harness.real_models import MODELS, units_of
from harness.runner import Results

WORLD_SIZES = (8, 32, 64, 256, 1024)
BALANCED_FROM = 4  # matrices per rank
BALANCE_TARGET = 1.05
# Seconds to plan a model of some hundred matrices, and one of tens of thousands.
PLANNING_TARGET, MANY_PLANNING_TARGET, MANY = 0.3, 2.0, 10_000


LAYOUTS: dict[str, Layout] = {
    "tensor-atomic": TensorAtomic(split=("output.weight",)),
    "equal": TensorAtomic(split=("output.weight",), max_padding=math.inf),
    "flat": Flat(),
    "block-atomic": BlockAtomic(rows=128),
}


def imbalance(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def work_of(plans: list[ParamGroupPlan], layout: Layout) -> list[float]:
    """Newton-Schulz cost by rank."""
    work = [0.0] * plans[0].world_size
    for plan in plans:
        for spec in plan.specs:
            if cost := layout.work(spec):
                for rank, start, stop in plan.ranges(spec.fqn):
                    work[rank] += cost * (stop - start) / spec.numel
    return work


@dataclass(frozen=True)
class Balance:
    """Imbalance of bytes, and of Newton-Schulz cost, which is None where matrices are cut."""

    held: float
    work: float | None = None

    @staticmethod
    def of(plans: list[ParamGroupPlan], layout: Layout) -> "Balance":
        held = [sum(n) for n in zip(*(p.shard_numels for p in plans), strict=True)]
        work = work_of(plans, layout)
        return Balance(imbalance(held), imbalance(work) if sum(work) else None)

    @staticmethod
    def bound(units: list[list[ParamSpec]], ranks: int, layout: Layout) -> "Balance":
        """What no assignment of whole blocks can be below."""
        specs = [spec for unit in units for spec in unit]
        block_sizes = [(spec, min(spec.numel, layout.block_size(spec))) for spec in specs]
        held, work = Counter[float](), Counter[float]()
        for spec, block_size in block_sizes:
            count, rest = divmod(spec.numel, block_size)
            held[block_size] += count
            held[rest] += rest > 0
            work[layout.work(spec) * block_size / spec.numel] += count
        is_worked = any(map(layout.work, specs))
        return Balance(
            least_imbalance(held, ranks), least_imbalance(work, ranks) if is_worked else None
        )

    def over(self, bound: "Balance") -> float:
        """The worse of the two, over what ``bound`` allows."""
        held = self.held / bound.held
        return held if not self.work or not bound.work else max(held, self.work / bound.work)


@dataclass(frozen=True)
class Planned:
    """A model on so many ranks under a layout. matrices: in the whole model. padding: a part of all
    parameters. seconds: to plan all units."""

    model: str
    ranks: int
    layout: str
    matrices: int
    padding: float
    over_bound: float
    seconds: float


def plan(model: str, ranks: int, kind: str) -> Planned:
    rule, units = LAYOUTS[kind], units_of(model)
    _, _, _, shapes = MODELS[model]
    start = time.perf_counter()
    plans = plan_units(units, ranks, rule)
    seconds = time.perf_counter() - start
    padding = sum(plan.padding for plan in plans)
    return Planned(
        model,
        ranks,
        kind,
        (len(units) - 1) * sum(s[0] if len(s) == 3 else 1 for s in shapes),
        padding / (sum(plan.numel for plan in plans) - padding),
        Balance.of(plans, rule).over(Balance.bound(units, ranks, rule)),
        seconds,
    )


def results_of(planned: Sequence[Planned]) -> Results:
    """Imbalance by number of ranks and, of each model, the headlines."""
    about = "one unit a block; parameters in bfloat16; imbalance: the largest over the mean"
    results = Results(about, Sweep("ranks"))
    whole: dict[str, list[Planned]] = {}
    for one in planned:
        for what, unit, value in (
            ("imbalance over the bound", "", one.over_bound),
            ("padding", "%", 100 * one.padding),
        ):
            results.add(f"{one.layout}: {what}", unit, {one.model: [value]}, at=one.ranks)
        if one.layout == "tensor-atomic":
            whole.setdefault(one.model, []).append(one)
    quantity = f"worst imbalance over the bound with {BALANCED_FROM} matrices a rank or more"
    for model, each in whole.items():
        if even := [one for one in each if one.matrices >= BALANCED_FROM * one.ranks]:
            worst = max(even, key=lambda one: one.over_bound)
            system, over = f"{model} on {worst.ranks} ranks", worst.over_bound
            results.add(quantity, "", {system: [over]}, at_most={system: BALANCE_TARGET})
    for model, each in whole.items():
        slowest = max(each, key=lambda one: one.seconds)
        system = f"{model} on {slowest.ranks} ranks"
        target = MANY_PLANNING_TARGET if slowest.matrices >= MANY else PLANNING_TARGET
        found = {system: [slowest.seconds]}
        results.add("longest planning", "s", found, at_most={system: target})
    return results


OPTIONS = options.parser(__doc__)
OPTIONS.add_argument("--model", default="", help="only models whose name holds this")
OPTIONS.add_argument("--layout", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))


def main() -> None:
    args = OPTIONS.parse_args()
    planned = [
        plan(name, world_size, kind)
        for name in MODELS
        if args.model.lower() in name.lower()
        for world_size in WORLD_SIZES
        for kind in args.layout
    ]
    runner.publish(args, results_of(planned))


if __name__ == "__main__":
    main()
