"""What one GPU can tell of the library: whether it is right, and how it compares with FSDP2.

    parity     simulated ranks compute what the unsharded model does
    overlap    what a profile says is exposed, and that all is hidden that can be
    memory     the allocator's peak of a step, and that it is within its bounds
    training   whole steps of a model of 1.2 billion parameters, beside FSDP2, DDP and unsharded
    speed      step times against the larger of compute and communication alone
    tests      the tests marked gpu: at one rank with NCCL, and on simulated ranks
    sanitizer  training again under CUDA's stream sanitizer, which finds unordered accesses

and, only where `--parts` names them:

    memcheck   training without torch's caching allocator, so that a read of freed memory is a
               fault; under compute-sanitizer if that is on PATH
    two_ranks  training of two ranks with NCCL on one GPU, which takes NCCL 2.30

All from parity to speed run on simulated ranks alone (`simulated_ranks.py` says what these are and
are not). Takes less than ten minutes and no network. Each part is a process of its own with a time
limit, and one that fails does not stop the next. `--out` then holds results.json, summary.md, the
traces and what the tests wrote; what a part found is written as it is found.

Ends with 0 if no part failed, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import output

ROOT = Path(__file__).resolve().parents[2]

# Seconds. What only a GPU can tell comes first.
LIMITS = {
    "parity": 60,
    "overlap": 80,
    "memory": 40,
    "training": 140,
    "speed": 140,
    "tests": 400,
    "sanitizer": 120,
    "memcheck": 300,
    "two_ranks": 150,
}
OPTIONAL = ("memcheck", "two_ranks")
"""Parts that run only where they are asked for."""
BUDGET = 560
"""Seconds for all parts. A part gets no more than is left."""
STACKS_SECONDS = 2.0
"""How long a part that is not done may write its stacks."""
REPORT_SECONDS = 10.0
"""How long tests that are not done may write what has failed."""

# What all figures are of; `device` is None where there is no GPU.
ABOUT = """
import json, torch
device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
nccl = ".".join(map(str, torch.cuda.nccl.version())) if device else None
names = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}
print(json.dumps(names))
"""
DRIVER = "driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,persistence_mode"

# Those that keep the comm streams and compute busy with torch's own kernels, which alone it knows.
ON_GPUS = "tests/comm/test_cuda.py -m gpu -k".split()
SANITIZED = [*ON_GPUS, "unsharded or stages or wait_for_each_other"]
SANITIZE = {"FSDP_OVERLAP_CUDA_SANITIZER": "1"}  # see tests/support/ranks.py

# Few: each allocation waits for the GPU, and memcheck looks at each access.
MEMCHECKED = [*ON_GPUS, "training_on_gpus and (layers or nested)"]
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
MEMCHECK = "compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1".split()

# The first that hangs ends the part: others would, too.
BY_TWO_RANKS = "tests/comm/test_cuda.py -m gpu -x -k".split()
BY_TWO_RANKS += ["collectives_of_nccl or (training_on_gpus and layers) or raised or clipped"]
TWO_RANKS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "8",  # so that the kernels of both find room
    "FSDP_OVERLAP_RANKS_ON_GPUS": "2",  # see tests/support/hostile_streams.py
}

# What the suite is tried out with where there is no GPU: workers start, and simulated ranks train.
TRIED_OUT = "tests/docs/test_simulated_ranks.py -k train_as_the_unsharded_model".split()

ON_A_CPU = (
    "**These are figures of a CPU**, on which ranks are simulated by sleeping and nothing "
    "overlaps. They say that the suite runs, and nothing about the library."
)


def main() -> None:
    args = parse()
    # The library need not be installed, and the server of processes does not know of sys.path.
    paths = [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # In a process of its own: parts start from one that has imported torch, but has not touched the
    # GPU.
    about = json.loads(subprocess.check_output([sys.executable, "-c", ABOUT]))
    if args.device == "cuda" and about["device"] is None:
        output.fail(
            f"no CUDA device: torch {about['torch']} finds none; --device cpu tries out the suite"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpu_parts", "torch._dynamo"])  # which FSDP2 imports late
    forkserver.ensure_running()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "device": about["device"] or "CPU",
        "torch": about["torch"],
        "cuda": about["cuda"],
        "nccl": about["nccl"],
        "driver": driver() if about["device"] else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "is_of_a_cpu": args.device == "cpu",
        "parts": {},
    }
    end = time.monotonic() + args.budget
    for name in args.parts:
        start = time.monotonic()
        limit = min(LIMITS[name], end - start)

        def note(part: dict[str, Any], name: str = name, start: float = start) -> None:
            """Writes what is known of the part, so that an end from outside leaves it."""
            part["seconds"] = round(time.monotonic() - start, 1)
            results["parts"][name] = part
            (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
            (args.out / "summary.md").write_text(summary_of(results))

        if limit < 10:
            part = {"status": "failed", "error": f"not begun: {args.budget} s were over"}
        elif name == "tests":
            part = run_tests(args, name, limit, tests_of(args.device))
        elif name == "sanitizer":
            part = run_tests(args, name, limit, SANITIZED, SANITIZE)
        elif name == "memcheck":
            part = run_memcheck(args, name, limit)
        elif name == "two_ranks" and not has_ranks_on_one_gpu(about["nccl"]):
            reason = f"NCCL {about['nccl']} refuses two ranks on one GPU; 2.30 or newer takes them"
            part = {"status": "skipped", "error": reason}
        elif name == "two_ranks":
            part = run_tests(args, name, limit, BY_TWO_RANKS, TWO_RANKS)
        else:
            part = run_part(context, name, args, limit, note)
        note(part)
        print(f"{name}: {part['status']}, {part['seconds']:.0f} s", flush=True)
    print(f"\n{summary_of(results)}\n{args.out / 'results.json'} and summary.md")
    failed = [name for name, part in results["parts"].items() if part["status"] == "failed"]
    raise SystemExit(1 if failed else 0)


def driver() -> dict[str, str] | None:
    """What `nvidia-smi` says of the first GPU, if it is there."""
    try:
        said = subprocess.check_output(
            ["nvidia-smi", f"--query-gpu={DRIVER}", "--format=csv,noheader"], text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(DRIVER.split(","), said.splitlines()[0].split(", "), strict=False))


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
    args = parser.parse_args()
    of_cuda = {"sanitizer", *OPTIONAL}
    if args.device == "cpu" and (found := of_cuda.intersection(args.parts or ())):
        parser.error(f"--device cpu has no part {min(found)}: it runs on CUDA alone")
    left_out = of_cuda if args.device == "cpu" else OPTIONAL
    args.parts = args.parts or [name for name in LIMITS if name not in left_out]
    return args


# ------------------------------------------------------------------- parts


def run_part(
    context: Any,
    name: str,
    args: argparse.Namespace,
    limit: float,
    note: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """What part `name` found, with `status`: "passed", or "failed" and the `error`. Calls `note`
    with what it has found so far."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_part_main, args=(theirs, name, args.device, args.out))
    end = time.monotonic() + limit
    process.start()
    theirs.close()  # so that a part that died reads as the end of the pipe
    part: dict[str, Any] = {"status": "failed", "error": "not done"}
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            part |= ours.recv()
            if part["status"] == "passed" or part["error"] != "not done":
                return part
            note(part)
        return part | {"error": f"not done in {limit:.0f} s\n{_stacks(process, args.out, name)}"}
    except EOFError:
        process.join(5)
        return part | {"error": f"died with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        stacks = _stacks_file(args.out, name)
        if stacks.exists() and not stacks.stat().st_size:
            stacks.unlink()


def _stacks(process: Any, folder: Path, name: str) -> str:
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(STACKS_SECONDS)
    file = _stacks_file(folder, name)
    return file.read_text() if file.exists() else "(no stacks: it had not begun)"


def _stacks_file(folder: Path, name: str) -> Path:
    return folder / f"{name}_stacks.txt"


def _part_main(result: Connection, name: str, device: str, folder: Path) -> None:
    try:
        with _stacks_file(folder, name).open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            _run_part(result, name, device, folder)
    except BaseException:
        result.send({"status": "failed", "error": traceback.format_exc()})


def _run_part(result: Connection, name: str, device: str, folder: Path) -> None:
    import torch

    import gpu_parts
    from harness import simulated_training

    if device == "cpu":
        torch.set_num_threads(1)

    def tell(outcome: gpu_parts.Outcome) -> None:
        result.send({"figures": outcome.figures, "page": outcome.page})

    getattr(gpu_parts, name)(simulated_training.SCALES[device], device, folder, tell)
    done: dict[str, Any] = {"status": "passed", "error": None}
    if device == "cuda":
        stats = torch.cuda.memory_stats()
        done["allocator"] = {name: stats.get(name) for name in ALLOCATOR}
    result.send(done)


# Of torch's allocator, over the whole part.
ALLOCATOR = (
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
    "num_device_alloc",
    "num_device_free",
)


def tests_of(device: str) -> list[str]:
    """The tests of a GPU. Where there is none, those that the suite is tried out with."""
    return [*tests_marked_gpu(), "-m", "gpu"] if device == "cuda" else TRIED_OUT


def tests_marked_gpu() -> list[str]:
    """The files that have such; others import what a machine without network may lack."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in tests if "pytest.mark.gpu" in path.read_text()]


def has_ranks_on_one_gpu(nccl: str | None) -> bool:
    return nccl is not None and tuple(map(int, nccl.split(".")[:2])) >= (2, 30)


def run_memcheck(args: argparse.Namespace, name: str, limit: float) -> dict[str, Any]:
    """As :func:`run_tests`; the page says whether memcheck looked at each access."""
    has_tool = shutil.which(MEMCHECK[0]) is not None
    part = run_tests(args, name, limit, MEMCHECKED, UNCACHED, MEMCHECK if has_tool else ())
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
    chosen: Sequence[str],
    env: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
) -> dict[str, Any]:
    """The tests that `chosen` chooses, by a Python that the command `under` runs. If all are
    skipped the part has failed."""
    # Not strict about options of plugins, which a machine without network may lack.
    options = "-q -o addopts=-rfE -p no:cacheprovider --color=no".split()
    options += [
        "-o",
        f"faulthandler_timeout={max(5.0, limit - 20):.0f}",
    ]  # a hang leaves its stacks
    command = [*under, sys.executable, "-m", "pytest", *options, *chosen]
    log = args.out / f"{name}.txt"
    with log.open("w") as file:
        tests = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            # Else it would ignore the signal below where this process was started to ignore it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            done: int | None = tests.wait(limit)
        except subprocess.TimeoutExpired:
            done = None
            tests.send_signal(signal.SIGINT)  # so that pytest says what has failed
            with suppress(subprocess.TimeoutExpired):
                tests.wait(REPORT_SECONDS)
            tests.kill()
    lines = log.read_text().splitlines() or ["no output"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    # What it runs under may have the last word.
    ends = [line for line in lines if re.search(r"\d+ \w+.* in \d.*s\b", line)]
    last = (ends or lines)[-1]
    page = "\n".join([f"`{last.strip('= ')}`", *(f"- {line}" for line in failures)])
    if done is None:
        error = f"not done in {limit:.0f} s; {log} has a dot for each that passed"
        return {"status": "failed", "error": error, "page": page}
    if done:
        return {"status": "failed", "error": f"pytest ended with {done}", "page": page}
    if not re.search(r"[1-9]\d* passed", last):
        return {"status": "failed", "error": f"no test ran: {last}", "page": page}
    return {"status": "passed", "page": page}


# ----------------------------------------------------------------- summary


def summary_of(results: dict[str, Any]) -> str:
    """`results` as Markdown."""
    cuda = f", CUDA {results['cuda']}" if results["cuda"] else ""
    lines = [
        "# One GPU" if not results["is_of_a_cpu"] else "# The GPU suite, tried out on a CPU",
        "",
        f"{results['device']}, torch {results['torch']}{cuda}, {results['date']}",
        "",
    ]
    if results["driver"]:
        facts = [f"{name} {value}" for name, value in results["driver"].items()]
        lines += [f"NCCL {results['nccl']}; {', '.join(facts)}", ""]
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
