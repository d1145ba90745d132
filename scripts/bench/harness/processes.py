"""Ranks: a script launches copies of itself (`launch_ranks`); each copy finds that it is a rank
(`is_rank`) and joins the others (`join_ranks`)."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.output import fail

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
            "LOCAL_WORLD_SIZE": str(world_size),
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
            while None in (codes := [rank.poll() for rank in ranks]) or any(codes):
                if any(codes):
                    fail("a rank failed; its error is above", code=1)
                if time.monotonic() > deadline:
                    fail(f"the ranks did not finish in {timeout_s:.0f} s", code=1)
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return json.loads(result.read_text()) if result.exists() else None


def join_ranks(timeout_s: float) -> None:
    """Initialize gloo among the ranks of `launch_ranks`."""
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


def join_fake_ranks(world_size: int) -> None:
    """Make this process rank 0 of so many ranks that do not exist; their collectives return at
    once, and it computes on one thread."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)  # others would spin, which counts as time of the processor
    # Denormals would make some steps slower than others for no reason of ours.
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


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


def finish(result: Any) -> None:
    """Hand rank 0's `result` (anything JSON can hold) to the process that launched the ranks, and
    leave these. Collective."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
