"""Plans units again that were planned one by one, once all of them are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from fsdp_overlap.desync.order_check import greatest
from fsdp_overlap.engine.bucket import Bucket
from fsdp_overlap.engine.context import FsdpContext
from fsdp_overlap.engine.digests import number_of
from fsdp_overlap.engine.domain import Domain
from fsdp_overlap.engine.ownership import mark_replaced
from fsdp_overlap.engine.plan_comparison import compare_plans
from fsdp_overlap.engine.sharded_forms import own_parts
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.engine.unit_plans import all_or_none
from fsdp_overlap.engine.units import name_units
from fsdp_overlap.layout import BucketPlan, Plan
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor

NewPlans = Mapping[nn.Module, Sequence[Plan]]
"""The new plans of units, by their first modules."""


def plan_again(ctx: FsdpContext, unit: Unit) -> list[Unit]:
    """If ``unit`` is around all other units that ``ctx`` ever had, plans all of them together, and
    moves the shards of those whose plan changes. Returns these units, whose sharded parameters are
    new objects. This is collective over the ranks that shard the units, unless everything may be
    cut anywhere and ranks are not to compare their plans.

    A unit that is planned alone does not know what comes after it, so ranks may own unequal parts
    of the model. Meanwhile this takes memory for the whole parameters of one unit, and for a second
    copy of the shards that move. Nothing is done once a forward has run, or if it would gain
    little. Nor is anything done if somebody replaced a parameter, or if a unit is on the meta
    device on some ranks only.

    Raises:
        RuntimeError: ranks planned the units differently, or a collective failed. Every unit on
            this rank lies as it did before.
    """
    units = ctx.units
    if len(units) < 2 or ctx.was_settled or not _is_around_all(unit, units):
        return []
    with all_or_none(domain.plans for domain in ctx.domains):
        # Ranks compare also where there is nothing to gain: others may find that there is.
        moves = [
            Move(other, bucket, plan)
            for domain in ctx.domains
            if ctx.validate_layouts or not domain.plans.are_sand
            for other, bucket, plan in _changes(domain, units, _new_plans(domain, units))
        ]
    # All is there now, so nothing can keep some units from moving when others do.
    for move in moves:
        move.finish()
    moved = list(dict.fromkeys(move.unit for move in moves))
    for other in moved:
        other.forget_parameters()
    return moved


def _is_around_all(unit: Unit, units: Sequence[Unit]) -> bool:
    """Whether ``unit``, the newest of its context, is around all units that the context ever had.
    Those that are gone count too, because ranks may differ in when a unit goes."""
    inside = {id(inner) for module in unit.modules for inner in module.modules()}
    has_lost_none = len(units) == unit.index + 1
    return has_lost_none and all(id(each) in inside for other in units for each in other.modules)


def _new_plans(domain: Domain, units: Sequence[Unit]) -> NewPlans:
    """The plans of units that were planned together. Empty if nothing is to move. Collective over
    the mesh of ``domain``.

    Raises:
        RuntimeError: ranks planned differently.
    """
    go_back = domain.plans.way_back()
    plans = domain.plans.plan_again()
    mesh = domain.mesh
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    buckets = [bucket for unit in units for bucket in unit.buckets if bucket.domain is domain]
    is_as_sharded = all(bucket.places.are_sharded for bucket in buckets)
    on_meta = [bucket.is_meta for bucket in buckets]
    mine = number_of(repr((list(plans.values()), on_meta, is_as_sharded)).encode())
    # The greatest of a number and the greatest of its complement tell whether all ranks agree.
    most, least = greatest(torch.tensor([mine, ~mine], device=domain.device), groups).tolist()
    if most == ~least and is_as_sharded:
        return plans
    go_back()
    if most != ~least:
        name_units(units)
        compare_plans(units, domain, groups)
    return {}


def _changes(
    domain: Domain, units: Sequence[Unit], plans: NewPlans
) -> Iterator[tuple[Unit, Bucket, BucketPlan]]:
    """The buckets in ``domain`` whose plan is another in ``plans``, with their units."""
    for unit in units:
        buckets = [bucket for bucket in unit.buckets if bucket.domain is domain]
        for bucket, plan in zip(buckets, plans.get(unit.modules[0], ()), strict=False):
            if isinstance(plan, BucketPlan) and plan != bucket.plan:
                yield unit, bucket, plan


class Move:
    """Lays the parameters of ``bucket`` out by another plan. The sharded parameters will be new
    objects. This only makes what this rank will hold: nothing moves before :meth:`finish`.

    Collective over the ranks that the bucket is sharded among, unless it is on the meta device. Not
    over those of tensor parallelism, which may have other plans, because tiles may differ in size.
    """

    @torch.no_grad()
    def __init__(self, unit: Unit, bucket: Bucket, plan: BucketPlan) -> None:
        self.unit = unit
        self._bucket = bucket
        self._plan = plan
        names = [spec.fqn for spec in bucket.plan.specs]
        self._order = [names.index(spec.fqn) for spec in plan.specs]
        sharded = [bucket.sharded_parameters[index] for index in self._order]
        self._parts: list[torch.Tensor] = []
        if not bucket.is_meta:
            tiles = [cast(RaggedDTensor, each).full_tile() for each in sharded]
            self._parts = [
                part.to(bucket.rest_device, copy=True)
                for part in own_parts(plan, tiles, bucket.domain.plan_rank)
            ]

    @torch.no_grad()
    def finish(self) -> None:
        """Moves the parameters. Not collective."""
        bucket, order = self._bucket, self._order
        version, replaced = bucket.version, bucket.sharded_parameters
        bucket.plan = self._plan
        bucket.owned = [bucket.owned[index] for index in order]
        bucket.parameters = [bucket.parameters[index] for index in order]
        bucket.allocate(bucket.device, [replaced[index] for index in order])
        for sharded, part in zip(bucket.sharded_parameters, self._parts, strict=False):
            sharded._local_tensor.copy_(part)
        self._parts.clear()
        bucket.give_memory()
        if bucket.start is not None:
            bucket.start.move(order, version, bucket.version)
        for parameter in replaced:
            mark_replaced(parameter, by="fully_shard() of a module around it")
