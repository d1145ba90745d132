"""What the ranks' parameters held when they were sharded: compared once, or taken from the first
rank."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import isqrt
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.runtime.order_check import START, greatest
from fsdp_overlap.runtime.ownership import OwnedParameter, modules_outside_units
from fsdp_overlap.runtime.tensor_parallel import tile_in

if TYPE_CHECKING:
    from fsdp_overlap.runtime.bucket import Bucket
    from fsdp_overlap.runtime.domain import Domain

# Odd, with as many bits of either kind: what is multiplied by them differs all over.
FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB

# So many elements are looked at one by one.
FEW = 4096

# In place of a digest: of what nobody knows any more.
UNKNOWN = -(2**63)

# In place of what sums up a rank's digests: some rank has others.
DIFFERENT = -1


def digest(values: torch.Tensor) -> torch.Tensor:
    """A number that another order of other bits would hardly have, 0-dimensional, where ``values``
    are: no host waits for it. Takes little memory, and two passes over ``values``."""
    integers = {1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32)
    bits = values.resolve_conj().resolve_neg().reshape(-1).view(integers)
    # As a matrix, of which every element counts in one sum of a row and in one of a column. Of an
    # odd number of equal elements the sum tells which, whatever the width of integers.
    width = isqrt(bits.numel()) | 1
    height = _odd_up_to(bits.numel() // width) if bits.numel() > FEW else 0
    matrix = bits[: height * width].view(height, width)
    sums = [matrix.sum(0, dtype=integers), matrix.sum(1, dtype=integers), bits[matrix.numel() :]]
    mixed = torch.cat(sums).long()
    mixed = mixed * FACTORS[0] + torch.arange(len(mixed), device=mixed.device) * FACTORS[1]
    mixed = (mixed ^ (mixed >> 31)) * FACTORS[2]
    return (mixed ^ (mixed >> 29)).sum()


def _odd_up_to(number: int) -> int:
    return number if number % 2 else max(0, number - 1)


class Start:
    """What this rank's parameters of a bucket, the whole ``values``, hold while their shards are of
    ``version``."""

    def __init__(self, values: Sequence[torch.Tensor], version: int) -> None:
        self._digests = [] if any(each.is_meta for each in values) else list(map(digest, values))
        self._count = len(values)
        self._version = version

    def digests(self, version: int) -> list[int]:
        """Of each parameter, now that the shards are of ``version``. The host waits for them."""
        if not self._digests or version != self._version:
            return [UNKNOWN] * self._count
        device = self._digests[0].device  # some may be on the host
        found: list[int] = torch.stack([each.to(device) for each in self._digests]).tolist()
        return found


def compare_starts(buckets: Iterable[Bucket]) -> None:
    """Compares those of ``buckets`` that were not compared yet. Collective over their meshes.

    Raises:
        RuntimeError: on every rank, if ranks hold different values. Names the first parameter.
    """
    by_domain: dict[Domain, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.start is not None:
            by_domain.setdefault(bucket.domain, []).append(bucket)
    failure = ""
    # Small meshes first: what differs there is an error on all ranks of those that follow.
    for domain in sorted(by_domain, key=lambda domain: domain.mesh.size()):
        failure = _difference(domain, by_domain[domain], failure) or failure
    if failure:
        raise RuntimeError(failure)
    for compared in by_domain.values():
        for bucket in compared:
            bucket.start = None


def _difference(domain: Domain, buckets: Sequence[Bucket], failure: str) -> str:
    """What differs on ranks of ``domain``, or between them and others; ``failure`` is what this
    rank knows of that. Empty where nothing does, and where they have different models, which the
    check of the order tells."""
    names = [f"{spec.fqn!r} of unit {b.label!r}" for b in buckets for spec in b.plan.specs]
    digests: list[int] = []
    for bucket in buckets:
        assert bucket.start is not None
        digests += bucket.start.digests(bucket.version)
    shapes = _number(repr([bucket.plan.specs for bucket in buckets]).encode())
    summary = DIFFERENT if failure else _number(array("q", digests).tobytes())
    groups = domain.groups.to_confirm if domain.order_check.confirms else domain.groups.of_all
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


def _number(content: bytes) -> int:
    return int.from_bytes(sha256(content).digest()[:7], "little")


def take_from_first(
    modules: Sequence[nn.Module],
    by_domain: Mapping[Domain, Sequence[OwnedParameter]],
    mesh: DeviceMesh,
) -> None:
    """Makes parameters what they are on the first rank of their domain's mesh, and the buffers of
    ``modules`` what they are on that of ``mesh``. Collective."""
    for domain, items in by_domain.items():
        for item in items:
            _take_from_first(tile_in(item.parameter), domain.mesh)
    for _, owner in modules_outside_units(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and not buffer.is_meta:
                _take_from_first(tile_in(buffer), mesh)


def _take_from_first(values: torch.Tensor, mesh: DeviceMesh) -> None:
    """In place. Takes as much memory again for values that are not contiguous on the device of
    ``mesh``."""
    if not values.numel():
        return
    values = values.detach()
    sent = values.to(mesh.device_type).contiguous()
    # As bytes, for not every backend knows every dtype.
    raw = sent.view(-1).view(torch.uint8)
    for dim in range(mesh.ndim):
        coordinate = list(mesh.get_coordinate() or ())
        coordinate[dim] = 0
        first = int(mesh.mesh[tuple(coordinate)])
        dist.broadcast(raw, first, group=mesh.get_group(dim))
    if sent is not values:
        values.copy_(sent)
