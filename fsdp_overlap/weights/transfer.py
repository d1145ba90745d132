"""Carries out rounds: packs what is sent, exchanges it, and puts what came where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Issued, all_to_all, choose
from fsdp_overlap.comm.lanes import Lane, Ticket
from fsdp_overlap.layout import BucketPlan
from fsdp_overlap.weights.tensor_chunks import Chunk
from fsdp_overlap.weights.transfer_plan import Messages, TransferItem, TransferRound

Parts = Callable[[str], Sequence[tuple[Chunk, torch.Tensor]]]
"""Gives chunks of the tensor of a name, and views of their values."""


def start(
    each: TransferRound,
    messages: Messages,
    sources: Parts,
    targets: Parts,
    group: dist.ProcessGroup | None,
    device: torch.device,
    lane: Lane,
    what: str,
) -> Ticket:
    """Enqueues a round, from ``sources`` into ``targets``, which are asked in the lane's order.
    ``messages`` are those of this rank, and lie in memory of ``device``. ``what`` names it in
    errors and traces. Collective over ``group``, which may be ``None`` where there is one rank."""
    ranks = 1 if group is None else group.size()
    sizes = _sizes(messages.receives, ranks)
    label = ", ".join(each.completes[:3])

    def issue() -> Issued:
        for part in messages.own:
            _view(part, targets).copy_(_view(part, sources))
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if group is None:
            return Issued((), lambda: received)
        if each.gathered:
            me = group.rank()
            mine = received[sum(sizes[:me]) :][: sizes[me]]
            _pack(mine, messages.sends[me], sources)
            plan = BucketPlan((), (), tuple(sizes))
            return choose(device.type, group, plan).all_gather(received, mine, plan, group)
        sent_sizes = _sizes(messages.sends, ranks)
        sent = torch.empty(sum(sent_sizes), dtype=torch.uint8, device=device)
        _pack(sent, _in_order(messages.sends), sources)
        return all_to_all(received, sent, sizes, sent_sizes, group)

    def accept(received: torch.Tensor) -> None:
        for part, values in _views(received, _in_order(messages.receives)):
            _view(part, targets).copy_(values)

    return lane.enqueue(what, label, issue, accept, sum(sizes))


def _sizes(messages: Mapping[int, Sequence[TransferItem]], ranks: int) -> list[int]:
    """The bytes of the message of each of so many ``ranks``."""
    sizes = [0] * ranks
    for rank, parts in messages.items():
        sizes[rank] = sum(part.nbytes for part in parts)
    return sizes


def _in_order(messages: Mapping[int, Sequence[TransferItem]]) -> list[TransferItem]:
    """All parts, as messages follow each other in memory."""
    return [part for rank in sorted(messages) for part in messages[rank]]


def _pack(message: torch.Tensor, parts: Sequence[TransferItem], sources: Parts) -> None:
    for part, values in _views(message, parts):
        values.copy_(_view(part, sources))


def _views(
    message: torch.Tensor, parts: Sequence[TransferItem]
) -> list[tuple[TransferItem, torch.Tensor]]:
    """Where each of ``parts`` lies in ``message``."""
    starts = accumulate((part.nbytes for part in parts), initial=0)
    return [
        (
            part,
            message[at : at + part.chunk.numel * part.dtype.itemsize]
            .view(part.dtype)
            .view(part.chunk.sizes),
        )
        for at, part in zip(starts, parts, strict=False)
    ]


def _view(part: TransferItem, tensors: Parts) -> torch.Tensor:
    """Where the values of ``part`` are, or belong."""
    found = tensors(part.name)
    outer, values = (
        found[0]
        if len(found) == 1
        else next(each for each in found if part.chunk & each[0] == part.chunk)
    )
    return part.chunk.of(outer, values)
