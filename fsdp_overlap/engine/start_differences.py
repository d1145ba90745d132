"""Differences between initial values across ranks, in words: Note [starts]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from fsdp_overlap.desync.order_check import greatest
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param import UNKNOWN


def describe_difference(
    mesh_info: MeshInfo, names: Sequence[str], hashes: Sequence[int], failure: str
) -> str:
    """Return which parameter differs across ranks of ``mesh_info``, or what differs on another
    mesh, as ``failure`` tells if this rank found it. Collective over the mesh.

    ``hashes``: of the values of all parameters, which have these ``names``, here."""
    groups = mesh_info.groups_to_check

    def over_ranks(numbers: Sequence[int]) -> list[int]:
        here = torch.tensor(numbers, device=mesh_info.device)
        return cast(list[int], greatest(here, groups).tolist())

    # The greatest of a number and the greatest of its complement tell whether all ranks agree.
    complements = [UNKNOWN if number == UNKNOWN else ~number for number in hashes]
    has_failed, *of_all = over_ranks([bool(failure), *hashes, *complements])
    high, low = of_all[: len(hashes)], of_all[len(hashes) :]
    different = [
        index
        for index, (most, least) in enumerate(zip(high, low, strict=True))
        if UNKNOWN != most != ~least
    ]
    if not different:
        elsewhere = "other ranks, as they tell, were given different weights, or none"
        return failure or (elsewhere if has_failed else "")
    first = different[0]
    is_known, is_high = hashes[first] != UNKNOWN, hashes[first] == high[first]
    rank = dist.get_rank()
    ranks = over_ranks([rank if is_high else -1, rank if is_known and not is_high else -1])
    others = len(different) - 1
    differ = f"(and {others} other{'s'[: others > 1]}) differ" if others else "differs"
    return (
        f"Parameter {names[first]} {differ} across ranks {min(ranks)} and {max(ranks)} at "
        "fully_shard(). Seed or load every rank identically, or pass "
        "FsdpContext(sync_module_states=True)."
    )
