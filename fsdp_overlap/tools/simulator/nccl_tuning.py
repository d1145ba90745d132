"""NCCL's own cost model of its algorithms.

NCCL chooses an algorithm and a protocol by a model of latency and bandwidth. Its constants are
public, in ``src/graph/tuning.cc`` of NVIDIA/nccl; those here are of NCCL 2.30. This file states
that model anew, for links as :class:`Fabric` has them. meta-pytorch/autoparallel publishes what
NCCL 2.27.5 logs for H100, and the tests compare.

Not here: reductions in the network (CollNet) and in the switches of several nodes (NVLSTree).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fsdp_overlap.tools.simulator.hardware import Fabric
from fsdp_overlap.tools.simulator.tables import Curve

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all"]
MICRO, GIGA = 1e-6, 1e9


class Group(NamedTuple):
    """The ranks of a collective: how many, and on how many nodes. Nodes that have different numbers
    of them count as if they shared them out evenly."""

    ranks: int
    nodes: int = 1

    @property
    def a_node(self) -> int:
        return self.ranks // self.nodes


class Estimate(NamedTuple):
    """A collective of `size` bytes takes `latency + size / bandwidth` seconds."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


class Hop(NamedTuple):
    """Microseconds: once, for a step over NVLink, for a step over the network."""

    once: float
    within: float
    between: float


PROTOCOLS = ("LL", "LL128", "Simple")
RING = dict(zip(PROTOCOLS, [Hop(6.6, 0.6, 2.7), Hop(14, 1.9, 4), Hop(8.4, 3.4, 14)], strict=True))
TREE = dict(zip(PROTOCOLS, [Hop(6.8, 0.6, 5), Hop(14, 1.25, 8.5), Hop(8.4, 4, 14)], strict=True))
PAT_ONCE, PAT_A_RANK, PAT_SPEEDUP = 8.0, 2.8, 3.5
SWITCH_HOP = 25.0  # an all-reduce in NVLink's switches
NET_OVERHEAD = {"LL": 1.0, "LL128": 1.0, "Simple": 3.0}  # what posting to the network takes

