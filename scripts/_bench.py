"""What the benchmark scripts share: launching ranks, limiting a link, showing what was measured.

Figures and ratios are those of `fsdp_overlap.cli.measurement`, which says what they mean.

Nothing here is part of the library. A script launches copies of itself as ranks (`launch_ranks`),
each copy finds that it is a rank (`is_rank`) and joins the others (`join_ranks`).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from fsdp_overlap.cli.markdown import markdown_table
from fsdp_overlap.cli.measurement import (
    Figure,
    Measurement,
    Spread,
    interval,
    number,
    three_decimals,
)

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


# ---------------------------------------------------------------- figures


def figures_of(
    quantity: str,
    unit: str,
    samples: Mapping[str, Sequence[float]],
    *,
    at: float | None = None,
    at_most: Mapping[str, float] | None = None,
) -> list[Figure]:
    """`quantity` of each system in `samples`, with the target of those in `at_most`."""
    return [
        Figure(quantity, system, unit, Spread.of(values), at, (at_most or {}).get(system))
        for system, values in samples.items()
    ]


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """The options that `publish` follows."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them: .png or .svg")


def repeated_argv() -> list[str]:
    """Script and arguments that repeat this run, from the repository."""
    script, *arguments = sys.argv
    kept: list[str] = []
    is_output = False
    for argument in arguments:
        is_value, is_output = is_output, argument in ("--json", "--plot")
        if not (is_value or is_output or argument.startswith(("--json=", "--plot="))):
            kept.append(argument)
    return [f"scripts/{Path(script).name}", *kept]


def publish(measurement: Measurement, json_file: Path | None, plot_file: Path | None) -> None:
    """Print `measurement`, and write it where that was asked for."""
    print(measurement.about + "\n")
    for table in tables(measurement):
        print(table + "\n")
    for ratio in measurement.ratios:
        where = "" if ratio.at is None else f" at {number(ratio.at)}"
        line = f"{ratio.of} / {ratio.to}, {ratio.quantity}{where}: "
        line += three_decimals(ratio.spread.median)
        if spread := interval(ratio.spread, three_decimals):
            line += f" ({spread})"
        if ratio.at_most is not None:
            line += f"; target: at most {ratio.at_most:g}"
        print(line)
    for claim in measurement.claims:
        print(f"{'holds' if claim.holds else 'BROKEN'}: {claim.text}: {claim.found}")
    if json_file is not None:
        measurement.write(json_file)
    if plot_file is not None:
        from fsdp_overlap.cli.bench_plot import plot  # needs matplotlib, as nothing else here

        plot(measurement, measurement.about, plot_file)


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


def alternate(
    systems: Mapping[str, Callable[[], float]], rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Measure every system once per round, so that drift of the machine hits all of them alike.

    Each callable runs once and returns its sample; the first `warmup` rounds are thrown away. The
    order is rotated from round to round, so that nobody always runs after the same neighbour, and
    garbage of one is collected before the next begins, so that nobody pays for it.
    """
    names = list(systems)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            sample = systems[name]()
            if index >= warmup:
                samples[name].append(sample)
    return samples


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Keep the cyclic collector out of the timings: it would hit whichever system runs then.

    What lives now is left out of explicit collections inside, which makes those cheap.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def fail(message: str, code: int = 2) -> NoReturn:
    """End the program with one line on stderr."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(code)


# ----------------------------------------------------------------- memory

# With this environment freed blocks of 64 KiB and more go back to the system at once.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class PeakMemory:
    """How far resident memory rises above what it is on entry: `nbytes`, known after the end.

    The kernel keeps the peak. Where it may not be reset, a thread looks once a millisecond.
    """

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)
        self._done = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:
            self._watcher = threading.Thread(target=self._watch)
            self._watcher.start()
        self._before = self._peak = resident("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._watcher is None:
            self._peak = resident("VmHWM")
        else:
            self._done.set()
            self._watcher.join()
        self.nbytes = max(0, self._peak - self._before)

    def _watch(self) -> None:
        while not self._done.wait(1e-3):
            self._peak = max(self._peak, resident("VmRSS"))


class AllocatorPeak:
    """The same of what PyTorch's allocator counts on the current GPU."""

    def __enter__(self) -> AllocatorPeak:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: Any) -> None:
        import torch

        self.nbytes = torch.cuda.max_memory_allocated() - self._before


