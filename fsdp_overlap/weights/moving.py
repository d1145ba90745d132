"""Carries out rounds: packs what is sent, exchanges it, and puts what came where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Issued, all_to_all, choose
from fsdp_overlap.comm.lanes import Lane, Ticket
from fsdp_overlap.layout import BucketPlan
from fsdp_overlap.weights.regions import Region
from fsdp_overlap.weights.routes import Part, Round

Parts = Callable[[str], Sequence[tuple[Region, torch.Tensor]]]
"""Gives regions of the tensor of a name, and views of their values."""


def start(
    each: Round,
    sources: Parts,
    targets: Parts,
    group: dist.ProcessGroup | None,
    device: torch.device,
    lane: Lane,
    what: str,
) -> Ticket:
    """Enqueues a round, from ``sources`` into ``targets``, which are asked in the lane's order.
    Messages lie in memory of ``device``. ``what`` names it in errors and traces. Collective over
    ``group``, which may be ``None`` where there is one rank."""
    sizes = [sum(part.nbytes for part in parts) for parts in each.receives]
    label = ", ".join(each.completes[:3])

    def issue() -> Issued:
        for part in each.own:
            _target(part, targets).copy_(_source(part, sources))
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if group is None:
            return Issued((), lambda: received)
        if each.gathered:
            mine = received.split(sizes)[group.rank()]
            _pack(mine, each.sends[group.rank()], sources)
            plan = BucketPlan((), (), tuple(sizes))
            return choose(device.type, group, plan).all_gather(received, mine, plan, group)
        sent_sizes = [sum(part.nbytes for part in parts) for parts in each.sends]
        sent = torch.empty(sum(sent_sizes), dtype=torch.uint8, device=device)
        for message, parts in zip(sent.split(sent_sizes), each.sends, strict=True):
            _pack(message, parts, sources)
        return all_to_all(received, sent, sizes, sent_sizes, group)

    def accept(received: torch.Tensor) -> None:
        for message, parts in zip(received.split(sizes), each.receives, strict=True):
            for part, values in _views(message, parts):
                _target(part, targets).copy_(values)

    return lane.enqueue(what, label, issue, accept, sum(sizes))


def _pack(message: torch.Tensor, parts: Sequence[Part], sources: Parts) -> None:
    for part, values in _views(message, parts):
        values.copy_(_source(part, sources))


def _views(message: torch.Tensor, parts: Sequence[Part]) -> list[tuple[Part, torch.Tensor]]:
    """Where each of ``parts`` lies in ``message``."""
    starts = accumulate((part.nbytes for part in parts), initial=0)
    return [
        (
            part,
            message[at : at + part.region.numel * part.dtype.itemsize]
            .view(part.dtype)
            .view(part.region.sizes),
        )
        for at, part in zip(starts, parts, strict=False)
    ]


def _source(part: Part, sources: Parts) -> torch.Tensor:
    outer, values = sources(part.name)[part.held]
    return part.region.of(outer, values)


def _target(part: Part, targets: Parts) -> torch.Tensor:
    outer, values = targets(part.name)[part.wanted]
    return part.region.of(outer, values)