# In GB/s, for groups of one node, of two, and of more.
LL_WITHIN = {"ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
LL_BETWEEN = (39.0, 20.4)  # where hosts have Intel's processors
RING_LL128_CHANNEL = {"ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}
TREE_CHANNEL = {
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}
TREE_LL128_CHANNEL = {
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}
CHANNELS_WITHIN = {"ampere": 12, "hopper": 16, "blackwell": 16}

# Trees reach less of their bandwidth at middle sizes: of 64 bytes, 128, and so on. NCCL has steps
# here; between them these are lines, so that more bytes never take less time.
TREE_SHARES = {
    protocol: Curve(tuple((64.0 * 2**at, float(share)) for at, share in enumerate(shares.split())))
    for protocol, shares in {
        "LL": "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1",
        "LL128": "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1",
        "Simple": ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9 1",
    }.items()
}


def channels(fabric: Fabric, group: Group) -> int:
    """Return how many rings (or trees) run beside each other."""
    if group.nodes == 1:
        return CHANNELS_WITHIN[fabric.generation]
    return min(2 * group.a_node, fabric.ranks_a_node)


def within_bandwidth(fabric: Fabric, group: Group) -> float:
    return fabric.within.bandwidth * fabric.within.efficiency.at(group.ranks)


def link_bandwidth(fabric: Fabric, group: Group) -> float:
    """Return the bytes/s that all rings of a group together carry past a rank, or into a node where
    there are several: each rank has a link of its own to the network, and each ring takes another
    one."""
    if group.nodes == 1:
        return within_bandwidth(fabric, group)
    if fabric.between is None:
        raise ValueError(
            f"{fabric.name}: a group of {group.ranks} ranks spans {group.nodes} nodes; write a "
            "table [between], or more ranks_a_node"
        )
    return fabric.between.bandwidth * fabric.between.efficiency.at(group.ranks) * group.a_node


def past_nvlink(fabric: Fabric, group: Group, bandwidth: float) -> float:
    """Return what is left of a bandwidth where rings also go from rank to rank within each node."""
    if group.a_node == 1:
        return bandwidth
    return min(bandwidth, within_bandwidth(fabric, group))


def ring(fabric: Fabric, group: Group, kind: Kind, protocol: str, share: float = 1.0) -> Estimate:
    """Return what rings take, which carry every collective, with a share of the bandwidth between
    nodes. A broadcast is given the way past all ranks too, where NCCL's own model has one step and
    notes that more is to come."""
    ranks, nodes = group.ranks, group.nodes
    once, within, between = RING[protocol]
    rounds = 2 if kind == "all_reduce" else 1
    steps, net_steps = rounds * (ranks - 1), rounds * (nodes - 1)
    if nodes > 1:
        within = max(within, NET_OVERHEAD[protocol])
        between = TREE[protocol].between if group.a_node == 1 else between
    latency = (once + (steps - net_steps) * within + net_steps * between) * MICRO
    latency += _links_latency(fabric, group, steps, net_steps)
    bus = link_bandwidth(fabric, group)
    if protocol == "LL":
        slowest = LL_WITHIN[fabric.generation] if nodes == 1 else LL_BETWEEN[min(nodes, 3) - 2]
        bus = min(slowest * GIGA, bus / 2)
    elif protocol == "LL128":
        most = RING_LL128_CHANNEL[fabric.generation] * GIGA * channels(fabric, group)
        bus = min(bus * 0.92, most)
    passes = ranks if kind in ("broadcast", "reduce") else steps
    return Estimate(latency, past_nvlink(fabric, group, bus * share) * ranks / passes)


def tree(fabric: Fabric, group: Group, protocol: str, size: float) -> Estimate:
    """Return what trees take, for all-reduces: a chain within each node, and two trees of the
    nodes."""
    once, within, between = TREE[protocol]
    bucket = min(group.nodes, 3) - 1
    steps, net_steps = 2 * (group.a_node - 1), 2 * int(math.log2(group.nodes))
    latency = (once + steps * within + net_steps * between) * MICRO
    latency += _links_latency(fabric, group, steps + net_steps, net_steps)
    count = channels(fabric, group)
    # Of two nodes, each is the root of one tree: a link carries half.
    bus = link_bandwidth(fabric, group) * (2 if group.nodes == 2 else 1)
    bus = min(bus * 0.92, TREE_CHANNEL[fabric.generation][bucket] * GIGA * count)
    if protocol == "LL":
        slowest = LL_WITHIN[fabric.generation] if bucket == 0 else LL_BETWEEN[bucket - 1]
        bus = min(bus / 3.8, slowest * GIGA)
    elif protocol == "LL128":
        most = TREE_LL128_CHANNEL[fabric.generation][bucket] * GIGA * count
        bus = min(bus * (7 / 9 if bucket == 0 else 120 / 128), most)
    bus = past_nvlink(fabric, group, bus * 0.85)
    return Estimate(latency, bus / 2 * TREE_SHARES[protocol].at(size))


def estimates(fabric: Fabric, group: Group, kind: Kind, size: float) -> Iterator[Estimate]:
    """Return what NCCL chooses from for a collective of `size` bytes, the full buffer."""
    is_whole = group.a_node == fabric.ranks_a_node and group.a_node > 1
    share = fabric.whole_nodes.at(size / group.ranks) if is_whole and group.nodes > 1 else 1.0
    for protocol in PROTOCOLS:
        latency, bandwidth = ring(fabric, group, kind, protocol, share)
        if kind == "all_reduce":
            if protocol == "Simple" and group.nodes > 1:
                latency *= 1.4  # NCCL: "plateau effect of ring"
            yield tree(fabric, group, protocol, size)
        yield Estimate(latency, bandwidth)
    if kind == "all_reduce" and group.nodes == 1 and is_whole and fabric.switch_bandwidth:
        yield Estimate(SWITCH_HOP * MICRO, fabric.switch_bandwidth)
    if kind in ("all_gather", "reduce_scatter") and group.nodes == group.ranks:
        # PAT, of one rank a node: logarithmic steps
        steps = int(math.log2(group.nodes))
        latency = PAT_ONCE + steps * TREE["Simple"].between / PAT_SPEEDUP
        latency = (latency + PAT_A_RANK * group.ranks) * MICRO
        latency += _links_latency(fabric, group, steps, steps)
        yield Estimate(latency, link_bandwidth(fabric, group) * 0.75)


def _links_latency(fabric: Fabric, group: Group, steps: int, net_steps: int) -> float:
    between = fabric.between.latency if fabric.between and group.nodes > 1 else 0.0
    return (steps - net_steps) * fabric.within.latency + net_steps * between
