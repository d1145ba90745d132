"""Checks that all ranks planned the same."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import zip_longest

import torch.distributed as dist

from fsdp_overlap.engine.domain import Domain
from fsdp_overlap.engine.unit import Unit


def compare_plans(
    units: Sequence[Unit], domain: Domain, groups: Sequence[dist.ProcessGroup]
) -> None:
    """Checks that the ranks of ``domain`` planned ``units`` alike. Collective over ``groups``,
    which together connect these ranks.

    Raises:
        RuntimeError: ranks planned differently.
    """
    mine = [
        (f"{unit.name!r} ({unit.module_kind})", _digest(plans))
        for unit in units
        if (
            plans := [
                f"{bucket.plan!r} {bucket.comm_policy}"
                for bucket in unit.buckets
                if bucket.domain is domain
            ]
        )
    ]
    of_all = {dist.get_rank(): mine}
    # The plans of all ranks are collected first, so that every rank finds the same difference.
    for group in groups:
        known = [of_all] * group.size()
        dist.all_gather_object(known, of_all, group)
        of_all = {rank: theirs for part in known for rank, theirs in part.items()}
    first = min(of_all)
    for rank, theirs in sorted(of_all.items()):
        for ours, other in zip_longest(of_all[first], theirs, fillvalue=("none", "")):
            if ours != other:
                what = f"where rank {first} has unit {ours[0]}, rank {rank} has {other[0]}"
                if ours[0] == other[0]:
                    what = (
                        f"unit {ours[0]} has other parameters, dtypes or layouts on rank {first} "
                        f"than on rank {rank}"
                    )
                raise RuntimeError(
                    f"ranks planned differently: {what}; every rank must build the same model and "
                    "shard it in the same order, and ctx.plan_layout() it or not"
                )


def _digest(plans: list[str]) -> str:
    return sha256(repr(plans).encode()).hexdigest()
