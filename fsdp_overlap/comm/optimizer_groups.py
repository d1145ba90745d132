"""Process groups of optimizers' steps and of exports of weights, which connect other ranks than
comm streams do."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fsdp_overlap.comm.process_groups import GroupCache, OwnGroup, alive, can_close

OPTIMIZER = "optimizer"
"""The purpose of these groups."""

MESSAGES = "message"
"""The purpose of groups on which hosts exchange messages. They serve nothing else."""


def find_for_optimizer(
    cache: GroupCache, ranks: Sequence[int], like: dist.ProcessGroup, device_type: str
) -> dist.ProcessGroup | None:
    """Return the group that an optimizer's step uses to connect ``ranks``, in this order. It may
    serve another purpose too, because ranks issue all they issue on it in the same order. ``like``
    itself serves if it connects them and cannot be closed. ``None`` if there is none yet."""
    for (purpose, its), group in cache.groups.items():
        if its == tuple(ranks) and purpose != MESSAGES:
            return alive(group)
    is_enough = list(ranks) == dist.get_process_group_ranks(like)
    return like if is_enough and not can_close(like, device_type) else None


def get_for_optimizer(
    cache: GroupCache, ranks: Sequence[int], like: dist.ProcessGroup, device_type: str
) -> dist.ProcessGroup:
    """Return the group that :func:`find_for_optimizer` gives, or a new one, made as ``like``.
    Collective over ``ranks`` at its first call."""
    group = find_for_optimizer(cache, ranks, like, device_type)
    if group is None:
        group = cache.make((OPTIMIZER, tuple(ranks)), like, device_type, OPTIMIZER)
    return group


def own_groups_of_optimizers(cache: GroupCache) -> list[OwnGroup]:
    """Return the groups that serve optimizers' steps alone."""
    references = [ref for (purpose, _), ref in cache.groups.items() if purpose == OPTIMIZER]
    return [own for own in cache.own.values() if own.reference in references]
