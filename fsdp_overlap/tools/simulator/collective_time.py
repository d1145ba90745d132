"""Seconds that a collective takes, alone on its links.

A size is that of the full buffer in bytes: what an all-gather returns, what a reduce-scatter is
given, the whole tensor of an all-reduce, a broadcast and a reduce, and all that a rank gives to an
all-to-all. Collectives that run at the same time and share links take longer than this; who runs
them has to divide the links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from fsdp_overlap.tools.simulator.hardware import Fabric
from fsdp_overlap.tools.simulator.nccl_tuning import (
    MICRO,
    PROTOCOLS,
    Estimate,
    Group,
    Kind,
    channels,
    estimates,
    ring,
)
from fsdp_overlap.tools.simulator.tables import Curve

# How often the full buffer goes over gloo's shared link, for each rank but one. A reduce-scatter is
# an all-reduce inside; a reduce takes as long. See docs/performance.md, "Collectives on gloo".
GLOO_PASSES = {"all_reduce": 2, "reduce_scatter": 2, "reduce": 2}
GLOO_AT_A_TIME = 2

# meta-pytorch/autoparallel, cost_models/nccl_cost_model.py: fits to nccl-tests' all-to-all on H100.
# By nodes: microseconds that no bytes take. Of N nodes, 0.44 / N of the network is idle.
ALL_TO_ALL_US = Curve(((2, 37.0), (4, 42.0), (8, 60.0), (16, 98.0), (32, 290.0)))
ALL_TO_ALL_WITHIN_US = 50.0
ALL_TO_ALL_IDLE = 0.44


def group_of(fabric: Fabric, ranks: Sequence[int]) -> Group:
    """Return the group of these ranks of the world, where ranks fill one node after the other."""
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise ValueError(f"a group of the ranks {list(ranks)}: give each rank once")
    return Group(len(ranks), len({rank // fabric.ranks_a_node for rank in ranks}))


def seconds_of_collective(fabric: Fabric, group: Group, kind: Kind, size: float) -> float:
    """Return the seconds from when the last rank has begun, until all are done."""
    _check(group, kind, size)
    if group.ranks == 1 or size == 0:
        return 0.0
    if fabric.library == "gloo":
        return _over_one_link(fabric, group, kind, size, 1)
    if kind == "all_to_all":
        return _all_to_all(fabric, group, size)
    return min(each.seconds(size) for each in estimates(fabric, group, kind, size))


def seconds_of_list(fabric: Fabric, group: Group, kind: Kind, sizes: Sequence[float]) -> float:
    """Return the seconds of several collectives of one kind in one launch: one of each parameter,
    or the broadcasts or reduces that ragged shards travel by.

    As many broadcasts (or reduces) as ranks stand for one from each rank (or to it), and then the
    link into a rank carries all but its own. NCCL gives each channel its part of the list, and adds
    up the latency of those that follow each other on a channel (`src/enqueue.cc`: tasks over
    channels). Assumptions: followers begin their way around the ring anew, but for broadcasts and
    reduces, which come right behind the first.
    """
    is_one_way = kind in ("broadcast", "reduce")
    has_own = is_one_way and len(sizes) == group.ranks
    carried = sum(sizes) - (min(sizes) if has_own else 0)
    count = sum(size > 0 for size in sizes)
    for size in (carried, *sizes):
        _check(group, kind, size)
    if group.ranks == 1 or not count:
        return 0.0
    if fabric.library == "gloo":
        return _over_one_link(fabric, group, kind, sum(sizes), count)
    followers = math.ceil(count / channels(fabric, group)) - 1
    way = Group(2, min(group.nodes, 2)) if is_one_way else group
    latency = min(ring(fabric, way, kind, protocol).latency for protocol in PROTOCOLS)
    return seconds_of_collective(fabric, group, kind, carried) + followers * latency


def _check(group: Group, kind: Kind, size: float) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"no collective {kind!r}: there are {', '.join(get_args(Kind))}")
    if size < 0:
        raise ValueError(f"a collective of {size} bytes: a size is at least 0")
    if not 1 <= group.nodes <= group.ranks:
        raise ValueError(f"{group}: each node has at least one rank")


def _over_one_link(fabric: Fabric, group: Group, kind: Kind, size: float, count: int) -> float:
    """Return the seconds where all ranks send over one link, so that what each receives adds up."""
    sent = GLOO_PASSES.get(kind, 1) * (group.ranks - 1) * size
    bandwidth = fabric.within.bandwidth * fabric.within.efficiency.at(group.ranks)
    latency = fabric.within.latency * math.ceil(count / GLOO_AT_A_TIME)
    return Estimate(latency, bandwidth).seconds(sent)


def _all_to_all(fabric: Fabric, group: Group, size: float) -> float:
    """Return the time in which each rank sends to all others at once: over NVLink, and over its own
    link to the network."""
    to_own_node = size * (group.a_node - 1) / group.ranks
    within = fabric.within.bandwidth * fabric.within.efficiency.at(group.ranks)
    seconds = to_own_node / within
    if group.nodes == 1:
        return seconds + ALL_TO_ALL_WITHIN_US * MICRO
    if fabric.between is None:
        raise ValueError(f"{fabric.name} has no links between nodes; write a table [between]")
    link = fabric.between.bandwidth * (1 - ALL_TO_ALL_IDLE / group.nodes)
    seconds = max(seconds, size * (1 - 1 / group.nodes) / link)
    return seconds + ALL_TO_ALL_US.at(group.nodes) * MICRO + fabric.between.latency
