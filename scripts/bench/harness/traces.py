"""Traces of steps, by torch's profiler."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


def trace(step: Callable[[], object], steps: int, path: Path | None) -> None:
    """Run steps under the profiler on all ranks, and write the trace of those that have a `path`.
    Collective."""
    dist.barrier()
    # With shapes, which tell how many bytes FSDP2's collectives move, and of what operations are.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.barrier()
        for _ in range(steps):
            step()
        dist.barrier()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))


class Exposed:
    """Milliseconds of a step in which a collective runs and no kernel computes, while `run` does so
    many steps on a GPU. A process of its own reads the trace, so that this one may go on."""

    def __init__(self, run: Callable[[], object], steps: int) -> None:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
        handle, path = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        profiler.export_chrome_trace(path)
        self._reader = subprocess.Popen(
            [sys.executable, "-c", READ, path, str(steps)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._found: float | None = None

    def is_known(self) -> bool:
        return self._reader.poll() is not None

    def value(self) -> float:
        """Wait for it. NaN if the trace cannot be read, of which its reader has written why."""
        if self._found is None:
            said, _ = self._reader.communicate()
            self._found = float(said or "nan")
        return self._found


READ = """
import os, sys
from fsdp_overlap.tools.profiling import read_report
path, steps = sys.argv[1], int(sys.argv[2])
rank = read_report(path, steps=steps).slowest
os.remove(path)
print(rank.exposed_time / steps / 1e3)
"""
