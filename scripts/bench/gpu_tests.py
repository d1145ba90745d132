"""The tests that `gpu_suite.py` runs: which they are, and how they are run and watched."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

REPORT_SECONDS = 10.0
"""How long tests that are not done may write what has failed."""
SHOW_SECONDS = 10.0
"""How often a line says how many tests there are left."""
MEMCHECK = "compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1".split()


Part = dict[str, Any]
"""What a part found; see `gpu_suite.run_part`."""


class Tests(NamedTuple):
    """What pytest is to run, with which environment."""

    chosen: Sequence[str]
    env: Mapping[str, str] = {}
    on_cpu: Sequence[str] = ()
    """What is tried out where there is no GPU, if anything."""


def files_with(mark: str) -> list[str]:
    """The files of tests with a mark; others import what a machine without network may lack."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in tests if f"mark.{mark}" in path.read_text()]


def tests() -> dict[str, Tests]:
    on_gpus, compiled = "tests/comm/test_cuda.py -m gpu -k", "tests/features/test_compile.py"
    # The first is of one step, without which there is no use in the others.
    ranks = sorted(files_with("two_ranks"), key=lambda name: "test_two_ranks" not in name)
    return {
        "ranks": Tests(
            [*ranks, "-m", "gpu and two_ranks"],
            {"FSDP_OVERLAP_RANKS_ON_GPUS": "2"},  # see tests/support/hostile_streams.py
            [*ranks, "-m", "two_ranks and not gpu"],
        ),
        "tests": Tests(
            [*files_with("gpu"), "-m", "gpu and not two_ranks", f"--ignore={compiled}"],
            on_cpu="tests/docs/test_simulated_ranks.py -k train_as_the_unsharded_model".split(),
        ),
        "compiled": Tests([compiled, "-m", "gpu"]),
        # Those that keep comm streams and compute busy with torch's own kernels, which alone it
        # knows.
        "sanitizer": Tests(
            [*on_gpus.split(), "unsharded or stages or wait_for_each_other"],
            {"FSDP_OVERLAP_CUDA_SANITIZER": "1"},  # see tests/support/ranks.py
        ),
        # Few: each allocation waits for the GPU, and memcheck looks at each access.
        "memcheck": Tests(
            [*on_gpus.split(), "training_on_gpus and (layers or nested)"],
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
    }


def python_path() -> str:
    """The library need not be installed, and the server of processes does not know of sys.path."""
    paths = [ROOT, Path(__file__).parent, ROOT / "tests", os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, map(str, paths)))


def run_memcheck(
    args: argparse.Namespace, name: str, limit: float, say: Callable[[str], None], sources: str
) -> Part:
    """As :func:`run_tests`; the page says whether memcheck looked at each access."""
    has_tool = shutil.which(MEMCHECK[0]) is not None
    under = MEMCHECK if has_tool else ()
    part = run_tests(args, name, limit, tests()[name], say, sources, under)
    looked = "under memcheck" if has_tool else f"without {MEMCHECK[0]}, which is not on PATH"
    log = args.out / f"{name}.txt"
    # Those that workers made, whose exit codes nobody sees.
    found = re.findall(r"^=+ (?:Invalid|ERROR SUMMARY: [1-9]).*", log.read_text(), re.MULTILINE)
    if found:
        part |= {"status": "failed", "error": f"{log}: {found[0]}"}
    return part | {"page": f"{part['page']}\n\nWithout caching, {looked}."}


def run_tests(
    args: argparse.Namespace,
    name: str,
    limit: float,
    tests: Tests,
    say: Callable[[str], None],
    sources: str = "",
    under: Sequence[str] = (),
) -> Part:
    """Run tests by a Python that the command `under` runs, except those that passed before. If all
    are skipped the part has failed."""
    # Not strict about options of plugins, which a machine without network may lack.
    options = "-v -o addopts=-rfE -o console_output_style=count -p no:cacheprovider --color=no"
    options += f" -o faulthandler_timeout={max(5.0, limit - 20):.0f}"  # a hang leaves its stacks
    options += " -p support.passed"
    passed = [f"--passed={args.out / 'passed.txt'}", f"--sources={name}-{sources}"]
    chosen = tests.on_cpu if args.device == "cpu" and tests.on_cpu else tests.chosen
    log = args.out / f"{name}.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*under, sys.executable, "-m", "pytest", *options.split(), *passed, *chosen],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), **tests.env},
            stdout=file,
            stderr=subprocess.STDOUT,
            # Else it would ignore the signal below where this process was started to ignore it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            done = _wait(process, limit, log, lambda text: say(f"{name}: {text}"))
        finally:
            process.kill()
    lines = log.read_text().splitlines() or ["no output"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    # What it runs under may have the last word.
    ends = [line for line in lines if re.search(r"\d+ \w+.* in \d.*s\b", line)]
    last = (ends or lines)[-1].strip("= ")
    before = [line for line in lines if re.fullmatch(r"\d+ passed before", line)]
    page = "\n".join([f"`{', '.join([last, *before])}`", *(f"- {line}" for line in failures)])
    if done is None:
        error = f"not done in {limit:.0f} s; {log} has those that passed, which need not run again"
    elif done == 5 and before:  # there is none that did not
        error = ""
    elif done:
        error = f"pytest ended with {done}"
    else:
        error = "" if before or re.search(r"[1-9]\d* passed", last) else f"no test ran: {last}"
    return {"status": "failed" if error else "passed", "page": page, "error": error or None}


RESULT = re.compile(r"^(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED).*\[ *(\d+/\d+)\]$", re.MULTILINE)


def _wait(
    process: subprocess.Popen[bytes], limit: float, log: Path, say: Callable[[str], None]
) -> int | None:
    """The exit code, or None if time was over. Says what failed, the first that passed, and then
    from time to time how many are done."""
    end, shown, said = time.monotonic() + limit, 0, 0.0
    while True:
        try:
            done: int | None = process.wait(0.2)
        except subprocess.TimeoutExpired:
            done = None
        found = RESULT.findall(log.read_text(errors="replace"))
        new, shown = found[shown:], len(found)
        for test, how, count in new:
            if how in ("FAILED", "ERROR"):
                say(f"{count} {how} {test}")
            elif time.monotonic() > said + SHOW_SECONDS:
                said = time.monotonic()
                say(f"{count} {how.lower()} {test}")
        if done is not None:
            return done
        if time.monotonic() > end:
            process.send_signal(signal.SIGINT)  # so that pytest says what has failed
            with suppress(subprocess.TimeoutExpired):
                process.wait(REPORT_SECONDS)
            return None