def resident(field: str) -> int:
    """`field` of this process's status, such as VmRSS, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


# ------------------------------------------------------------------ ranks


def is_rank() -> bool:
    """Whether this process is one of the ranks that `launch_ranks` started."""
    return "BENCH_STORE" in os.environ


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def launch_ranks(
    world_size: int,
    argv: Sequence[str],
    timeout_s: float,
    extra_env: Mapping[str, str] | None = None,
    script: Path | None = None,
) -> Any:
    """Run `script` (this one, if not given) as `world_size` gloo ranks and return what rank 0
    reported.

    Ranks meet in a file store and talk over the loopback device of the caller's network
    namespace. They die with this process, when one of them fails, or after `timeout_s` seconds.
    """
    # So that `finally` and `with` tidy up as they do after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    script = (script or Path(sys.argv[0])).resolve()
    with tempfile.TemporaryDirectory(prefix="fsdp_overlap_bench_") as folder:
        result = Path(folder) / "result.json"
        env = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "BENCH_STORE": str(Path(folder) / "store"),
            "BENCH_RESULT": str(result),
            "WORLD_SIZE": str(world_size),
            **(extra_env or {}),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), *argv],
                env={**env, "RANK": str(rank)},
                preexec_fn=_die_with_parent,
            )
            for rank in range(world_size)
        ]
        try:
            deadline = time.monotonic() + timeout_s
            while any(rank.poll() is None for rank in ranks):
                if any(rank.returncode for rank in ranks):
                    fail("a rank failed; its error is above", code=1)
                if time.monotonic() > deadline:
                    fail(f"the ranks did not finish in {timeout_s:.0f} s", code=1)
                time.sleep(0.05)
            if any(rank.returncode for rank in ranks):
                fail("a rank failed; its error is above", code=1)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return json.loads(result.read_text()) if result.exists() else None


def join_ranks(timeout_s: float = 120.0) -> tuple[int, int]:
    """Initialize gloo among the ranks of `launch_ranks`; returns (rank, world size)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.environ["BENCH_STORE"], world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    torch.manual_seed(0)  # every rank builds the same model
    return rank, world_size


def of_slowest_rank(mine: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The largest sample of all ranks in each round, of each system; the rounds of all ranks are
    the same. Collective."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(mine))
    return {
        name: [max(samples) for samples in zip(*(one[name] for one in everyone), strict=True)]
        for name in mine
    }


def report(result: Any) -> None:
    """Hand `result` (anything JSON can hold) to the process that launched this rank."""
    Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(result))


# ------------------------------------------------------------------- link


class LinkError(RuntimeError):
    """The link cannot be limited here; the message says what is missing."""


def _command(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def limited_link(rate: str) -> Iterator[None]:
    """Put this thread, and the processes it starts, where loopback carries at most `rate`.

    `rate` is in the words of `tc` ("2gbit"). Both directions share it, as all loopback traffic
    leaves through one queue. The network namespace is a nameless one: the kernel removes it with
    the last process inside, so that not even SIGKILL can leave one behind. Raises LinkError
    where the rights or the programs are missing.
    """
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise LinkError(f"limiting the link needs {' and '.join(missing)} (package iproute2)")
    if os.geteuid() != 0:
        raise LinkError("limiting the link needs root: it makes a network namespace")
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise LinkError(f"cannot make a network namespace: {reason}")
        try:
            _command("ip", "link", "set", "lo", "up")
            tbf = f"tc qdisc add dev lo root tbf rate {rate} burst 512kb limit 4mb"
            _command(*tbf.split())
            yield
        finally:
            libc.setns(home, _CLONE_NEWNET)
    finally:
        os.close(home)


def launch_on_link(
    args: argparse.Namespace,
    argv: Sequence[str],
    extra_env: Mapping[str, str] | None = None,
    script: Path | None = None,
) -> Any:
    """`launch_ranks` by the options `ranks` and `timeout`, over a link limited to `rate` unless
    there is `no_limit`."""
    if args.no_limit:
        return launch_ranks(args.ranks, argv, args.timeout, extra_env, script)
    try:
        with limited_link(args.rate):
            return launch_ranks(args.ranks, argv, args.timeout, extra_env, script)
    except LinkError as error:
        fail(f"{error}; --no-limit runs on plain loopback")
