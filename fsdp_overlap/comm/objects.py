"""Objects that ranks tell each other."""

from __future__ import annotations

import ctypes
import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Issued
from fsdp_overlap.comm.lanes import HostTicket

T = TypeVar("T")


def gather_objects(mine: T, group: dist.ProcessGroup, device: torch.device, what: str) -> list[T]:
    """What each rank of ``group`` gives, in the order of ranks. Travels in memory of ``device``.
    ``what`` says in errors who asks. Collective; the host waits, and asks the group's watch, which
    ``torch.distributed.all_gather_object()`` does not.

    Raises:
        RuntimeError: a rank did not come.
    """
    sent = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(device)
    sizes = torch.cat(_gather(torch.tensor([sent.numel()], device=device), group, what)).tolist()
    padded = sent.new_zeros(max(sizes))
    padded[: sent.numel()] = sent
    received = [each.cpu() for each in _gather(padded, group, what)]
    return [
        pickle.loads(ctypes.string_at(each.data_ptr(), size))
        for each, size in zip(received, sizes, strict=True)
    ]


def _gather(mine: torch.Tensor, group: dist.ProcessGroup, what: str) -> list[torch.Tensor]:
    others = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(others, mine, group, async_op=True)
    HostTicket(what, "", Issued([work], lambda: mine, group), None).wait()
    return others
