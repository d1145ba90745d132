"""Sets of time as sorted lists of disjoint half-open intervals `(start, end)`, in microseconds."""

import bisect
import math
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as sorted, disjoint intervals; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return time in both `a` and `b`, each of them a union."""
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return time in `a` that is not in `b`, each of them a union."""
    if not b:  # as for most ops
        return union(a)
    ends, starts = [-math.inf, *(end for _, end in b)], [*(start for start, _ in b), math.inf]
    return intersect(a, list(zip(ends, starts, strict=True)))


def covers(a: list[Interval], time: float) -> bool:
    """Return whether `time` lies in the union `a`, its ends included."""
    k = bisect.bisect_right(a, (time, math.inf)) - 1
    return k >= 0 and time <= a[k][1]


def clip(a: list[Interval], start: float, end: float) -> list[Interval]:
    """Return the part of the union `a` between two times. Its cost grows with that part, not with
    `a`."""
    first = max(bisect.bisect_right(a, (start, math.inf)) - 1, 0)
    near = a[first : bisect.bisect_left(a, (end,))]
    return intersect(near, [(start, end)]) if near else near


def measure(a: Iterable[Interval]) -> float:
    """Return the total length of a union, in microseconds."""
    return sum(end - start for start, end in a)
