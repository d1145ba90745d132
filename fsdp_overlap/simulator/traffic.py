"""Bytes that collectives bring to a rank, over each link."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_overlap.simulator.collective_time import group_of
from fsdp_overlap.simulator.hardware import Fabric
from fsdp_overlap.simulator.observed import Collective


def traffic(fabric: Fabric, collectives: Iterable[Collective]) -> dict[str, float]:
    """Bytes that come to a rank within its node, and from other nodes.

    As by rings that pass all ranks of a node before they leave it: of what comes to a node, each of
    its ranks takes an equal part from the network, and has the rest from its neighbour. Trees and
    switches that add up send less.
    """
    found = {"within nodes": 0.0, "between nodes": 0.0}
    for kind, ranks, nbytes in collectives:
        group = group_of(fabric, ranks)
        if kind == "all_to_all":
            found["within nodes"] += nbytes * (group.a_node - 1) / group.ranks
            found["between nodes"] += nbytes * (group.ranks - group.a_node) / group.ranks
            continue
        passes = 2 if kind == "all_reduce" else 1
        carried = passes * nbytes * (group.ranks - 1) / group.ranks
        crossing = group.nodes / group.ranks if group.nodes > 1 else 0.0
        found["within nodes"] += carried * (1 - crossing)
        found["between nodes"] += carried * crossing
    return found
