"""What a benchmark prints and writes, and the options that say where."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from harness.markdown import markdown_table
from harness.measurement import Measurement, interval, number, three_decimals


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option that `publish` follows."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")


def repeated_argv() -> list[str]:
    """Script and arguments that repeat this run, from the repository."""
    script, *arguments = sys.argv
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_output(parser)
    _, kept = parser.parse_known_args(arguments)
    return [f"scripts/bench/{Path(script).name}", *kept]


def publish(measurement: Measurement, json_file: Path | None) -> None:
    """Print `measurement`, and write it if that was asked for. End the program with exit code 1
    if a claim does not hold."""
    print(measurement.about + "\n")
    for table in tables(measurement):
        print(table + "\n")
    for line in lines(measurement):
        print(line)
    if json_file is not None:
        measurement.write(json_file)
    if broken := [claim for claim in measurement.claims if not claim.holds]:
        fail(f"{broken[0].text}: {broken[0].found}", code=1)


def lines(measurement: Measurement) -> Iterator[str]:
    """What is compared and claimed, a line each."""
    for ratio in measurement.ratios:
        where = "" if ratio.at is None else f" at {number(ratio.at)}"
        line = f"{ratio.of} / {ratio.to}, {ratio.quantity}{where}: "
        line += three_decimals(ratio.spread.median)
        if spread := interval(ratio.spread, three_decimals):
            line += f" ({spread})"
        if ratio.at_most is not None:
            line += f"; target: at most {ratio.at_most:g}"
        yield line
    for claim in measurement.claims:
        yield f"{'holds' if claim.holds else 'BROKEN'}: {claim.text}: {claim.found}"


def tables(measurement: Measurement) -> Iterator[str]:
    """Systems by quantities, with targets if there are; one table for quantities of the same
    systems and topic, which is what stands before a colon in their names."""
    quantities_of: dict[tuple[str, tuple[tuple[float | None, str], ...]], list[str]] = {}
    for quantity in dict.fromkeys(figure.quantity for figure in measurement.figures):
        rows = tuple((f.at, f.system) for f in measurement.figures if f.quantity == quantity)
        topic = quantity.rpartition(": ")[0]
        quantities_of.setdefault((topic, rows), []).append(quantity)
    for (topic, rows), quantities in quantities_of.items():
        columns: list[list[str]] = []
        if measurement.sweep is not None and any(at is not None for at, _ in rows):
            places = ("" if at is None else number(at) for at, _ in rows)
            columns.append([measurement.sweep.name, *places])
        columns.append([topic, *(system for _, system in rows)])
        labels = len(columns)
        for quantity in quantities:
            figures = [measurement.figure(quantity, system, at) for at, system in rows]
            name = quantity.rpartition(": ")[2]
            unit = f", {figures[0].unit}" if figures[0].unit else ""
            columns.append([name + unit, *(number(f.spread.median) for f in figures)])
            if any(interval(f.spread) for f in figures):
                columns.append(["p10-p90", *(interval(f.spread) for f in figures)])
            if any(f.at_most is not None for f in figures):
                goals = ("" if f.at_most is None else f"{f.at_most:g}" for f in figures)
                columns.append(["at most", *goals])
        header, *lines = zip(*columns, strict=True)
        yield markdown_table(header, lines, labels)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the program with one line on stderr."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(code)
