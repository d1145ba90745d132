"""Traces of steps, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


def trace(step: Callable[[], object], steps: int, path: Path | None) -> None:
    """Run steps under the profiler on all ranks, and write the trace of those that have a `path`.
    Collective."""
    dist.barrier()
    # With shapes, which tell how many bytes FSDP2's collectives move.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.barrier()
        for _ in range(steps):
            step()
        dist.barrier()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
