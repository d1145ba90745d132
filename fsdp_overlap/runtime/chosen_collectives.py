"""Which collectives a bucket has: the user's, those in memory that the user chose, or the fastest,
in few bits or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Collectives, CustomCollectives, CustomComms, choose
from fsdp_overlap.comm.quantized_gather import QuantizedCollectives
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
    found = _in_full(domain, plan, group, settings, compute_dtype, reduce_dtype)
    if policy is None:
        return found
    assert isinstance(plan, BucketPlan)
    wire, scale_dtype = policy.wire(plan, compute_dtype), policy.scale_dtype(compute_dtype)
    return QuantizedCollectives(wire, group.rank(), policy.gather_dtype, scale_dtype, found)


def _in_full(
    domain: Domain,
    plan: Plan,
    group: dist.ProcessGroup,
    settings: Settings,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> Collectives[Any]:
    """How it travels in the dtypes that were asked for."""
    flat = plan.packed if isinstance(plan, RowsPlan) else plan
    found: Collectives[BucketPlan] = choose(domain.device_type, group, flat)
    if domain.shard_size == 1:
        return found
    if settings.comms != CustomComms():
        found = CustomCollectives(settings.comms, found)
    elif settings.uses_symmetric_memory:
        domain.symmetric_memory.reserve(plan, compute_dtype, reduce_dtype)
        found = SymmetricCollectives(domain.symmetric_memory)
    elif isinstance(plan, RowsPlan):
        return choose_for_rows(domain.device_type, group, plan)
    return PackedRows(found) if isinstance(plan, RowsPlan) else found
