"""Make the default process group, also where a launcher has started the ranks again; and count the
cores that ranks share."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.comm.comm_streams import has_streams, streams_of

_MEETING_SECONDS = 600.0


@contextlib.contextmanager
def process_group(device_type: str) -> Iterator[torch.device]:
    """Make the default process group, with torch's default backend for `device_type`, and yield
    this rank's device. Read the environment that torchrun sets, of which `LOCAL_WORLD_SIZE` may be
    absent."""
    local_rank = int(os.environ["LOCAL_RANK"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks: dict[str, Any] = {}
    # In the store that torchrun keeps, restarted ranks would read the addresses of dead ones.
    if (kept := kept_store()) is not None:
        store = fresh_store(kept, rank, world_size, _MEETING_SECONDS)
        ranks = {"store": store, "rank": rank, "world_size": world_size}
    backend = dist.get_default_backend_for_device(device_type)
    if has_streams(torch.device(device_type)):
        device = torch.device(device_type, local_rank)
        streams_of(device).set_device(device)
        dist.init_process_group(backend, device_id=device, **ranks)
    else:
        device = torch.device(device_type)
        torch.set_num_threads(max(1, cores() // (ranks_here() or world_size)))
        dist.init_process_group(backend, **ranks)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def ranks_here() -> int | None:
    """Return how many ranks this machine has. None where the launcher does not say: torchrun sets
    the variable, and scripts that srun and mpirun run need not, since torch reads it nowhere."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None


def kept_store() -> dist.Store | None:
    """Return torchrun's own store, if it shares one: it outlives ranks and keeps what they
    wrote."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def fresh_store(kept: dist.Store, rank: int, world_size: int, seconds: float) -> dist.Store:
    """Return a part of `kept` that nobody has written to. All `world_size` ranks that live now get
    the same part, whatever dead ranks left in `kept`. Collective. Raise TimeoutError on rank 0, and
    the store's own error on other ranks, if not all come within `seconds`.

    Rank 0 names the part. Each other rank gives itself a new name, by which it tells an answer to
    itself from one to a dead rank. Rank 0 cannot tell who is dead, so it answers everybody until
    all have heard.
    """
    if rank:
        me = uuid.uuid4().hex
        kept.set(f"who is rank {rank}", me)
        kept.wait([f"answer to {me}"], timedelta(seconds=seconds))
        part = kept.get(f"answer to {me}").decode()
        kept.set(f"{part} heard by {rank}", "")
        return dist.PrefixStore(part, kept)
    part = uuid.uuid4().hex
    silent = set(range(1, world_size))
    end = time.monotonic() + seconds
    while silent:
        for other in silent:
            if kept.check([name := f"who is rank {other}"]):
                kept.set(f"answer to {kept.get(name).decode()}", part)
        silent = {other for other in silent if not kept.check([f"{part} heard by {other}"])}
        if silent and time.monotonic() > end:
            raise TimeoutError(f"ranks {sorted(silent)} have not come within {seconds:.0f} s")
        time.sleep(0.01)
    return dist.PrefixStore(part, kept)


def cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
