"""Measures this library against FSDP2: all benchmarks, or those that are named.

Each benchmark is a script of this folder and runs in a process of its own, one after the other.
`--out` then holds summary.md and summary.json, the figures and output of each, and pictures of
sweeps; `results.py` writes docs/results.md from them. The exit code is 1 if a benchmark could not
run or a claim does not hold; a missed target is only reported.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from fsdp_overlap.tools.cli.output import BadInput
from fsdp_overlap.tools.cli.run_folder import check_out
from harness.benchmarks import BENCHMARKS, Benchmark
from harness.measurement import Measurement, read_measurement
from harness.output import fail
from harness.plot import plot
from harness.summary import Circumstances, Row, page_of, rows_of, write_summary

REPOSITORY = Path(__file__).resolve().parents[2]
# What the scripts say when a rank has said it before.
_SAID_BEFORE = "its error is above"


def find_benchmarks(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks called `names`, in the order in which they run; all of them if `names` is
    empty. Raises BadInput for an unknown name."""
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    for name in names:
        if name not in known:
            raise BadInput(f"there is no benchmark {name!r}; there are {', '.join(known)}")
    return [known[name] for name in known if name in names or not names]


def bench(names: Sequence[str], out: Path, quick: bool, repository: Path = REPOSITORY) -> bool:
    """Runs benchmarks, writes their figures, output and pictures and the summary to `out`, and
    shows the summary. Returns whether all of them ran and all claims hold; a missed target is
    no failure. Raises BadInput before anything is run or written."""
    chosen = find_benchmarks(names)
    check_out(out)
    # So that what runs is ended first, as it is after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out.mkdir(parents=True, exist_ok=True)
    where = Circumstances.here(repository, quick)
    rows: list[Row] = []
    is_good = True
    for k, benchmark in enumerate(chosen, start=1):
        print(f"{k} of {len(chosen)}: {benchmark.name}: ", end="", flush=True)
        start = time.monotonic()
        found, failure = run_one(benchmark, out, quick, repository)
        if found is not None:
            rows += rows_of(benchmark.name, found)
            plot(found, f"{benchmark.name}: {found.about}", out / f"{benchmark.name}.png")
        if failure is not None:
            command = shlex.join(["python", *benchmark.command(quick)])
            rows.append(Row(benchmark.name, "", command, failure=failure))
        broken = [] if found is None else broken_claims(found)
        is_good &= failure is None and not broken
        state = f"failed: {failure}" if failure else f"broken: {broken[0]}" if broken else "done"
        print(f"{state} ({time.monotonic() - start:.0f} s)", flush=True)
        # After each, so that a run that is stopped keeps what it had.
        write_summary(rows, where, out)
    print(f"\n{page_of(rows, where)}")
    print(f"{out / 'summary.md'} and .json hold these tables")
    return is_good


def run_one(
    benchmark: Benchmark, out: Path, quick: bool, repository: Path
) -> tuple[Measurement | None, str | None]:
    """Runs `benchmark` and returns what it measured, if it wrote that, and why it failed, if it
    did. A claim that does not hold is no failure to measure. Its output goes to a file in `out`."""
    script, *arguments = benchmark.command(quick)
    record = out.absolute() / f"{benchmark.name}.json"
    log = out / f"{benchmark.name}.log"
    # The scripts measure this package, whatever else is installed.
    paths = [str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, script, *arguments, "--json", str(record)],
            cwd=repository,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait()
        finally:
            process.terminate()  # if it still runs, when it ends its ranks
            process.wait()
    found = failure = None
    try:
        found = read_measurement(record)
    except FileNotFoundError:
        failure = "it wrote no figures"
    except ValueError as error:
        failure = str(error)
    if process.returncode and not (found is not None and broken_claims(found)):
        failure = _reason(log.read_text(errors="replace"), process.returncode)
    return found, failure


def broken_claims(measurement: Measurement) -> list[str]:
    return [f"{one.text}: {one.found}" for one in measurement.claims if not one.holds]


def _reason(output: str, code: int) -> str:
    """The last line of a program that failed, which says why in one line, as tracebacks do."""
    lines = [line.strip() for line in output.splitlines()]
    said = [line for line in lines if line and not line.endswith(_SAID_BEFORE)]
    return said[-1] if said else f"exit code {code}"


def main() -> None:
    args = parse()
    folder = args.out or Path("runs") / datetime.now().strftime("bench-%Y%m%d-%H%M%S")
    try:
        is_good = bench(args.names, folder, args.quick)
    except BadInput as error:
        fail(str(error))
    if not is_good:
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join(benchmark.name for benchmark in BENCHMARKS)
    parser.add_argument("names", nargs="*", help=f"some of {names}; all if left out")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, which shows that all of it runs"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for figures, pictures and summary; runs/bench-<timestamp> if left out",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
