"""What each rank's section of a flat buffer holds, and the plan that follows from it."""

from __future__ import annotations

import sys
from itertools import accumulate

from fsdp_overlap.layout.balance import Item
from fsdp_overlap.layout.bucket_plan import BucketPlan, align

MOST_PADDING = 0.01
"""How much padding equal shards may take, as a fraction of a bucket. Shards that would take more
are ragged."""

Piece = tuple[Item, int, int]
"""``(item, start, stop)``: elements ``[start, stop)`` of a parameter."""

Sections = list[list[Piece]]
"""The pieces of each rank, in the order in which they lie there. A parameter that is cut ends one
rank's section and begins the next."""


Owned = dict[int, list[Item]]
"""The parameters that lie whole on one rank, by rank."""


def step_of(item: Item) -> int:
    """How many elements at least lie between two cuts of ``item``. Where its layout allows cuts
    anywhere they are aligned."""
    if not item.is_cut:
        return max(1, item.numel)
    return item.grain if item.grain > 1 else item.spec.alignment


def plan_of(sections: Sections, most_padding: float = 0.0) -> BucketPlan:
    """The plan of a flat buffer with these ``sections``. Shards are equal if that takes little
    padding, and otherwise as large as what they hold. ``most_padding`` replaces
    :data:`MOST_PADDING` if it is more. A parameter has no padding inside, so shards can be equal
    only if each that ends within a parameter is as large as the largest."""
    specs, offsets, grains, ranks = [], [], [], []
    numels = []
    unit = next(item.spec.alignment for pieces in sections for item, _, _ in pieces)
    position = 0
    is_inside = False  # of a parameter, where a section ends
    least_inside = sys.maxsize  # the smallest section that ends inside of one
    for rank, pieces in enumerate(sections):
        begin = position
        for item, start, stop in pieces:
            if start == 0:
                position = align(position, unit)
                specs.append(item.spec)
                offsets.append(position)
                grains.append(item.grain)
                ranks.append(rank)
            position += stop - start
        if pieces:
            item, _, stop = pieces[-1]
            is_inside = stop < item.numel
        if is_inside:
            least_inside = min(least_inside, position - begin)
        else:
            position = align(position, unit)
        numels.append(position - begin)
    largest, held = max(numels), sum(numels)
    padding = largest * len(numels) - held
    is_possible = least_inside >= largest and largest % unit == 0
    if is_possible and padding <= max(MOST_PADDING, most_padding) * held:
        begins = [0, *accumulate(numels[:-1])]
        offsets = [
            offset - begins[rank] + largest * rank
            for offset, rank in zip(offsets, ranks, strict=True)
        ]
        numels = [largest] * len(numels)
    return BucketPlan(tuple(specs), tuple(offsets), tuple(numels), tuple(grains))
