"""Contexts of ranks that run different units, or different numbers of forwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.engine.context import ModelContext
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.features.negotiation import schedule
from fsdp_overlap.features.uneven.hosts import HostExchange, group_of_hosts, host_ranks

T = TypeVar("T")


def negotiate(ctx: ModelContext) -> None:
    """Prepare for units that only some ranks run. Collective over the largest mesh."""
    find_conditional(ctx.units)
    mesh_infos = {mesh_info.mesh: mesh_info for mesh_info in ctx.mesh_infos}
    mesh = _mesh_of_all(mesh_infos)
    cache = mesh_infos[mesh].group_cache
    hosts = HostExchange([group_of_hosts(cache, mesh, ranks) for ranks in host_ranks(mesh)])
    ctx.comm_context.exchange_messages = hosts.exchange
    for unit in ctx.units:
        unit.set_uneven(True)
        unit.sync_requires_grad()  # also where only other ranks run it
    schedule.negotiate(ctx.schedule)


def shadow(ctx: ModelContext) -> None:
    ctx.lazy_init()
    if not ctx.schedule.is_uneven:
        raise RuntimeError(
            "ctx.shadow(): other ranks expect all to run the same. Call it within "
            "`with ctx.uneven():` on all ranks, or in a loop over ctx.until_all_done()"
        )
    ctx.schedule.shadow()


@contextmanager
def uneven(ctx: ModelContext) -> Iterator[None]:
    is_outermost, ctx.is_uneven = not ctx.is_uneven, True
    ctx.lazy_init()
    if not ctx.schedule.is_uneven:
        negotiate(ctx)
    try:
        yield
        if is_outermost:
            ctx.schedule.wait_for_all()
    finally:
        if is_outermost:
            ctx.is_uneven = False
            if not any(unit.is_conditional for unit in ctx.units):
                ctx.schedule.expect_same()
                for unit in ctx.units:
                    unit.set_uneven(False)


def until_all_done(ctx: ModelContext, batches: Iterable[T]) -> Iterator[T | None]:
    iterator = iter(batches)
    with uneven(ctx):
        while True:
            batch = next(iterator, None)
            ctx.schedule.wait_for_all()
            if not any(map(any, ctx.comm_context.exchange(bytes([batch is not None])))):
                return
            yield batch


def _mesh_of_all(meshes: Collection[DeviceMesh]) -> DeviceMesh:
    """Return the mesh that holds the ranks of all others.

    Raises:
        ValueError: none does.
    """
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks = set(largest.mesh.flatten().tolist())
    for mesh in meshes:
        if not ranks.issuperset(mesh.mesh.flatten().tolist()):
            raise ValueError(
                "where ranks may run different units all exchange messages, but no mesh of the "
                f"context holds the ranks of both {mesh} and {largest}: shard the root on a mesh "
                "of all ranks"
            )
    return largest


def find_conditional(units: Sequence[Unit]) -> None:
    """Find which of ``units``, all units of a context, only some ranks may run: those within a
    conditional one too."""
    for unit in units:
        if unit.options.conditional:
            within = {module for member in unit.modules for module in member.modules()}
            for other in units:
                other.is_conditional |= all(module in within for module in other.modules)
    for unit in units:
        for owner in unit.owners:
            owner.is_conditional |= unit.is_conditional
