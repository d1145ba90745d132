"""Starts the processes of the runs that are compared, one way after the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from fsdp_overlap.tools.comparison.program import ProgramRun, RankResult, result_path
from fsdp_overlap.tools.races.testing import environment

_GRACE = 15.0
"""Seconds that other ranks have to end when one has failed."""
_POLL = 0.05
_MODULE = "fsdp_overlap.tools.comparison.program"


@dataclass(frozen=True)
class Ranks:
    """The processes that this one starts in each run.

    Attributes:
        count: how many ranks a run has.
        joined: the store of the ranks that torchrun has started, each of which starts one process
            of a run. ``None`` if this process starts all.
        timeout: seconds that a run may take.
    """

    count: int
    joined: dist.Store | None = None
    timeout: float = 1800.0
    _runs: list[Path] = field(default_factory=list)

    @classmethod
    def of_torchrun(cls, timeout: float = 1800.0) -> Ranks:
        """Return the ranks of the torchrun that started this process."""
        store, _, count = next(dist.rendezvous("env://"))
        return cls(count, dist.PrefixStore("fsdp_overlap_compare", store), timeout)

    @property
    def is_first(self) -> bool:
        """Whether this process reports."""
        return self.joined is None or os.environ["RANK"] == "0"

    def run(self, run: ProgramRun) -> list[RankResult]:
        """Run a program on all ranks. Return what each has seen, on every rank that torchrun
        started, where they share the folder."""
        run.folder.mkdir(parents=True, exist_ok=True)
        path = run.folder / "run.json"
        self._runs.append(path)
        if self.is_first:
            run.write(path)
        processes = {
            rank: _start(path, variables, run.folder / f"rank-{rank}.log")
            for rank, variables in self._variables().items()
        }
        ended = _wait(list(processes.values()), self.timeout)
        if self.joined is not None:
            _meet(self.joined, f"end of run {len(self._runs)}", self.count)
        return [_result(run.folder, rank, processes.get(rank), ended) for rank in range(self.count)]

    def _variables(self) -> dict[int, dict[str, str]]:
        """Return the variables of each process that this one starts, by rank."""
        if self.joined is None:
            port = _free_port()
            return {
                rank: environment(rank, self.count, self.count, port) for rank in range(self.count)
            }
        name = f"port of run {len(self._runs)}"
        if self.is_first:
            self.joined.set(name, str(_free_port()))
        port = int(self.joined.get(name))
        # The store of torchrun has the keys of the run before.
        own = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        return {int(os.environ["RANK"]): own}


def _start(run: Path, variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    fixed = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # the order of sets
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(run)],
            env=os.environ | fixed | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> str | None:
    """Wait until all have ended. Return why they were ended, if they were."""
    begun = time.monotonic()
    failed: float | None = None
    try:
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            if failed is None and any(process.returncode for process in processes):
                failed = now
            if failed is not None and now - failed > _GRACE:
                return "another rank had failed, and this one did not end"
            if now - begun > timeout:
                return f"it did not end within {timeout:g} seconds"
            time.sleep(_POLL)
        return None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _result(
    folder: Path, rank: int, process: subprocess.Popen[bytes] | None, ended: str | None
) -> RankResult:
    path = result_path(folder, rank)
    if path.exists():
        result = RankResult.read(path)
    else:
        status = None if process is None else process.returncode
        result = RankResult(rank, error=f"the process ended with exit status {status}")
    if ended is not None and process is not None and process.returncode == -9:
        result.error = result.error or ended
    return result


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _meet(store: dist.Store, name: str, ranks: int) -> None:
    if store.add(name, 1) == ranks:
        store.set(f"{name}: all", "")
    store.wait([f"{name}: all"])


def last_words(folder: Path, rank: int, lines: int = 12) -> str:
    """Return the end of what a rank has printed."""
    path = folder / f"rank-{rank}.log"
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
