"""Exchanges of weights: the ranks that take part, what they tell each other, and rounds of packed
messages between them."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.collectives import Issued, all_to_all, choose
from fsdp_overlap.comm.lanes import Lane, Ticket, make_lane
from fsdp_overlap.comm.objects import all_equal, broadcast_object, gather_objects
from fsdp_overlap.desync.faults import Faults
from fsdp_overlap.engine.context import context_of
from fsdp_overlap.layout import BucketPlan
from fsdp_overlap.weights.plan_cache import ExchangePlan, PlanCache, hash_of, plan_cache_of
from fsdp_overlap.weights.tensor_chunks import Chunk, chunks_by_rank, full_chunk, local_chunks
from fsdp_overlap.weights.tensors import connected, units_of
from fsdp_overlap.weights.transfer_plan import (
    Layouts,
    Messages,
    PlannedTensor,
    TensorLayout,
    TransferItem,
    TransferRound,
    on_several_meshes,
    plan_rounds,
    plan_transfers,
)

# A piece is a quarter of the largest weight, within these bounds: so pieces take little beside the
# weights themselves, and are still large enough to travel well.
_PIECE_BYTES = (1 << 20, 64 << 20)

TensorParts = Callable[[str], Sequence[tuple[Chunk, torch.Tensor]]]
"""Gives chunks of the tensor of a name, and views of their values."""

T = TypeVar("T")


class RankLayouts(NamedTuple):
    """What a rank tells the others: how what it ``has`` and ``wants`` lies, by name."""

    has: Mapping[str, TensorLayout]
    wants: Mapping[str, TensorLayout]

    def digest(self) -> int:
        """A number for all of it."""
        distinct = {id(layout): layout for layouts in self for layout in layouts.values()}
        at = {each: number for number, each in enumerate(distinct)}
        names = [[(name, at[id(layout)]) for name, layout in layouts.items()] for layouts in self]
        return hash_of(names, list(distinct.values()))


class GatheredLayouts(NamedTuple):
    """What all ranks told, and a number for what each told."""

    has: dict[str, list[tuple[TensorLayout, Sequence[int]]]]
    wants: dict[str, list[tuple[TensorLayout, Sequence[int]]]]
    digests: list[int]


@dataclass
class WeightExchange:
    """The ranks that exchange weights. ``group`` is ``None`` where there is one. ``what`` names
    the exchange in errors and traces."""

    what: str
    group: dist.ProcessGroup | None
    device: torch.device
    lane: Lane
    faults: Faults | None = None
    plans: PlanCache = field(default_factory=PlanCache)

    def planned(
        self,
        find: Callable[[], Mapping[str, torch.Tensor]],
        arguments: str,
        make: Callable[[Layouts], list[TransferRound]],
        alone: str = "",
    ) -> tuple[Mapping[str, torch.Tensor], ExchangePlan]:
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
        if self._all_equal(0 if plan is None else hash_of(plan.number, alone)) and plan:
            return weights, plan

        def note() -> RankLayouts:
            if raised is not None:
                raise raised
            return self.layouts_of(weights, {})

        told = self.gather_layouts(note, f"{arguments}{alone}")
        plan = ExchangePlan(hash_of(asked, told.digests), told.has, make(told.has))
        self.plans.keep(asked, weights, plan)
        return weights, plan

    def layouts_of(
        self, has: Mapping[str, torch.Tensor], wants: Mapping[str, torch.Tensor]
    ) -> RankLayouts:
        """What this rank tells of its tensors."""
        known: dict[object, TensorLayout] = {}
        return RankLayouts(self._by_tensor(has, known), self._by_tensor(wants, known))

    def _by_tensor(
        self, weights: Mapping[str, torch.Tensor], known: dict[object, TensorLayout]
    ) -> dict[str, TensorLayout]:
        """How each of ``weights`` lies. Those that lie alike, as those of equal blocks, have one
        object, so that it is told once and planned once."""
        found = {}
        for name, tensor in weights.items():
            plain = tuple(tensor.shape), tensor.dtype
            key = tensor._spec if isinstance(tensor, DTensor) else plain
            if key not in known:
                known[key] = TensorLayout(*plain)
                if isinstance(tensor, DTensor):
                    spread = chunks_by_rank(tensor)
                    mesh = tensor.device_mesh.mesh.flatten().tolist()
                    places = self.places
                    chunks = {places[r]: spread[r] for r in sorted(spread) if r in places}
                    known[key] = TensorLayout(*plain, chunks, tuple(sorted(mesh)))
            found[name] = known[key]
        return found

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The place in the group of each global rank."""
        if self.group is None:
            return {dist.get_rank() if dist.is_initialized() else 0: 0}
        return {rank: at for at, rank in enumerate(dist.get_process_group_ranks(self.group))}

    def gather_layouts(self, note: Callable[[], RankLayouts], arguments: str) -> GatheredLayouts:
        """What all ranks have and want, as their ``note`` says. Collective. Ranks whose notes are
        equal tell them once.

        Raises:
            RuntimeError: ``note`` raised on another rank.
            ValueError: ranks gave other ``arguments``.
        """
        raised: Exception | None = None
        mine, digest = RankLayouts({}, {}), 0
        try:
            mine = note()
            digest = mine.digest()
        except Exception as error:
            raised = error
        told = self.gather((arguments, digest, f"{raised!r}"))
        if raised is not None:
            raise raised
        members: dict[int, list[int]] = {}
        for rank, (given, its, what) in enumerate(told):
            if not its:
                raise RuntimeError(f"{self.what}: rank {self.global_rank(rank)} raised {what}")
            if given != told[0][0]:
                first = f"rank {self.global_rank(0)} gave {told[0][0]}"
                raise ValueError(f"{self.what}: {first}, and rank {self.global_rank(rank)} {given}")
            members.setdefault(its, []).append(rank)
        found = GatheredLayouts({}, {}, [its for _, its, _ in told])
        for ranks in members.values():
            each = mine if len(members) == 1 else self._broadcast(ranks[0], mine)
            for name, layout in each.has.items():
                found.has.setdefault(name, []).append((layout, ranks))
            for name, layout in each.wants.items():
                found.wants.setdefault(name, []).append((layout, ranks))
        return found

    def plan_transfers(
        self, has: Layouts, wants: Layouts, *, strict: bool, one: bool
    ) -> list[PlannedTensor]:
        """How each tensor travels. See :func:`~fsdp_overlap.weights.transfer_plan.plan_transfers`.

        Raises:
            ValueError: what ranks have and want does not go together.
        """
        try:
            return plan_transfers(has, wants, self.ranks, strict=strict, one=one)
        except ValueError as error:
            raise ValueError(f"{self.what}: {error}") from None

    def check_replicas(self, has: Layouts, weights: Mapping[str, torch.Tensor]) -> None:
        """Checks that what lies on each of several meshes under one name are copies. Collective if
        there is any.

        Raises:
            ValueError: they differ, as experts do that have the same names on all ranks.
        """
        names = on_several_meshes(has)
        if not names:
            return
        mine = {
            (name, chunk): digest_of(values)
            for name in names
            if name in weights
            for chunk, values in local_chunks(weights[name])
        }
        told = self.gather(mine)
        for name in names:
            by_mesh: dict[tuple[int, ...], dict[Chunk, int]] = {}
            for layout, ranks in has[name]:
                of_mesh = by_mesh.setdefault(layout.mesh, {})
                for rank, chunks in layout.on(ranks):
                    of_mesh.update({each: told[rank][name, each] for each in chunks if each.numel})
            first, *others = by_mesh.items()
            for mesh, digests in others:
                if digests != first[1]:
                    raise ValueError(
                        f"{self.what}: {name!r} has other values on ranks {list(mesh)} than on "
                        f"ranks {list(first[0])}, as experts have, or is cut otherwise: give each "
                        "a name of its own by names=, which may depend on the rank"
                    )

    def rounds(
        self, tensors: Sequence[PlannedTensor], piece_bytes: int | None
    ) -> list[TransferRound]:
        """The rounds in which ``tensors`` travel."""
        least, most = _PIECE_BYTES
        largest = max(
            (full_chunk(t.plan.shape).numel * t.dtype.itemsize for t in tensors), default=0
        )
        return plan_rounds(tensors, piece_bytes or min(max(largest // 4, least), most))

    def gather(self, mine: T) -> list[T]:
        """What each rank tells. Collective."""
        if self.group is None:
            return [mine]
        self._begin()
        return gather_objects(mine, self.group, self.device, self.what)

    def _broadcast(self, rank: int, mine: T) -> T:
        """What ``rank`` tells, of what each has. Collective."""
        assert self.group is not None
        self._begin()
        return broadcast_object(mine, rank, self.group, self.device, self.what)

    def _all_equal(self, number: int) -> bool:
        """Whether all ranks give the same number. Collective."""
        if self.group is None:
            return True
        self._begin()
        return all_equal(number, self.group, self.device, self.what)

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

    def global_rank(self, rank: int) -> int:
        """The global rank of a place in the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def start(
        self,
        each: TransferRound,
        messages: Messages,
        sources: TensorParts,
        targets: TensorParts,
    ) -> Ticket:
        """Enqueue a round, from ``sources`` into ``targets``, which are asked in the lane's order.
        This rank has ``messages``. Collective."""
        self._begin()
        self.lane.after_compute()  # which may have edited what is sent
        sizes = _sizes(messages.receives, self.ranks)

        def issue() -> Issued:
            for part in messages.own:
                _view(part, targets).copy_(_view(part, sources))
            received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            if self.group is None:
                return Issued((), lambda: received)
            if each.gathered:
                mine = received[sum(sizes[: self.rank]) :][: sizes[self.rank]]
                _pack(mine, messages.sends[self.rank], sources)
                plan = BucketPlan((), (), tuple(sizes))
                collectives = choose(self.device.type, self.group, plan)
                return collectives.all_gather(received, mine, plan, self.group)
            sent_sizes = _sizes(messages.sends, self.ranks)
            sent = torch.empty(sum(sent_sizes), dtype=torch.uint8, device=self.device)
            _pack(sent, _in_order(messages.sends), sources)
            return all_to_all(received, sent, sizes, sent_sizes, self.group)

        def accept(received: torch.Tensor) -> None:
            for part, values in _views(received, _in_order(messages.receives)):
                _view(part, targets).copy_(values)

        label = ", ".join(each.completes[:3])
        return self.lane.enqueue(self.what, label, issue, accept, sum(sizes))


def exchange_of(model: nn.Module, weights: Collection[torch.Tensor], what: str) -> WeightExchange:
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
        return WeightExchange(what, None, device, make_lane(device))
    context = context_of(units[0])
    lane = context.comm_context.gather_lane
    if len(ranks) == 1:
        return WeightExchange(what, None, context.device, lane, plans=plan_cache_of(context))
    mesh_info = context.mesh_info_of(units[0].mesh)
    like = mesh_info.mesh.get_group(mesh_info.mesh.ndim - 1)
    group = mesh_info.group_cache.connect(ranks, like, mesh_info.device_type)
    return WeightExchange(what, group, context.device, lane, context.faults, plan_cache_of(context))


def digest_of(values: torch.Tensor) -> int:
    """A checksum of the elements."""
    held = values.contiguous().cpu()
    return zlib.crc32((ctypes.c_char * held.nbytes).from_address(held.data_ptr()))


def _sizes(messages: Mapping[int, Sequence[TransferItem]], ranks: int) -> list[int]:
    """The bytes of the message of each of so many ``ranks``."""
    sizes = [0] * ranks
    for rank, parts in messages.items():
        sizes[rank] = sum(part.nbytes for part in parts)
    return sizes


def _in_order(messages: Mapping[int, Sequence[TransferItem]]) -> list[TransferItem]:
    """All parts, as messages follow each other in memory."""
    return [part for rank in sorted(messages) for part in messages[rank]]


def _pack(message: torch.Tensor, parts: Sequence[TransferItem], sources: TensorParts) -> None:
    for part, values in _views(message, parts):
        values.copy_(_view(part, sources))


def _views(
    message: torch.Tensor, parts: Sequence[TransferItem]
) -> list[tuple[TransferItem, torch.Tensor]]:
    """Where each of ``parts`` lies in ``message``."""
    starts = accumulate((part.nbytes for part in parts), initial=0)
    return [
        (
            part,
            message[at : at + part.chunk.numel * part.dtype.itemsize]
            .view(part.dtype)
            .view(part.chunk.sizes),
        )
        for at, part in zip(starts, parts, strict=False)
    ]


def _view(part: TransferItem, tensors: TensorParts) -> torch.Tensor:
    """Where the values of ``part`` are, or belong."""
    found = tensors(part.name)
    outer, values = (
        found[0]
        if len(found) == 1
        else next(each for each in found if part.chunk & each[0] == part.chunk)
    )
    return part.chunk.of(outer, values)
