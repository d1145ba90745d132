"""Object collectives, and comparisons of numbers across ranks."""

from __future__ import annotations

import ctypes
import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import all_to_all
from fsdp_overlap.comm.comm_streams import HostWorkHandle, PendingCollective

T = TypeVar("T")


def gather_objects(mine: T, group: dist.ProcessGroup, device: torch.device, what: str) -> list[T]:
    """Return what each rank of ``group`` gives, in the order of ranks. Travels in memory of
    ``device``. ``what`` says in errors what it is for. Collective; the host waits, and polls the
    group's watchdog, which ``torch.distributed.all_gather_object()`` does not, and needs no numpy.

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


def broadcast_object(
    mine: T, source: int, group: dist.ProcessGroup, device: torch.device, what: str
) -> T:
    """Return what the rank at place ``source`` of ``group`` gives; that of others is ignored. As
    :func:`gather_objects` otherwise.

    Raises:
        RuntimeError: a rank did not come.
    """
    is_mine = group.rank() == source
    sent = torch.frombuffer(bytearray(pickle.dumps(mine) if is_mine else b"-"), dtype=torch.uint8)
    size = torch.tensor([sent.numel()], device=device)
    wait_for(dist.broadcast(size, group=group, group_src=source, async_op=True), group, what)
    received = (
        sent.to(device) if is_mine else torch.empty(int(size), dtype=torch.uint8, device=device)
    )
    wait_for(dist.broadcast(received, group=group, group_src=source, async_op=True), group, what)
    held = received.cpu()
    given: T = pickle.loads(ctypes.string_at(held.data_ptr(), held.numel()))
    return given


def all_equal(number: int, group: dist.ProcessGroup, device: torch.device, what: str) -> bool:
    """Return whether all ranks of ``group`` give the same ``number``, of 63 bits. One collective of
    two numbers, as :func:`gather_objects` otherwise.

    Raises:
        RuntimeError: a rank did not come.
    """
    ends = torch.tensor([number, -number], device=device)
    wait_for(dist.all_reduce(ends, dist.ReduceOp.MAX, group=group, async_op=True), group, what)
    most, least = ends.tolist()
    return bool(most == -least)


def _gather(mine: torch.Tensor, group: dist.ProcessGroup, what: str) -> list[torch.Tensor]:
    others = [torch.empty_like(mine) for _ in range(group.size())]
    wait_for(dist.all_gather(others, mine, group, async_op=True), group, what)
    return others


def exchange_bytes(mine: bytes, group: dist.ProcessGroup, what: str) -> bytes:
    """Return what the host of each rank of ``group`` gives, all of one size, one after the other.
    As :func:`gather_objects` otherwise, on a group that serves CPUs.

    Raises:
        RuntimeError: a rank did not come.
    """
    # Gloo's all-gather passes messages from rank to rank, each when the last has come, and copies
    # twice. Here all of them travel at once.
    sent = torch.frombuffer(bytearray(mine * group.size()), dtype=torch.uint8)
    arrived = bytearray(sent.numel())
    received = torch.frombuffer(arrived, dtype=torch.uint8)
    HostWorkHandle(what, "", all_to_all(received, sent, [], [], group), None).wait()
    return bytes(arrived)


def wait_for(work: dist.Work, group: dist.ProcessGroup, what: str, label: str = "") -> None:
    """Block the host until ``work`` is done, and poll the group's watchdog. ``what`` and ``label``,
    a unit's, are named in errors."""
    pending = PendingCollective([work], lambda: torch.empty(0), group)
    HostWorkHandle(what, label, pending, None).wait()
