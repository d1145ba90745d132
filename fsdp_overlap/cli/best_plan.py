"""The best plans that a search has found, as a table and as code."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fsdp_overlap.cli.errors import BadInput
from fsdp_overlap.cli.output import writing
from fsdp_overlap.simulator import Device, Found, Plan
from fsdp_overlap.simulator.hardware import GIB
from fsdp_overlap.simulator.plan_code import code_of

HEADER = (
    "plan",
    "batch",
    "checkpointing",
    "blocks a unit",
    "prefetch",
    "kept",
    "reduced",
    "layout",
    "step, ms",
    "tokens/s, GPU",
    "GiB",
    "exposed, ms",
)


def show_best(
    found: Found, device: Device, price: float | None, out: Path | None, took: float
) -> None:
    """Prints the table, how much better the best plan is than the defaults, and its code. Writes
    the code to ``plan.py`` in ``out``.

    Raises:
        BadInput: no plan fits.
    """
    # A file takes long lines; a terminal says how long.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    skipped = ", ".join(f"{count} skipped: {why}" for why, count in found.skipped.most_common())
    said = f"{found.tried} plans tried in {took:.0f} s{'; ' if skipped else ''}{skipped}"
    if not found.plans:
        least = found.least
        needs = f"; the least needs {least.taken.reserved / GIB:.1f} GiB" if least else ""
        raise BadInput(f"no plan fits in {device.memory_size / GIB:.1f} GiB{needs} ({said})")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in HEADER:
        table.add_column(column, justify="right", overflow="fold")
    for number, plan in enumerate(found.plans, 1):
        table.add_row(str(number), *_cells(plan))
    if found.defaults is not None:
        table.add_row("defaults", *_cells(found.defaults))
    console.print(table)
    console.print(f"\n{said}", markup=False)
    console.print(_against_defaults(found), markup=False)
    best = found.plans[0]
    if price is not None:
        cost = best.training.gpus * best.seconds / 3600 * price
        tokens = best.training.tokens * best.training.gpus
        console.print(f"It costs ${cost:.4f} a step, ${cost / tokens * 1e9:.0f} a billion tokens.")
    code = code_of(best.training)
    print(f"\nThe best as code:\n\n{code}")
    if out is not None:
        with writing(out) as new:
            (new / "plan.py").write_text(code)
        console.print(f"{out / 'plan.py'}", markup=False)


def _against_defaults(found: Found) -> str:
    if found.speedup is None:
        return "The library's defaults do not fit."
    what = "the library's defaults"
    if not found.given_fits:
        what += " with its microbatches and checkpointing; as given they do not fit"
    return f"The best takes {100 * (1 - 1 / found.speedup):.1f}% less time than {what}."


def _cells(plan: Plan) -> list[str]:
    training, taken = plan.training, plan.taken
    if training.stage != 3:
        kept = "all"
    elif training.reshard_after_forward is not None:
        kept = f"1/{training.reshard_after_forward}"
    else:
        kept = "nothing"
    exposed = "" if taken.exposed is None else f"{1e3 * taken.exposed:.0f}"
    return [
        f"{training.microbatches} x {training.batch}",
        training.checkpointing,
        str(training.blocks_a_unit),
        str(training.prefetch),
        kept,
        "each" if training.reduce_each or training.microbatches == 1 else "last",
        type(training.layout).__name__,
        f"{1e3 * plan.seconds:.1f}",
        f"{training.tokens / plan.seconds:.0f}",
        f"{taken.reserved / GIB:.1f}",
        exposed,
    ]
