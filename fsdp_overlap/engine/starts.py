"""What the ranks' parameters held when they were sharded: compared once, or taken from the first
rank. See Note [starts]."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.desync.order_check import START, greatest
from fsdp_overlap.engine.bucket import Bucket
from fsdp_overlap.engine.digests import UNKNOWN, number_of
from fsdp_overlap.engine.domain import Domain
from fsdp_overlap.engine.ownership import OwnedParameter, modules_outside_units
from fsdp_overlap.engine.tiles import tile_in
from fsdp_overlap.tensor.extension import inner_tensors

# Stands for the summary of a rank's digests, if it is known that some ranks differ.
DIFFERENT = -1


def compare_starts(buckets: Iterable[Bucket]) -> None:
    """Compares what ranks start from in those ``buckets`` that were not compared yet. Collective
    over their meshes.

    Raises:
        RuntimeError: on every rank, if ranks hold different values. Names the first parameter.
    """
    by_domain: dict[Domain, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.start is not None:
            by_domain.setdefault(bucket.domain, []).append(bucket)
    failure = ""
    # Small meshes first: a difference there is an error on all ranks of the meshes that follow.
    for domain in sorted(by_domain, key=lambda domain: domain.mesh.size()):
        failure = _difference(domain, by_domain[domain], failure) or failure
    if failure:
        raise RuntimeError(failure)
    for compared in by_domain.values():
        for bucket in compared:
            bucket.start = None


def _difference(domain: Domain, buckets: Sequence[Bucket], failure: str) -> str:
    """What differs between ranks of ``domain``, or was found on another mesh, in words. ``failure``
    is what this rank found there. Empty if nothing differs, and if ranks have different models,
    which the check of the order finds."""
    names = [f"{spec.fqn!r} of unit {b.label!r}" for b in buckets for spec in b.plan.specs]
    digests: list[int] = []
    for bucket in buckets:
        assert bucket.start is not None
        digests += bucket.start.digests(bucket.version)
    shapes = number_of(repr([bucket.plan.specs for bucket in buckets]).encode())
    summary = DIFFERENT if failure else number_of(array("q", digests).tobytes())
    groups = domain.groups_to_ask
    for group in groups:
        # What differs in one group is made known to the next.
        for _, its_shapes, its_summary in domain.order_check.ask([START, shapes, summary], group):
            shapes = shapes if its_shapes == shapes else DIFFERENT
            summary = summary if its_summary == summary else DIFFERENT
    if shapes == DIFFERENT or summary != DIFFERENT:
        return ""

    def over_ranks(numbers: Sequence[int]) -> list[int]:
        found: list[int] = greatest(torch.tensor(numbers, device=domain.device), groups).tolist()
        return found

    # The greatest of a number and the greatest of its complement tell whether all ranks agree.
    complements = [UNKNOWN if each == UNKNOWN else ~each for each in digests]
    has_failed, *of_all = over_ranks([bool(failure), *digests, *complements])
    high, low = of_all[: len(digests)], of_all[len(digests) :]
    different = [
        index
        for index, (most, least) in enumerate(zip(high, low, strict=True))
        if UNKNOWN != most != ~least
    ]
    if not different:
        elsewhere = "ranks of another mesh were given different weights, as they tell"
        return failure or (elsewhere if has_failed else "")
    first = different[0]
    is_known, is_high = digests[first] != UNKNOWN, digests[first] == high[first]
    rank = dist.get_rank()
    ranks = over_ranks([rank if is_high else -1, rank if is_known and not is_high else -1])
    more = f", nor were {len(different) - 1} more" if len(different) > 1 else ""
    return (
        f"parameter {names[first]} was not the same on ranks {min(ranks)} and {max(ranks)} when "
        f"fully_shard() sharded it{more}: each rank would train a part of a model of its own; "
        "start from one seed or one checkpoint on every rank, or from what the first one has, by "
        "FsdpContext(sync_module_states=True)"
    )


def take_from_first(
    modules: Sequence[nn.Module],
    by_domain: Mapping[Domain, Sequence[OwnedParameter]],
    mesh: DeviceMesh,
) -> None:
    """Gives parameters the values that they have on the first rank of their domain's mesh, and the
    buffers of ``modules`` those that they have on the first rank of ``mesh``. Collective over these
    meshes."""
    for domain, items in by_domain.items():
        for item in items:
            for values in inner_tensors(tile_in(item.parameter)):
                _take_from_first(values, domain.mesh)
    for _, owner in modules_outside_units(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and not buffer.is_meta:
                _take_from_first(tile_in(buffer), mesh)


def _take_from_first(values: torch.Tensor, mesh: DeviceMesh) -> None:
    """Overwrites ``values`` with those of the first rank. Takes as much memory again if they are
    not contiguous, or not on the device of ``mesh``."""
    if not values.numel():
        return
    values = values.detach()
    sent = values.to(mesh.device_type).contiguous()
    # Sent as bytes, because not every backend knows every dtype.
    raw = sent.view(-1).view(torch.uint8)
    for dim in range(mesh.ndim):
        coordinate = list(mesh.get_coordinate() or ())
        coordinate[dim] = 0
        first = int(mesh.mesh[tuple(coordinate)])
        dist.broadcast(raw, first, group=mesh.get_group(dim))
    if sent is not values:
        values.copy_(sent)
