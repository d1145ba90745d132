"""Show what one GPU can tell of the library: whether it is right, and how it compares with FSDP2.

docs/gpu.md says what each part shows; `memcheck` runs only where `--parts` names it. All from
training to memory run on simulated ranks alone (`simulated_ranks.py` says what these are and are
not). No part needs a network. Each is a process of its own with a time limit, and one that fails
does not stop the next. Each figure is printed and written as it is found: `--out` holds
results.json, summary.md and what the tests wrote. What passed there with the same sources, on the
same device, is not repeated.

Ends with 0 if no part failed, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_tests import ROOT, Part, python_path, run_memcheck, run_tests, tests
from harness import output
from harness.sources import digest

STARTED = time.monotonic()
BUDGET = 560
"""Seconds for all parts. A part gets no more than is left."""
STACKS_SECONDS = 5.0
"""How long a part that is not done may take to write its stacks."""
DRIVER = "driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,persistence_mode"

# Seconds. What only a GPU can tell comes first.
LIMITS = {
    "ranks": 130,
    "training": 180,
    "speed": 90,
    "overlap": 60,
    "memory": 40,
    "tests": 400,
    "compiled": 90,
    "sanitizer": 120,
    "memcheck": 300,
}
OPTIONAL = ("memcheck",)
"""Parts that run only where they are asked for."""
FACTS_SECONDS = 60

ON_A_CPU = (
    "**These are figures of a CPU**, on which ranks are simulated by sleeping and nothing "
    "overlaps. They say that the suite runs, and nothing about the library."
)


def main() -> None:
    args = parse()
    os.environ["PYTHONPATH"] = python_path()
    # Parts start from a process that imports torch while the facts are found, or the first tests
    # run, whose ranks have a process like it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpu_parts", "torch._dynamo"])  # which FSDP2 imports late
    if args.parts[0] not in tests():
        forkserver.ensure_running()
    command = [sys.executable, str(Path(__file__).with_name("gpu_facts.py")), args.device]
    about = json.loads(subprocess.check_output(command, timeout=FACTS_SECONDS))
    forkserver.ensure_running()
    if about["device"] is None:
        output.fail(
            f"no CUDA device: torch {about['torch']} finds none; --device cpu tries out the suite"
        )
    suite = Suite(args, about)
    for name in args.parts:
        suite.run(name, context)
    print(f"\n{summary_of(suite.results)}\n{suite.file} and summary.md")
    failed = [name for name in args.parts if suite.results["parts"][name]["status"] == "failed"]
    raise SystemExit(1 if failed else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: the same at a tiny scale, to try out the suite itself",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu_suite"), help="folder for its files"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=LIMITS,
        help="these alone, in this order (default: all but " + ", ".join(OPTIONAL) + ")",
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds for all parts (default: %(default)s)"
    )
    parser.add_argument(
        "--all", action="store_true", help="forget what passed before, and run it again"
    )
    args = parser.parse_args()
    of_cuda = {name for name, each in tests().items() if not each.on_cpu}
    if args.device == "cpu" and (found := of_cuda.intersection(args.parts or ())):
        parser.error(f"--device cpu has no part {min(found)}: it runs on CUDA alone")
    left_out = of_cuda if args.device == "cpu" else OPTIONAL
    args.parts = args.parts or [name for name in LIMITS if name not in left_out]
    args.out = args.out.resolve()
    return args


class Suite:
    """Results so far, which are written with each that is new."""

    def __init__(self, args: argparse.Namespace, about: dict[str, Any]) -> None:
        self.args = args
        self.file = args.out / "results.json"
        args.out.mkdir(parents=True, exist_ok=True)
        if args.all:
            for file in (self.file, args.out / "passed.txt"):
                file.unlink(missing_ok=True)
        library, bench = ROOT / "fsdp_overlap", ROOT / "scripts" / "bench"
        on = [str(about[name]) for name in ("device", "torch", "nccl")]
        self.sources_of_tests = "-".join(
            [*on, digest(library, ROOT / "tests" / "support", bench / "harness")]
        )
        self.sources_of_parts = "-".join([*on, digest(library, bench)])
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        is_same = all(before.get(name) == about[name] for name in ("device", "torch", "nccl"))
        self.results = about | {
            "driver": driver() if args.device == "cuda" else None,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "is_of_a_cpu": args.device == "cpu",
            "parts": before["parts"] if is_same else {},
        }
        self.say(facts_of(self.results))
        self.write()

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - STARTED:3.0f} s] {text}", flush=True)

    def write(self) -> None:
        """So that an end from outside leaves what is known."""
        new = self.file.with_suffix(".new")  # an end while it is written leaves the one before
        new.write_text(json.dumps(self.results, indent=2) + "\n")
        new.replace(self.file)
        (self.args.out / "summary.md").write_text(summary_of(self.results))

    def run(self, name: str, context: Any) -> None:
        known = self.results["parts"].get(name, {})
        is_of_tests = name in tests()
        sources = self.sources_of_tests if is_of_tests else self.sources_of_parts
        if not is_of_tests and known.get("status") == "passed" and known["sources"] == sources:
            self.say(f"{name}: passed before, with the same sources")
            return
        start = time.monotonic()
        limit = min(LIMITS[name], STARTED + self.args.budget - start)

        def note(part: Part) -> None:
            said = part.pop("said", "")
            seconds = round(time.monotonic() - start, 1)
            self.results["parts"][name] = part | {"seconds": seconds, "sources": sources}
            self.write()
            self.say(f"{name}: {said or part['status']}, {seconds:.0f} s")

        if limit < 10:
            error = f"not begun: {self.args.budget:.0f} s were over"
            # With what a command before has found, unless that is of other sources.
            found = known if known.get("sources") == sources else {}
            part = found | {"status": "failed", "error": error}
        elif name == "memcheck":
            part = run_memcheck(self.args, name, limit, self.say, sources)
        elif is_of_tests:
            part = run_tests(self.args, name, limit, tests()[name], self.say, sources)
        else:
            part = run_part(context, name, self.args, limit, note)
        note(part)


def driver() -> dict[str, str] | None:
    """What `nvidia-smi` says of the first GPU, if it is there."""
    try:
        said = subprocess.check_output(
            ["nvidia-smi", f"--query-gpu={DRIVER}", "--format=csv,noheader"], text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(DRIVER.split(","), said.splitlines()[0].split(", "), strict=False))


# ------------------------------------------------------------------- parts


def run_part(
    context: Any,
    name: str,
    args: argparse.Namespace,
    limit: float,
    note: Callable[[Part], None],
) -> Part:
    """What part `name` found, with `status`: "passed", or "failed" and the `error`. Calls `note`
    with what it has found so far."""
    ours, theirs = context.Pipe(duplex=False)
    stacks = args.out / f"{name}_stacks.txt"
    process = context.Process(target=_part_main, args=(theirs, name, args, limit, stacks))
    end = time.monotonic() + limit + STACKS_SECONDS
    process.start()
    theirs.close()  # so that a part that died reads as the end of the pipe
    part: Part = {"status": "failed", "error": "not done"}
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            part |= ours.recv()
            if part["status"] == "passed" or part["error"] != "not done":
                return part
            note(part)
    except EOFError:
        process.join(STACKS_SECONDS)
    finally:
        process.kill()
        process.join()
        found = stacks.read_text() if stacks.exists() else ""
        stacks.unlink(missing_ok=True)
    error = f"not done in {limit:.0f} s" if found else f"died with exit code {process.exitcode}"
    return part | {"error": f"{error}\n{found}".rstrip()}


def _part_main(
    result: Connection, name: str, args: argparse.Namespace, limit: float, stacks: Path
) -> None:
    import torch

    import gpu_parts

    with stacks.open("w") as file:
        faulthandler.dump_traceback_later(limit, exit=True, file=file)
        try:
            if args.device == "cpu":
                torch.set_num_threads(1)
            getattr(gpu_parts, name)(
                args.device,
                lambda outcome: result.send(outcome._asdict()),
            )
            done: Part = {"status": "passed", "error": None}
            if args.device == "cuda":
                stats = torch.cuda.memory_stats()
                done["allocator"] = {name: stats.get(name) for name in ALLOCATOR}
            result.send(done)
        except BaseException:
            result.send({"status": "failed", "error": traceback.format_exc()})


# Of torch's allocator, over the whole part.
ALLOCATOR = (
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
    "num_device_alloc",
    "num_device_free",
)


# ----------------------------------------------------------------- summary


def facts_of(results: Mapping[str, Any]) -> str:
    keys = {"torch": "torch", "CUDA": "cuda", "NCCL": "nccl"}
    versions = [f"{label} {results[key]}" for label, key in keys.items() if results[key]]
    return f"{results['device']}, {', '.join(versions)}; {results['speeds']}"


def summary_of(results: dict[str, Any]) -> str:
    """`results` as Markdown."""
    title = "# The GPU suite, tried out on a CPU" if results["is_of_a_cpu"] else "# One GPU"
    lines = [title, "", f"{facts_of(results)}, {results['date']}", ""]
    if results["driver"]:
        lines += [", ".join(f"{name} {value}" for name, value in results["driver"].items()), ""]
    if results["is_of_a_cpu"]:
        lines += [ON_A_CPU, ""]
    for name, part in results["parts"].items():
        lines += [f"## {name}: {part['status']} ({part['seconds']:.0f} s)", ""]
        if "page" in part:
            lines += [part["page"], ""]
        if part.get("allocator"):
            facts = [f"{name} {value}" for name, value in part["allocator"].items()]
            lines += [f"Allocator: {', '.join(facts)}", ""]
        if part.get("error"):
            lines += ["```", part["error"].rstrip(), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
