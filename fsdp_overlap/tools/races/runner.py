"""Run a program that is written for GPUs, as it is, on the emulated device, and show what it leaves
unordered."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import thread as pools
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.optim import optimizer

from fsdp_overlap.tools.emulator.cuda import NotEmulated, as_cuda
from fsdp_overlap.tools.emulator.device import EmulatedDevice
from fsdp_overlap.tools.emulator.process_groups import real_nccl
from fsdp_overlap.tools.races.report import RaceReport, describe, to_json, write_page
from fsdp_overlap.tools.races.testing import environment, one_of

CLEAN, FOUND, FAILED = 0, 1, 2
"""What a run returns: its exit status."""
_RESULT = "FSDP_OVERLAP_RACES_RESULT"
"""The variable that tells one of several processes where to leave what it found."""


class StepsDone(SystemExit):
    """Ends a program after as many steps as were asked for."""


@dataclass(frozen=True)
class Program:
    """What to run: ``target`` is a file, or a module as for ``python -m``."""

    target: str
    args: Sequence[str] = ()
    is_module: bool = False
    steps: int | None = None
    """After how many steps of one of its optimizers it is ended."""
    allow: Sequence[str] = ()
    """Lines that may do what is found there, as ``"file.py:12"``."""

    def run(self, stepped: Callable[[], object]) -> None:
        """Run it as Python does. ``stepped`` is called after each step of training.

        Raises:
            BaseException: what the program raises.
        """
        before = threading.enumerate()
        path = os.getcwd() if self.is_module else str(Path(self.target).resolve().parent)
        argv = [self.target, *self.args]
        with (
            patch.object(sys, "argv", argv),
            patch.object(sys, "path", [path, *sys.path[1:]]),
            ending_after(self.steps, stepped),
        ):
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
            _join_threads(before)


def _join_threads(before: Sequence[threading.Thread]) -> None:
    """Wait for the threads of a program, as Python does when it ends. Threads of pools wait for
    more work."""
    for thread in threading.enumerate():
        is_of_pool = thread in pools._threads_queues
        if thread not in before and not thread.daemon and not is_of_pool:
            thread.join()


@dataclass
class Result:
    """What a run of a program has shown. ``opaque``: what was not seen within, and where it was
    called first."""

    found: RaceReport
    opaque: dict[str, str]
    error: str = ""
    """Why it could not run."""


@contextmanager
def ending_after(steps: int | None, stepped: Callable[[], object]) -> Iterator[None]:
    """Raise :class:`StepsDone` when an optimizer has taken so many ``steps``. A step within the
    step of another optimizer is none. ``stepped`` is called after those of the first optimizer."""
    depth, taken = 0, Counter[int]()

    def begin(*_: object) -> None:
        nonlocal depth
        depth += 1

    def end(of: Any, *_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            taken[id(of)] += 1
            if id(of) == next(iter(taken)):
                stepped()
            if steps is not None and taken[id(of)] >= steps:
                raise StepsDone(0)

    hooks = (
        optimizer.register_optimizer_step_pre_hook(begin),
        optimizer.register_optimizer_step_post_hook(end),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(
    program: Program, ranks: int | None = None, rank: int = 0, is_real: bool = False
) -> tuple[int, Result]:
    """Run ``program`` as ``rank`` of ``ranks``, of which the others do not exist, or in as many
    processes where ``is_real``. Return the exit status, and what was found."""
    if is_real and "RANK" not in os.environ:
        result = _run_all(program, ranks or 1)
    elif is_real:
        result = _run_real(program)
    else:
        with one_of(ranks, rank, program.allow) as device:
            result = _run_on(device, program)
    status = FAILED if result.error else FOUND if result.found.findings else CLEAN
    return status, result


def _run_on(device: EmulatedDevice, program: Program) -> Result:
    error = ""
    try:
        program.run(device.mark_step)
    except StepsDone:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            error = f"the program ended with exit status {end.code}"
    except Exception as raised:
        error = explain(raised)
    return Result(RaceReport.of(device), device.opaque, error)


_OF_CUDA = re.compile(r"Could not run '([^']+)' with arguments from the '(CUDA|emulated)' backend")
"""What C++ says if an operation gets past the emulated device."""


def explain(error: Exception) -> str:
    """Return why a program could not run, in its own words. Print its traceback without the lines
    that run it."""
    if isinstance(error, NotEmulated):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    began = [i for i, frame in enumerate(frames) if "runpy" in frame.filename]
    frames = traceback.StackSummary(frames[max(began, default=-1) + 1 :])
    if not isinstance(error, SyntaxError):
        sys.stderr.write("Traceback (most recent call last):\n" + "".join(frames.format()))
    text = "".join(traceback.format_exception_only(error)).strip()
    if (missed := _OF_CUDA.search(text)) is not None:
        return f"{missed[1]} on {missed[2]} was called where the emulated device does not see it"
    if isinstance(error, KeyError) and error.args[0] in environment(0, 1, 1):
        return f"{text}: torchrun sets it; give --ranks to be one of several ranks"
    return text


def _run_real(program: Program) -> Result:
    """Run as one of several processes that something has started, as torchrun does.

    Raises:
        RuntimeError: it did not set what torchrun sets.
    """
    if absent := [name for name in ("LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]:
        raise RuntimeError(f"RANK is set, but not {' and '.join(absent)}: set all, or none")
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    rank = int(os.environ["LOCAL_RANK"])
    device = EmulatedDevice(device_type="cuda", index=rank, allow=program.allow)
    with as_cuda(device, devices), real_nccl():
        result = _run_on(device, program)
    if (path := os.environ.get(_RESULT)) is not None:
        Path(path).write_bytes(pickle.dumps(result))
    return result


def _run_all(program: Program, ranks: int) -> Result:
    """Run ``ranks`` processes. Return what all of them found."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = [] if program.steps is None else ["--steps", str(program.steps)]
    options += [f"--allow={line}" for line in program.allow]
    target = ["-m", program.target] if program.is_module else [program.target]
    command = [sys.executable, "-m", "fsdp_overlap.tools.races", "--real", *options, *target]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(rank)) for rank in range(ranks)]
        running = [
            subprocess.Popen(
                [*command, *program.args],
                env=os.environ
                | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
                | environment(rank, ranks, ranks, port)
                | {_RESULT: str(path)},
            )
            for rank, path in enumerate(paths)
        ]
        _wait_for_all(running)
        for rank, path in enumerate(paths):
            if path.exists():
                results.append(pickle.loads(path.read_bytes()))
            else:
                status = running[rank].returncode
                nothing = RaceReport.merged([])
                results.append(Result(nothing, {}, f"the process ended with exit status {status}"))
    errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(results) if each.error]
    opaque: dict[str, str] = {}
    for each in results:
        opaque.update(each.opaque)
    return Result(RaceReport.merged([each.found for each in results]), opaque, "\n".join(errors))


_GRACE = 10.0  # seconds that others have to end when one process has failed


def _wait_for_all(running: Sequence[subprocess.Popen[bytes]]) -> None:
    failed_at = None
    try:
        while any(process.poll() is None for process in running):
            if failed_at is None and any(p.returncode not in (None, CLEAN, FOUND) for p in running):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _GRACE:
                break
            time.sleep(0.05)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()


def report(
    status: int, result: Result, json_path: Path | None = None, page_path: Path | None = None
) -> int:
    """Print a run's result, and write it to the files that are asked for. Return its exit
    status."""
    if _RESULT in os.environ:
        return status  # who started this process prints what all have found
    if result.found.findings:
        print(describe(result.found.findings))
    if json_path is not None:
        told = to_json(result.found) | {"not_seen": result.opaque, "error": result.error}
        json_path.write_text(json.dumps(told, indent=1), encoding="utf-8")
    if page_path is not None:
        write_page(result.found, page_path)
    for what, where in result.opaque.items():
        print(f"not seen: {what}, called at {where}", file=sys.stderr)
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return status
