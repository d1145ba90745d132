"""What one exchange of weights runs on: the ranks that take part, their group, lane and faults."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.lanes import Lane, Ticket, make_lane
from fsdp_overlap.comm.objects import all_give, gather_objects, tell_object
from fsdp_overlap.desync.faults import Faults
from fsdp_overlap.engine.context import context_of
from fsdp_overlap.weights import moving
from fsdp_overlap.weights.plans import Plan, Plans, number_of, plans_of
from fsdp_overlap.weights.regions import Region, parts, spread_of, whole
from fsdp_overlap.weights.routes import (
    Messages,
    Round,
    Routed,
    Side,
    Sides,
    on_several_meshes,
    plan_rounds,
    route,
)
from fsdp_overlap.weights.tensors import connected, units_of

# A piece is a quarter of the largest weight, within these bounds: so pieces take little beside the
# weights themselves, and are still large enough to travel well.
_PIECE_BYTES = (1 << 20, 64 << 20)

T = TypeVar("T")


class Note(NamedTuple):
    """What a rank tells the others: how what it ``has`` and ``wants`` lies, by name."""

    has: Mapping[str, Side]
    wants: Mapping[str, Side]

    def digest(self) -> int:
        """A number for all of it."""
        distinct = {id(side): side for sides in self for side in sides.values()}
        at = {each: number for number, each in enumerate(distinct)}
        names = [[(name, at[id(side)]) for name, side in sides.items()] for sides in self]
        return number_of(names, list(distinct.values()))


class Told(NamedTuple):
    """What all ranks told, and a number for what each told."""

    has: dict[str, list[tuple[Side, Sequence[int]]]]
    wants: dict[str, list[tuple[Side, Sequence[int]]]]
    digests: list[int]


@dataclass
class Exchange:
    """The ranks that exchange weights. ``group`` is ``None`` where there is one. ``what`` names
    the exchange in errors and traces."""

    what: str
    group: dist.ProcessGroup | None
    device: torch.device
    lane: Lane
    faults: Faults | None = None
    plans: Plans = field(default_factory=Plans)

    def planned(
        self,
        find: Callable[[], Mapping[str, torch.Tensor]],
        arguments: str,
        make: Callable[[Sides], list[Round]],
        alone: str = "",
    ) -> tuple[Mapping[str, torch.Tensor], Plan]:
        """The weights of this rank, as ``find`` gives them, and the plan of their exchange, which
        ``make`` makes of what ranks have. Collective. If all ranks keep the same plan for the same
        ``arguments``, that is the plan. ``alone`` are arguments that change nothing in it.

        Raises:
            RuntimeError: ``find`` raised on another rank.
            ValueError: ranks gave other arguments, or as ``make``, on all ranks.
        """
        weights: Mapping[str, torch.Tensor] = {}
        raised: Exception | None = None
        plan = None
        asked = f"{self.what}: {arguments}"
        try:
            weights = find()
            plan = self.plans.find(asked, weights)
        except Exception as error:
            raised = error
        if self._all_give(0 if plan is None else number_of(plan.number, alone)) and plan:
            return weights, plan

        def note() -> Note:
            if raised is not None:
                raise raised
            return self.note_of(weights, {})

        told = self.told_sides(note, f"{arguments}{alone}")
        plan = Plan(number_of(asked, told.digests), told.has, make(told.has))
        self.plans.keep(asked, weights, plan)
        return weights, plan

    def note_of(self, has: Mapping[str, torch.Tensor], wants: Mapping[str, torch.Tensor]) -> Note:
        """What this rank tells of its tensors."""
        known: dict[object, Side] = {}
        return Note(self._sides_of(has, known), self._sides_of(wants, known))

    def _sides_of(
        self, weights: Mapping[str, torch.Tensor], known: dict[object, Side]
    ) -> dict[str, Side]:
        """How each of ``weights`` lies. Those that lie alike, as those of equal blocks, have one
        object, so that it is told once and planned once."""
        found = {}
        for name, tensor in weights.items():
            plain = tuple(tensor.shape), tensor.dtype
            key = tensor._spec if isinstance(tensor, DTensor) else plain
            if key not in known:
                known[key] = Side(*plain)
                if isinstance(tensor, DTensor):
                    spread, mesh = spread_of(tensor), tensor.device_mesh.mesh.flatten().tolist()
                    places = self.places
                    regions = {places[r]: spread[r] for r in sorted(spread) if r in places}
                    known[key] = Side(*plain, regions, tuple(sorted(mesh)))
            found[name] = known[key]
        return found

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The place in the group of each global rank."""
        if self.group is None:
            return {dist.get_rank() if dist.is_initialized() else 0: 0}
        return {rank: at for at, rank in enumerate(dist.get_process_group_ranks(self.group))}

    def told_sides(self, note: Callable[[], Note], arguments: str) -> Told:
        """What all ranks have and want, as their ``note`` says. Collective. Ranks whose notes are
        equal tell them once.

        Raises:
            RuntimeError: ``note`` raised on another rank.
            ValueError: ranks gave other ``arguments``.
        """
        raised: Exception | None = None
        mine, digest = Note({}, {}), 0
        try:
            mine = note()
            digest = mine.digest()
        except Exception as error:
            raised = error
        told = self.told((arguments, digest, f"{raised!r}"))
        if raised is not None:
            raise raised
        members: dict[int, list[int]] = {}
        for rank, (given, its, what) in enumerate(told):
            if not its:
                raise RuntimeError(f"{self.what}: rank {self.named(rank)} raised {what}")
            if given != told[0][0]:
                first = f"rank {self.named(0)} gave {told[0][0]}"
                raise ValueError(f"{self.what}: {first}, and rank {self.named(rank)} {given}")
            members.setdefault(its, []).append(rank)
        found = Told({}, {}, [its for _, its, _ in told])
        for ranks in members.values():
            each = mine if len(members) == 1 else self._told_by(ranks[0], mine)
            for name, side in each.has.items():
                found.has.setdefault(name, []).append((side, ranks))
            for name, side in each.wants.items():
                found.wants.setdefault(name, []).append((side, ranks))
        return found

    def route(self, has: Sides, wants: Sides, *, strict: bool, one: bool) -> list[Routed]:
        """How each tensor travels. See :func:`~fsdp_overlap.weights.routes.route`.

        Raises:
            ValueError: what ranks have and want does not go together.
        """
        try:
            return route(has, wants, self.ranks, strict=strict, one=one)
        except ValueError as error:
            raise ValueError(f"{self.what}: {error}") from None

    def check_copies(self, has: Sides, weights: Mapping[str, torch.Tensor]) -> None:
        """Checks that what lies on each of several meshes under one name are copies. Collective if
        there is any.

        Raises:
            ValueError: they differ, as experts do that have the same names on all ranks.
        """
        names = on_several_meshes(has)
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
            for side, ranks in has[name]:
                of_mesh = by_mesh.setdefault(side.mesh, {})
                for rank, regions in side.on(ranks):
                    of_mesh.update({each: told[rank][name, each] for each in regions if each.numel})
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
        largest = max((whole(t.route.shape).numel * t.dtype.itemsize for t in tensors), default=0)
        return plan_rounds(tensors, piece_bytes or min(max(largest // 4, least), most))

    def told(self, mine: T) -> list[T]:
        """What each rank tells. Collective."""
        if self.group is None:
            return [mine]
        self._begin()
        return gather_objects(mine, self.group, self.device, self.what)

    def _told_by(self, rank: int, mine: T) -> T:
        """What ``rank`` tells, of what each has. Collective."""
        assert self.group is not None
        self._begin()
        return tell_object(mine, rank, self.group, self.device, self.what)

    def _all_give(self, number: int) -> bool:
        """Whether all ranks give the same number. Collective."""
        if self.group is None:
            return True
        self._begin()
        return all_give(number, self.group, self.device, self.what)

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

    def start(
        self,
        each: Round,
        messages: Messages,
        sources: moving.Parts,
        targets: moving.Parts,
    ) -> Ticket:
        """Enqueues a round, of which this rank has ``messages``. Collective."""
        self._begin()
        self.lane.after_compute()  # which may have edited what is sent
        return moving.start(
            each, messages, sources, targets, self.group, self.device, self.lane, self.what
        )


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
    lane = context.comm_context.gather_lane
    if len(ranks) == 1:
        return Exchange(what, None, context.device, lane, plans=plans_of(context))
    mesh_info = context.mesh_info_of(units[0].mesh)
    like = mesh_info.mesh.get_group(mesh_info.mesh.ndim - 1)
    group = mesh_info.group_cache.connect(ranks, like, mesh_info.device_type)
    return Exchange(what, group, context.device, lane, context.faults, plans_of(context))


def digest_of(values: torch.Tensor) -> int:
    """A checksum of the elements."""
    held = values.contiguous().cpu()
    return zlib.crc32((ctypes.c_char * held.nbytes).from_address(held.data_ptr()))
