"""What one GPU can tell of the library: whether it is right, and how it compares with FSDP2.

    tests      the tests marked gpu: at one rank with NCCL, and on simulated ranks
    sanitizer  training again under CUDA's stream sanitizer, which finds unordered accesses
    parity     simulated ranks compute what the unsharded model does
    memory     the allocator's peak of a step, and that it is within its bounds
    overlap    what a profile says is exposed, and that all is hidden that can be
    speed      step times against the larger of compute and communication alone

All but the first two run on simulated ranks alone (`simulated_ranks.py` says what these are and are
not). Takes less than ten minutes and no network. Each part is a process of its own with a time
limit, and one that fails does not stop the next. `--out` then holds results.json, summary.md, the
traces and what the tests wrote.

Ends with 0 if all parts passed, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import output

ROOT = Path(__file__).resolve().parents[2]

# Seconds; together less than ten minutes.
LIMITS = {"tests": 270, "sanitizer": 80, "parity": 40, "memory": 30, "overlap": 60, "speed": 110}

# What all figures are of; `device` is None where there is no GPU.
ABOUT = """
import json, torch
device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}))
"""

# Those that keep the lanes and compute busy with torch's own kernels, which alone it knows.
SANITIZED = ("tests/test_cuda.py", "-k", "unsharded or stages or wait_for_each_other")

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
    forkserver.ensure_running()  # imports while the tests run
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "device": about["device"] or "CPU",
        "torch": about["torch"],
        "cuda": about["cuda"],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "is_of_a_cpu": args.device == "cpu",
        "parts": {},
    }
    for name, limit in LIMITS.items():
        start = time.monotonic()
        if name == "tests":
            part = run_tests(args, name, limit, tests_marked_gpu())
        elif name == "sanitizer":
            # Where torch has no CUDA, nothing runs under it.
            env = {} if args.device == "cpu" else {"TORCH_CUDA_SANITIZER": "1"}
            part = run_tests(args, name, limit, SANITIZED, env)
        else:
            part = run_part(context, name, args, limit)
        part["seconds"] = round(time.monotonic() - start, 1)
        results["parts"][name] = part
        # After each, so that an end from outside leaves what was found.
        (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        (args.out / "summary.md").write_text(summary_of(results))
        print(f"{name}: {part['status']}, {part['seconds']:.0f} s", flush=True)
    print(f"\n{summary_of(results)}\n{args.out / 'results.json'} and summary.md")
    failed = [name for name, part in results["parts"].items() if part["status"] != "passed"]
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
    return parser.parse_args()


# ------------------------------------------------------------------- parts


def run_part(context: Any, name: str, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """What part `name` returned, with `status`: "passed", or "failed" and the `error`."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_part_main, args=(theirs, name, args.device, args.out))
    process.start()
    theirs.close()  # so that a part that died reads as the end of the pipe
    try:
        if not ours.poll(limit):
            return {"status": "failed", "error": f"not done in {limit:.0f} s"}
        result: dict[str, Any] = ours.recv()
        return result
    except EOFError:
        process.join(5)
        return {"status": "failed", "error": f"died with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _part_main(result: Connection, name: str, device: str, folder: Path) -> None:
    try:
        import torch

        import gpu_parts
        from harness import simulated_training

        if device == "cpu":
            torch.set_num_threads(1)
        outcome = getattr(gpu_parts, name)(simulated_training.SCALES[device], device, folder)
        result.send({"status": "passed", "figures": outcome.figures, "page": outcome.page})
    except BaseException:
        result.send({"status": "failed", "error": traceback.format_exc()})


def tests_marked_gpu() -> list[str]:
    """The files that have such; others import what a machine without network may lack."""
    tests = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in tests if "pytest.mark.gpu" in path.read_text()]


def run_tests(
    args: argparse.Namespace,
    name: str,
    limit: float,
    chosen: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Those `chosen` of the tests marked gpu, which are skipped where there is none."""
    # Not strict about options of plugins, which a machine without network may lack.
    options = "-m gpu -q -o addopts=-rfE -p no:cacheprovider --color=no".split()
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    log = args.out / f"{name}.txt"
    with log.open("w") as file:
        try:
            done: subprocess.CompletedProcess[bytes] | None = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            done = None
    lines = log.read_text().splitlines() or ["no output"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    page = "\n".join([f"`{lines[-1].strip('= ')}`", *(f"- {line}" for line in failures)])
    if done is None:
        error = f"not done in {limit:.0f} s; {log} has a dot for each that passed"
        return {"status": "failed", "error": error, "page": page}
    if done.returncode:
        return {"status": "failed", "error": f"pytest ended with {done.returncode}", "page": page}
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
    if results["is_of_a_cpu"]:
        lines += [ON_A_CPU, ""]
    for name, part in results["parts"].items():
        lines += [f"## {name}: {part['status']} ({part['seconds']:.0f} s)", ""]
        if "page" in part:
            lines += [part["page"], ""]
        if "error" in part:
            lines += ["```", part["error"].rstrip(), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
