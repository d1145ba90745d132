"""Running the repository's benchmark scripts, one after the other, each in a process of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fsdp_overlap.cli.bench_plot import plot
from fsdp_overlap.cli.bench_summary import (
    Circumstances,
    Row,
    rows_of,
    show_summary,
    write_summary,
)
from fsdp_overlap.cli.errors import BadInput
from fsdp_overlap.cli.measurement import Measurement, read_measurement
from fsdp_overlap.cli.run_folder import check_out

# A clone has them beside the package; an installed package has none.
REPOSITORY = Path(__file__).parents[2]
_POLL_SECONDS = 0.1
# What the scripts say when a rank has said it before.
_SAID_BEFORE = "its error is above"


@dataclass(frozen=True)
class Benchmark:
    """A script in scripts/ and its arguments, in a full and in a quick run."""

    name: str
    script: str
    arguments: str
    quick: str

    def command(self, quick: bool) -> list[str]:
        """From the repository, without the interpreter."""
        arguments = self.quick if quick else self.arguments
        return [f"scripts/{self.script}", *arguments.split()]


BENCHMARKS = (
    Benchmark("host_overhead", "bench_host_overhead.py", "", "--rounds 10 --warmup 3"),
    Benchmark(
        "units",
        "bench_host_overhead.py",
        "--blocks 8 32 64 128 256 --rounds 30 --warmup 3",
        "--blocks 8 32 64 --rounds 5 --warmup 2",
    ),
    Benchmark("optimizer", "bench_optimizer.py", "", "--rounds 10 --warmup 3"),
    Benchmark("link", "bench_link.py", "", "--rounds 2 --steps 1"),
    Benchmark(
        "link_speed",
        "bench_link_speed.py",
        "--rows 64 --sleep 40",
        "--rows 64 --sleep 40 --rounds 2 --steps 1 --rates 2gbit unlimited",
    ),
    Benchmark(
        "link_4_ranks",
        "bench_link.py",
        "--ranks 4 --rounds 5",
        "--ranks 4 --rounds 2 --steps 1",
    ),
    Benchmark("hsdp", "bench_hsdp.py", "", "--rounds 2 --blocks 3"),
    Benchmark(
        "schedule",
        "bench_link.py",
        "--rows 64 --sleep 43 --rounds 5",
        "--rows 64 --sleep 43 --rounds 2 --steps 1",
    ),
    Benchmark(
        "training",
        "bench_link.py",
        "--optimizer muon --stage 2 --steps 1",
        "--optimizer muon --stage 2 --rounds 1 --steps 1",
    ),
    Benchmark("order_check", "bench_order_check.py", "", "--rounds 2 --blocks 3"),
    Benchmark("memory", "bench_memory.py", "", "--rounds 3"),
    Benchmark("muon", "bench_muon.py", "", "--rounds 1"),
    Benchmark("checkpoint", "bench_checkpoint.py", "", "--rounds 2"),
    Benchmark("collectives", "bench_collectives.py", "", "--rounds 3 --warmup 1"),
    Benchmark("layouts", "layout_table.py", "", "--model Llama-3"),
    Benchmark("ragged", "bench_link.py", "--layout whole", "--layout whole --rounds 2 --steps 1"),
    Benchmark("soak", "soak.py", "", "--steps 200"),
)


def find_benchmarks(names: Sequence[str], repository: Path) -> list[Benchmark]:
    """Those called `names`, all if there are none, in the order in which they run. Raises BadInput
    for an unknown name, or where `repository` has no scripts."""
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    for name in names:
        if name not in known:
            raise BadInput(f"there is no benchmark {name!r}; there are {', '.join(known)}")
    if not (repository / "scripts" / "_bench.py").is_file():
        raise BadInput(
            f"no benchmark scripts in {repository / 'scripts'}: they are in the repository, not in "
            "an installed package; in a clone, run scripts/setup.sh and .venv/bin/fsdp-overlap "
            "bench"
        )
    return [known[name] for name in known if name in names or not names]


def bench(names: Sequence[str], out: Path, quick: bool, repository: Path = REPOSITORY) -> bool:
    """Runs benchmarks, writes their figures, plots and output and the summary to the folder `out`,
    and shows the summary. Whether all of them ran and all that must hold does; a missed target is
    no failure. Raises BadInput before anything is run or written."""
    chosen = find_benchmarks(names, repository)
    check_out(out)
    # So that what runs is ended first, as it is after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out.mkdir(parents=True, exist_ok=True)
    where = Circumstances.here(repository, quick)
    # A file takes long lines; a terminal says how long.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    rows: list[Row] = []
    is_good = True
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        whole = progress.add_task("", total=None)
        for k, benchmark in enumerate(chosen, start=1):
            progress.update(whole, description=f"{k} of {len(chosen)} benchmarks")
            running = progress.add_task(benchmark.name, total=None)
            start = time.monotonic()
            found, failure = run_one(benchmark, out, quick, repository)
            progress.remove_task(running)
            took = f"{time.monotonic() - start:.0f} s"
            if found is not None:
                rows += rows_of(benchmark.name, found)
                plot(found, f"{benchmark.name}: {found.about}", out / f"{benchmark.name}.png")
            if failure is not None:
                command = shlex.join(["python", *benchmark.command(quick)])
                rows.append(Row(benchmark.name, "", command, failure=failure))
            broken = [] if found is None else broken_claims(found)
            is_good &= failure is None and not broken
            state = (
                f"failed: {failure}" if failure else f"broken: {broken[0]}" if broken else "done"
            )
            console.print(f"{benchmark.name}: {state} ({took})", markup=False)
            # After each, so that a run that is stopped keeps what it had.
            write_summary(rows, where, out)
    show_summary(rows, where, console)
    console.print(f"\n{out / 'summary.md'} and .json hold this table with all commands")
    return is_good


def run_one(
    benchmark: Benchmark, out: Path, quick: bool, repository: Path
) -> tuple[Measurement | None, str | None]:
    """What it measured, if it wrote that, and in a line why it failed, if it did; a claim that does
    not hold is no failure to measure. Its output goes to a file in `out`."""
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
            # Progress is drawn by a thread of its own meanwhile.
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its ranks
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
