"""Plans units again that were planned one by one, once all of them are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_overlap.layout import BucketPlan
from fsdp_overlap.runtime.context import FsdpContext
from fsdp_overlap.runtime.domain import Domain
from fsdp_overlap.runtime.ownership import mark_replaced
from fsdp_overlap.runtime.unit import Unit


def plan_again(ctx: FsdpContext, unit: Unit) -> Iterator[Unit]:
    """If ``unit`` is around all other units of ``ctx``, plans all of them together, and moves the
    shards of those whose plan changes. Yields these units, whose sharded parameters are new
    objects. Collective over the ranks that shard them, but not for units on the meta device.

    A unit that is planned alone does not know what comes after it, so ranks may own unequal parts
    of the model. Memory for one whole parameter is needed meanwhile. Nothing is done once a forward
    has run, if it would gain little, or if somebody replaced a parameter, which the next forward
    tells.
    """
    units = ctx.units
    if len(units) < 2 or ctx.was_settled or not _is_around_all(unit, units):
        return
    if not all(bucket.places.are_sharded for other in units for bucket in other.buckets):
        return
    planned = [(domain, domain.plans.plan_again()) for domain in ctx.domains]
    for domain, plans in planned:
        for other in units:
            if _lay_out(other, domain, plans.get(other.modules[0], ())):
                yield other


def _lay_out(unit: Unit, domain: Domain, plans: Sequence[BucketPlan]) -> bool:
    """Lays out the buckets of ``unit`` that are in ``domain``. Returns whether any changed."""
    buckets = [bucket for bucket in unit.buckets if bucket.domain is domain]
    changed = [
        (bucket, plan) for bucket, plan in zip(buckets, plans, strict=False) if plan != bucket.plan
    ]
    for bucket, plan in changed:
        replaced = bucket.sharded_parameters
        bucket.lay_out(plan)
        for parameter in replaced:
            mark_replaced(parameter, by="fully_shard() of a module around it")
    if changed:
        unit.forget_parameters()
    return bool(changed)


def _is_around_all(unit: Unit, units: list[Unit]) -> bool:
    inside = {id(inner) for module in unit.modules for inner in module.modules()}
    return all(id(module) in inside for other in units for module in other.modules)
