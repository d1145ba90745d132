"""Random programs against an unsharded twin.

`tests/support/fuzz.py` says what they do and what must hold. The same seed and number of
programs try the same ones, as long as the code is the same.
"""

import sys
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from hypothesis import Phase
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support import fuzz
from support.ranks import close_pool

OUT = Console(highlight=False, soft_wrap=True)


class Device(StrEnum):
    CPU = "cpu"
    EMULATED = "emulated"


class Search:
    """Tries programs until one shows a difference, which is then made smaller."""

    def __init__(self, examples: int, number: int, device: str) -> None:
        self.examples, self.number, self.device = examples, number, device
        self.tried = 0
        self.done: Counter[str] = Counter()
        self.different: fuzz.Program | None = None
        self.error: AssertionError | None = None

    def run(self) -> None:
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=OUT, transient=True) as progress:
            bar = progress.add_task("programs", total=self.examples)

            def look(program: fuzz.Program) -> None:
                self.try_one(program)
                progress.update(bar, completed=self.tried)
                if self.different is not None:
                    progress.update(bar, description="a difference, made smaller")

            try:
                phases = [Phase.generate, Phase.shrink]
                fuzz.try_programs(self.examples, self.number, look, phases, self.device)
            except AssertionError as error:
                self.error = error

    def try_one(self, program: fuzz.Program) -> None:
        is_shrinking = self.different is not None
        self.tried += not is_shrinking
        try:
            done = fuzz.run_on_ranks(program)
        except AssertionError:
            self.different = program  # the last that fails is the smallest
            raise
        if not is_shrinking:
            self.done += done


def show(search: Search) -> None:
    table = Table("operation", "run", box=None, header_style="")
    for name, count in sorted(search.done.items()):
        table.add_row(name, str(count))
    OUT.print(table)
    operations = sum(search.done[kind.__name__] for kind in fuzz.OPERATIONS)
    OUT.print(
        f"seed {search.number}, {search.device}, torch {torch.__version__}: "
        f"{search.tried} programs, "
        f"{operations} operations, {0 if search.different is None else 1} differences"
    )


def main(
    examples: Annotated[int, typer.Option(help="Programs to try.")] = 200,
    number: Annotated[int, typer.Option("--seed", help="The same one tries the same ones.")] = 0,
    device: Annotated[
        Device, typer.Option(help="What is trained on: a CPU, or a model of a device with streams.")
    ] = Device.CPU,
    program: Annotated[
        str | None, typer.Option(help="One program, as printed for a difference, and no other.")
    ] = None,
) -> None:
    """Exit code 1, and the smallest program found, if a program differs from its twin."""
    try:
        if program is not None:
            done = fuzz.run_on_ranks(eval(program, fuzz.NAMES))
            OUT.print(f"no difference in {done.total()} operations")
            return
        search = Search(examples, number, device.value)
        search.run()
        show(search)
        if search.different is not None:
            OUT.print(
                f"\n{search.error}\n\nThe smallest program that shows it (--program):\n",
                markup=False,
            )
            OUT.print(repr(search.different), markup=False)
            raise typer.Exit(1)
    finally:
        close_pool()


if __name__ == "__main__":
    typer.run(main)
