"""Objects that ranks tell each other."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Issued
from fsdp_overlap.comm.lanes import HostTicket
from fsdp_overlap.comm.watch import watch_of

T = TypeVar("T")


def gather_objects(mine: T, group: dist.ProcessGroup, label: str) -> list[T]:
    """What each rank of ``group`` gives, in the order of ranks. ``label`` says in errors who asks.
    Collective; the host waits.

    Raises:
        RuntimeError: a rank did not come.
    """
    if watch_of(group) is None:
        found = [mine] * group.size()
        dist.all_gather_object(found, mine, group)
        return found
    sent = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = [int(size) for size in _gather(torch.tensor([sent.numel()]), group, label)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: sent.numel()] = sent
    received = _gather(padded, group, label)
    return [
        pickle.loads(bytes(each[:size].tolist()))
        for each, size in zip(received, sizes, strict=True)
    ]


def _gather(mine: torch.Tensor, group: dist.ProcessGroup, label: str) -> list[torch.Tensor]:
    others = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(others, mine, group, async_op=True)
    # A ticket asks the watch, which all_gather_object() does not.
    HostTicket("all_gather", label, Issued([work], lambda: mine, group), None).wait()
    return others
