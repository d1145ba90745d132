"""Plans units again that were planned one by one, once all of them are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from fsdp_overlap.agreement.order_check import greatest
from fsdp_overlap.layout import BucketPlan, Plan
from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.context import FsdpContext
from fsdp_overlap.runtime.digests import number_of
from fsdp_overlap.runtime.domain import Domain
from fsdp_overlap.runtime.ownership import mark_replaced
from fsdp_overlap.runtime.unit import Unit
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor

NewPlans = Mapping[nn.Module, Sequence[Plan]]
"""The new plans of units, by their first modules."""


def plan_again(ctx: FsdpContext, unit: Unit) -> Iterator[Unit]:
    """If ``unit`` is around all other units that ``ctx`` ever had, plans all of them together, and
    moves the shards of those whose plan changes. Yields these units, whose sharded parameters are
    new objects. If a plan changes, this is collective over the ranks that shard the units.

    A unit that is planned alone does not know what comes after it, so ranks may own unequal parts
    of the model. Memory for the whole parameters of one unit is needed meanwhile. Nothing is done
    once a forward has run, or if it would gain little. Nor is anything done if somebody replaced a
    parameter, or if a unit is on the meta device on some ranks only.
    """
    units = ctx.units
    if len(units) < 2 or ctx.was_settled or not _is_around_all(unit, units):
        return
    planned: list[tuple[Domain, NewPlans]] = []
    for domain in ctx.domains:
        go_back = domain.plans.way_back()
        plans: NewPlans = domain.plans.plan_again()
        if plans and _ranks_agree(domain, units, plans):
            planned.append((domain, plans))
        else:
            go_back()
    for domain, its_plans in planned:
        for other in units:
            if _lay_out(other, domain, its_plans.get(other.modules[0], ())):
                yield other


def _is_around_all(unit: Unit, units: Sequence[Unit]) -> bool:
    """Whether ``unit``, the newest of its context, is around all units that the context ever had.
    Those that are gone count too, because ranks may differ in when a unit goes."""
    inside = {id(inner) for module in unit.modules for inner in module.modules()}
    has_lost_none = len(units) == unit.index + 1
    return has_lost_none and all(id(each) in inside for other in units for each in other.modules)


def _ranks_agree(domain: Domain, units: Sequence[Unit], plans: NewPlans) -> bool:
    """Whether all ranks of ``domain`` have these new plans and can move their shards alike.
    Collective over its mesh."""
    buckets = [bucket for unit in units for bucket in unit.buckets if bucket.domain is domain]
    is_as_sharded = all(bucket.places.are_sharded for bucket in buckets)
    on_meta = [bucket.is_meta for bucket in buckets]
    mine = number_of(repr((list(plans.values()), on_meta, is_as_sharded)).encode())
    mesh = domain.mesh
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    # The greatest of a number and the greatest of its complement tell whether all ranks agree.
    most, least = greatest(torch.tensor([mine, ~mine], device=domain.device), groups).tolist()
    return is_as_sharded and most == ~least


def _lay_out(unit: Unit, domain: Domain, plans: Sequence[Plan]) -> bool:
    """Lays out the buckets of ``unit`` that are in ``domain``. Returns whether any changed."""
    buckets = [bucket for bucket in unit.buckets if bucket.domain is domain]
    changed = [
        (bucket, plan)
        for bucket, plan in zip(buckets, plans, strict=False)
        if isinstance(plan, BucketPlan) and plan != bucket.plan
    ]
    for bucket, plan in changed:
        replaced = bucket.sharded_parameters
        _move(bucket, plan)
        for parameter in replaced:
            mark_replaced(parameter, by="fully_shard() of a module around it")
    if changed:
        unit.forget_parameters()
    return bool(changed)


@torch.no_grad()
def _move(bucket: Bucket, plan: BucketPlan) -> None:
    """Lays the parameters of ``bucket`` out by another plan. The sharded parameters are new
    objects.

    Collective over the ranks that the bucket is sharded among, unless it is on the meta device. Not
    over those of tensor parallelism, which may have other plans, because tiles may differ in size.
    """
    version, names = bucket.version, [spec.fqn for spec in bucket.plan.specs]
    order = [names.index(spec.fqn) for spec in plan.specs]
    sharded = [bucket.sharded_parameters[index] for index in order]
    # All are gathered before anything changes: a collective may fail.
    tiles = [] if bucket.is_meta else [cast(ShardedTensor, each).full_tile() for each in sharded]
    bucket.plan = plan
    bucket.owned = [bucket.owned[index] for index in order]
    bucket.parameters = [bucket.parameters[index] for index in order]
    bucket.allocate(bucket.device, sharded)
    if tiles:
        bucket.take(tiles)
    bucket.give_memory()
    if bucket.start is not None:
        bucket.start.move(order, version, bucket.version)
