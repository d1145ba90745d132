"""What each rank's section of a flat buffer holds, and the plan that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from fsdp_overlap.layout.balance import Item
from fsdp_overlap.layout.bucket_plan import ALIGN_ELEMENTS, BucketPlan, align

MOST_PADDING = 0.01
"""How much padding equal shards may take, as a fraction of a bucket. Shards that would take more
are ragged."""

Piece = tuple[Item, int, int]
"""``(item, start, stop)``: elements ``[start, stop)`` of a parameter."""

Sections = list[list[Piece]]
"""The pieces of each rank, in the order in which they lie there. A parameter that is cut ends one
rank's section and begins the next."""


def nearest_cut(item: Item, element: float) -> int:
    """The allowed cut of ``item`` that is nearest to ``element``."""
    grain = item.grain if item.grain > 1 else ALIGN_ELEMENTS
    return min(item.numel, round(element / grain) * grain)


def line(
    items: Sequence[Item], shares: Sequence[float], weight: Callable[[Item], float]
) -> Sections:
    """Lays ``items`` one after the other, and cuts where each rank has its share of their weight,
    or as near to that as a cut is allowed. ``shares`` are proportions, and may have any sum."""
    weights = [weight(item) for item in items]
    unit = sum(weights) / (sum(shares) or 1.0)
    sections: Sections = []
    target = before = 0.0
    at = start = 0  # the next section begins at element `start` of this item
    for rank, share in enumerate(shares, 1):
        target += share * unit
        pieces: list[Piece] = []
        is_last = rank == len(shares)
        while at < len(items) and (is_last or before < target):
            item, end = items[at], before + weights[at]
            stop = item.numel
            if end > target and not is_last:
                element = (target - before) / weights[at] * item.numel
                stop = max(start, nearest_cut(item, element))
            if start < stop or not item.numel:
                pieces.append((item, start, stop))
                start = stop
            if stop < item.numel:
                break
            before, at, start = end, at + 1, 0
        sections.append(pieces)
    return sections


def plan_of(sections: Sections) -> BucketPlan:
    """The plan of a flat buffer with these ``sections``. If that takes little padding, and no
    parameter is cut, shards are equal. Otherwise each is as large as what it holds."""
    specs, offsets, grains, ranks = [], [], [], []
    numels = []
    position = 0
    is_inside = is_cut = False  # of a parameter, where a section ends
    for rank, pieces in enumerate(sections):
        begin = position
        for item, start, stop in pieces:
            if start == 0:
                position = align(position)
                specs.append(item.spec)
                offsets.append(position)
                grains.append(item.grain)
                ranks.append(rank)
            position += stop - start
        if pieces:
            item, _, stop = pieces[-1]
            is_inside = stop < item.numel
        if is_inside:
            is_cut = True
        else:
            position = align(position)
        numels.append(position - begin)
    largest, held = max(numels), sum(numels)
    if not is_cut and largest * len(numels) - held <= MOST_PADDING * held:
        begins = [0, *accumulate(numels[:-1])]
        offsets = [
            offset - begins[rank] + largest * rank
            for offset, rank in zip(offsets, ranks, strict=True)
        ]
        numels = [largest] * len(numels)
    return BucketPlan(tuple(specs), tuple(offsets), tuple(numels), tuple(grains))
