"""Objects that ranks tell each other."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Issued
from fsdp_overlap.comm.lanes import HostTicket

T = TypeVar("T")


def gather_objects(mine: T, group: dist.ProcessGroup, device: torch.device, label: str) -> list[T]:
    """What each rank of ``group`` gives, in the order of ranks. Travels in memory of ``device``.
    ``label`` says in errors who asks. Collective; the host waits, and asks the group's watch, which
    ``torch.distributed.all_gather_object()`` does not.

    Raises:
        RuntimeError: a rank did not come.
    """
    sent = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(device)
    sizes = torch.cat(_gather(torch.tensor([sent.numel()], device=device), group, label)).tolist()
    padded = sent.new_zeros(max(sizes))
    padded[: sent.numel()] = sent
    received = _gather(padded, group, label)
    return [
        pickle.loads(bytes(each[:size].tolist()))
        for each, size in zip(received, sizes, strict=True)
    ]


def _gather(mine: torch.Tensor, group: dist.ProcessGroup, label: str) -> list[torch.Tensor]:
    others = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(others, mine, group, async_op=True)
    HostTicket("all_gather", label, Issued([work], lambda: mine, group), None).wait()
    return others
