"""Enqueues the all-gathers of a unit. Its buckets travel as one where they have the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Issued, gather_pieces
from fsdp_overlap.comm.lanes import Lane, Travel
from fsdp_overlap.engine.bucket import Bucket
from fsdp_overlap.engine.unit import Unit


def gathers_of(unit: Unit) -> list[tuple[str, list[Bucket]]]:
    """What is to be gathered of a unit that is not whole: the name of each collective, and its
    buckets. A bucket that is asked to keep a part goes alone, because it may travel among other
    ranks than the rest."""
    waiting = [bucket for bucket in unit.buckets if not bucket.is_whole]
    together: dict[dist.ProcessGroup | Bucket, list[Bucket]] = {}
    for bucket in waiting:
        key = bucket.groups.gather if bucket.part is None else bucket
        together.setdefault(key, []).append(bucket)
    return [
        (buckets[0].label if len(buckets) == 1 else unit.name, buckets)
        for buckets in together.values()
    ]


def gather(buckets: Sequence[Bucket], lane: Lane, label: str) -> None:
    """Enqueues the all-gather of ``buckets`` into their full buffers. Collective over their mesh.

    Raises:
        RuntimeError: one of them is on the meta device.
    """
    try:
        for bucket in buckets:
            bucket.begin_gather(lane)
        issue, accept, nbytes = buckets[0].travel() if len(buckets) == 1 else _together(buckets)
        ticket = lane.enqueue("all_gather", label, issue, accept, nbytes)
    except BaseException:
        for bucket in buckets:
            bucket.cancel_gather()
        raise
    for bucket in buckets:
        bucket.is_filled_by(ticket)


def _together(buckets: Sequence[Bucket]) -> Travel:
    return partial(_issue, buckets), None, sum(bucket.travels_nbytes for bucket in buckets)


def _issue(buckets: Sequence[Bucket]) -> Issued:
    """Gathers buckets of one group: in one launch those that can, and each of the others."""
    found = [(bucket, bucket.make_pieces()) for bucket in buckets]
    group = buckets[0].groups.gather
    if pieces := [each for _, each in found if each is not None]:
        received, sent = (list(chain.from_iterable(each)) for each in zip(*pieces, strict=True))
        if len({piece.dtype for piece in sent}) > 1:
            received, sent = ([p.view(torch.uint8) for p in each] for each in (received, sent))
        gather_pieces((received, sent), group)
    # Users' extensions may raise. So they come before what gloo writes into full buffers, which
    # ctx.reset() frees.
    rest = sorted((b for b, each in found if each is None), key=lambda b: not b.is_extension)
    others = [bucket.travel()[0]() for bucket in rest]

    def finish() -> torch.Tensor:
        for other in others:
            other.finish()
        return buckets[0].full.flat

    return Issued([work for other in others for work in other.works], finish, group)
