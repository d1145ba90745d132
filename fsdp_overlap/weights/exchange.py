"""What one exchange of weights runs on: the ranks that take part, their group, lane and faults."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap.agreement.faults import Faults
from fsdp_overlap.comm.lanes import Lane, Ticket, make_lane
from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.runtime.context import context_of
from fsdp_overlap.weights import moving
from fsdp_overlap.weights.regions import Region, parts, whole
from fsdp_overlap.weights.routes import (
    Note,
    Round,
    Routed,
    Side,
    on_several_meshes,
    plan_rounds,
    route,
)
from fsdp_overlap.weights.tensors import Meshes, connected, units_of

# A piece is a quarter of the largest weight, within these bounds: so pieces take little beside the
# weights themselves, and are still large enough to travel well.
_PIECE_BYTES = (1 << 20, 64 << 20)

T = TypeVar("T")


@dataclass
class Exchange:
    """The ranks that exchange weights. ``group`` is ``None`` where there is one. ``what`` names
    the exchange in errors and traces."""

    what: str
    group: dist.ProcessGroup | None
    device: torch.device
    lane: Lane
    faults: Faults | None = None

    def notes(self, note: Callable[[], Note], arguments: str) -> list[Note]:
        """What each rank has and wants, as its ``note`` says. Collective.

        Raises:
            RuntimeError: ``note`` raised on another rank.
            ValueError: ranks gave other ``arguments``.
        """
        raised: Exception | None = None
        mine = None
        try:
            mine = note()
        except Exception as error:
            raised = error
        told = self.told((arguments, mine, f"{raised!r}"))
        if raised is not None:
            raise raised
        for rank, (given, its, what) in enumerate(told):
            if its is None:
                raise RuntimeError(f"{self.what}: rank {self.named(rank)} raised {what}")
            if given != told[0][0]:
                first = f"rank {self.named(0)} gave {told[0][0]}"
                raise ValueError(f"{self.what}: {first}, and rank {self.named(rank)} {given}")
        return [its for _, its, _ in told if its is not None]

    def route(self, notes: Sequence[Note], *, strict: bool, one: bool) -> list[Routed]:
        """How each tensor travels. See :func:`~fsdp_overlap.weights.routes.route`.

        Raises:
            ValueError: what ranks have and want does not go together.
        """
        try:
            return route(notes, strict=strict, one=one)
        except ValueError as error:
            raise ValueError(f"{self.what}: {error}") from None

    def check_copies(self, notes: Sequence[Note], weights: Mapping[str, torch.Tensor]) -> None:
        """Checks that what lies on each of several meshes under one name are copies. Collective if
        there is any.

        Raises:
            ValueError: they differ, as experts do that have the same names on all ranks.
        """
        names = on_several_meshes(notes)
        if not names:
            return
        mine = {
            (name, region): digest_of(values)
            for name in names
            if name in weights
            for region, values in parts(weights[name])
        }
        told = self.told(mine)
        for name in names:
            by_mesh: dict[tuple[int, ...], dict[Region, int]] = {}
            for rank, note in enumerate(notes):
                if name not in note.has:
                    continue
                of_mesh = by_mesh.setdefault(note.has[name].mesh, {})
                of_mesh.update(
                    {region: told[rank][name, region] for region in note.has[name].regions}
                )
            first, *others = by_mesh.items()
            for mesh, digests in others:
                if digests != first[1]:
                    raise ValueError(
                        f"{self.what}: {name!r} has other values on ranks {list(mesh)} than on "
                        f"ranks {list(first[0])}, as experts have, or is cut otherwise: give each "
                        "a name of its own by names=, which may depend on the rank"
                    )

    def rounds(self, tensors: Sequence[Routed], piece_bytes: int | None) -> list[Round]:
        """The rounds in which ``tensors`` travel."""
        least, most = _PIECE_BYTES
        largest = max((whole(t.shape).numel * t.dtype.itemsize for t in tensors), default=0)
        piece_bytes = piece_bytes or min(max(largest // 4, least), most)
        return plan_rounds(tensors, self.rank, self.ranks, piece_bytes)

    def told(self, mine: T) -> list[T]:
        """What each rank tells. Collective."""
        if self.group is None:
            return [mine]
        self._begin()
        return gather_objects(mine, self.group, self.device, self.what)

    def _begin(self) -> None:
        if self.faults is not None and self.group is not None:
            self.faults.begins(self.what, self.group)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.group is None else self.group.rank()

    @property
    def ranks(self) -> int:
        """How many take part."""
        return 1 if self.group is None else self.group.size()

    def named(self, rank: int) -> int:
        """The global rank of a place in the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def start(self, each: Round, sources: moving.Parts, targets: moving.Parts) -> Ticket:
        """Enqueues a round. Collective."""
        self._begin()
        self.lane.after_compute()  # which may have edited what is sent
        return moving.start(each, sources, targets, self.group, self.device, self.lane, self.what)


def exchange_of(model: nn.Module, weights: Collection[torch.Tensor], what: str) -> Exchange:
    """The exchange among the ranks that together have ``weights``, those of ``model``. Collective
    over them at its first call.

    Raises:
        ValueError: they lie over several ranks, and no module of the model is a unit.
    """
    ranks, units = connected(weights), units_of(model)
    if not units:
        if len(ranks) > 1:
            raise ValueError(f"{what}: no module of the model was given to fully_shard()")
        device = next((each.device for each in weights), torch.device("cpu"))
        return Exchange(what, None, device, make_lane(device))
    context = context_of(units[0])
    lane = context.transfers.gather_lane
    if len(ranks) == 1:
        return Exchange(what, None, context.device, lane)
    domain = context.domain_of(units[0].mesh)
    like = domain.mesh.get_group(domain.mesh.ndim - 1)
    group = domain.group_cache.connect(ranks, like, domain.device_type)
    return Exchange(what, group, context.device, lane, context.faults)


def sides_of(weights: Mapping[str, torch.Tensor]) -> dict[str, Side]:
    """What this rank has of ``weights``."""
    meshes, found = Meshes(), {}
    for name, tensor in weights.items():
        regions = tuple(region for region, _ in parts(tensor))
        found[name] = Side(tuple(tensor.shape), tensor.dtype, regions, meshes.of(tensor))
    return found


def digest_of(values: torch.Tensor) -> int:
    """A checksum of the elements."""
    held = values.contiguous().cpu()
    return zlib.crc32((ctypes.c_char * held.nbytes).from_address(held.data_ptr()))
