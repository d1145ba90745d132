"""Which collectives a bucket has: the user's, those in memory that the user chose, or the fastest,
in few bits or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    Collectives,
    CustomCollectives,
    CustomComms,
    LocalCollectives,
    choose,
)
from fsdp_overlap.comm.quantized_gather import QuantizedCollectives, QuantizedRows, Wire
from fsdp_overlap.comm.row_collectives import PackedRows, choose_for_rows
from fsdp_overlap.comm.symmetric_memory import SymmetricCollectives
from fsdp_overlap.layout import BucketPlan, Plan, RowsPlan
from fsdp_overlap.runtime.domain import Domain
from fsdp_overlap.runtime.gather_policy import GatherPolicy
from fsdp_overlap.runtime.settings import Settings


def chosen_collectives(
    domain: Domain,
    plan: Plan,
    group: dist.ProcessGroup,
    settings: Settings,
    policy: GatherPolicy | None,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> Collectives[Any]:
    """How a bucket of ``plan`` travels among the ranks of ``group``: in ``reduce_dtype`` when it is
    reduced, and when it is gathered as ``policy`` says, or else in ``compute_dtype``."""
    flat = plan.packed if isinstance(plan, RowsPlan) else plan
    ranges: Collectives[BucketPlan] = choose(domain.device_type, group, flat)
    is_custom = settings.comms != CustomComms()
    if domain.shard_size > 1 and is_custom:
        ranges = CustomCollectives(settings.comms, ranges)
    elif domain.shard_size > 1 and settings.uses_symmetric_memory:
        domain.symmetric_memory.reserve(plan, compute_dtype, reduce_dtype)
        ranges = SymmetricCollectives(domain.symmetric_memory)
    wire = None
    if policy is not None:
        travels = policy.wire(plan, compute_dtype)
        own = travels.segment(0 if isinstance(plan, RowsPlan) else group.rank())
        scales = policy.scale_dtype(compute_dtype)
        wire = Wire(travels, own, policy.gather_dtype, scales, ranges)
    if not isinstance(plan, RowsPlan):
        return ranges if wire is None else QuantizedCollectives(wire, ranges)
    rows: Collectives[RowsPlan] = PackedRows(ranges)
    if domain.shard_size == 1:
        rows = LocalCollectives()
    elif not is_custom and not settings.uses_symmetric_memory:
        rows = choose_for_rows(domain.device_type, group, plan)
    return rows if wire is None else QuantizedRows(wire, rows)
