"""Which collectives a bucket has: the user's, those in memory that the user chose, or the fastest,
in few bits or not, or as the class of its parameters says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    Collectives,
    Issued,
    LocalCollectives,
    choose,
)
from fsdp_overlap.comm.custom_collectives import CustomCollectives, CustomComms
from fsdp_overlap.comm.extension_gather import ExtensionGather
from fsdp_overlap.comm.group_facts import communicates
from fsdp_overlap.comm.quantized import (
    QuantizedGather,
    QuantizedReduction,
    QuantizedRowsGather,
    QuantizedRowsReduction,
)
from fsdp_overlap.comm.row_collectives import PackedRows, choose_for_rows
from fsdp_overlap.comm.symmetric_memory import SymmetricCollectives
from fsdp_overlap.comm.wire import Wire
from fsdp_overlap.engine.comm_policy import QuantizedCommPolicy
from fsdp_overlap.engine.domain import Domain
from fsdp_overlap.engine.settings import Settings
from fsdp_overlap.layout import BucketPlan, Plan, RowsPlan


@dataclass(frozen=True)
class Chosen:
    """Gathers and reduces a bucket, each of the two in its own way. See
    :class:`~fsdp_overlap.comm.collectives.Collectives`."""

    all_gather: Callable[..., Issued]
    reduce_scatter: Callable[..., Issued]


def chosen_collectives(
    domain: Domain,
    plan: Plan,
    group: dist.ProcessGroup,
    settings: Settings,
    policy: QuantizedCommPolicy | None,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    extensions: ExtensionGather | None = None,
) -> Collectives[Any]:
    """How a bucket of ``plan`` travels among the ranks of ``group``: in ``compute_dtype`` when it
    is gathered and in ``reduce_dtype`` when it is reduced, or else as ``policy`` says, or as the
    parameters themselves do by ``extensions``."""
    flat = plan.packed if isinstance(plan, RowsPlan) else plan
    ranges: Collectives[BucketPlan] = choose(domain.device_type, group, flat)
    is_alone = not communicates(group)
    is_custom = settings.comms != CustomComms()
    if policy is not None and not policy.applies_to(plan):
        policy = None
    if policy is not None and policy.reduce_dtype is not None and settings.comms.reduce_scatter:
        raise ValueError(
            "set_custom_reduce_scatter() and QuantizedCommPolicy(reduce_dtype=...): gradients in "
            "few bits "
            "are sent by an all-to-all and summed after; leave one of the two out"
        )
    if is_custom and not is_alone:
        ranges = CustomCollectives(settings.comms, ranges)
    elif settings.uses_symmetric_memory and not is_alone:
        domain.symmetric_memory.reserve(plan, compute_dtype, reduce_dtype)
        ranges = SymmetricCollectives(domain.symmetric_memory)
    found: Any = ranges
    if isinstance(plan, RowsPlan) and is_alone:
        found = LocalCollectives()
    elif isinstance(plan, RowsPlan):
        is_free = not is_custom and not settings.uses_symmetric_memory
        fastest = choose_for_rows(domain.device_type, group, plan)
        found = fastest if is_free else PackedRows(ranges)
    if extensions is not None:
        extensions.others = ranges
        return Chosen(extensions.all_gather, found.reduce_scatter)
    if policy is None:
        return found
    gather, reduce = found.all_gather, found.reduce_scatter
    in_rows = isinstance(plan, RowsPlan)

    def wire(dtype: torch.dtype, codes: torch.dtype) -> Wire:
        travels = policy.wire(plan, dtype, codes)
        own = travels.segment(0 if in_rows else group.rank())
        return Wire(travels, own, codes, policy.scale_dtype(dtype, codes))

    if policy.gather_dtype is not None:
        sent = wire(compute_dtype, policy.gather_dtype)
        gather = (
            QuantizedRowsGather(sent, ranges, group.size())
            if in_rows
            else QuantizedGather(sent, ranges)
        ).all_gather
    if policy.reduce_dtype is not None and not is_alone:
        sent = wire(reduce_dtype, policy.reduce_dtype)
        reduce = (QuantizedRowsReduction if in_rows else QuantizedReduction)(sent).reduce_scatter
    return Chosen(gather, reduce)
