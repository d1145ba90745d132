"""Exchanges of weights: the ranks that take part, what they know of each other, and rounds
of packed messages between them."""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.collectives import PendingCollective, all_to_all, choose
from fsdp_overlap.comm.comm_streams import CommStream, WorkHandle, make_comm_stream
from fsdp_overlap.comm.objects import all_equal, broadcast_object, gather_objects
from fsdp_overlap.desync.error_monitor import ErrorMonitor
from fsdp_overlap.engine.context import FsdpContext, context_of
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.weights.tensor_chunks import Chunk, chunks_by_rank, full_chunk, local_chunks
from fsdp_overlap.weights.tensors import connected, units_of
from fsdp_overlap.weights.transfer_plan import (
    Layouts,
    Messages,
    PlannedTensor,
    TensorLayout,
    TransferItem,
    TransferRound,
    plan_rounds,
    plan_transfers,
)

# A piece is a quarter of the largest weight, within these bounds: so pieces take little beside the
# weights themselves, and are still large enough to travel well.
_PIECE_BYTES = (1 << 20, 64 << 20)

# An export for evaluation and one for generation take turns, and files are written now and then.
_MAX_PLANS = 4

TensorParts = Callable[[str], Sequence[tuple[Chunk, torch.Tensor]]]
"""Gives chunks of the tensor of a name, and views of their values."""

T = TypeVar("T")


@dataclass(frozen=True)
class ExchangePlan:
    """What all ranks planned. Knows no tensor, so that it keeps none alive."""

    number: int
    """The same on all ranks, and another for each other plan."""
    has: Layouts
    rounds: list[TransferRound]


TensorLayouts = list[tuple[object, torch.Size, torch.dtype]]


class PlanCache:
    """The last few plans of one context, on this rank."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[str, ...]], tuple[TensorLayouts, ExchangePlan]] = {}

    def find(self, arguments: str, weights: Mapping[str, torch.Tensor]) -> ExchangePlan | None:
        """Return the plan that was kept for the same ``arguments``, if ``weights`` lie as they did.
        The other ranks may have none."""
        layouts, plan = self._kept.get((arguments, tuple(weights)), ([], None))
        same = layouts and all(
            one is other and its == own
            for (one, *its), (other, *own) in zip(layouts, _layouts_of(weights), strict=True)
        )
        return plan if same else None

    def keep(self, arguments: str, weights: Mapping[str, torch.Tensor], plan: ExchangePlan) -> None:
        """Keep ``plan``, and drop the oldest if there are many."""
        key = arguments, tuple(weights)
        self._kept.pop(key, None)
        self._kept[key] = _layouts_of(weights), plan
        if len(self._kept) > _MAX_PLANS:
            del self._kept[next(iter(self._kept))]

    def clear(self) -> None:
        """Drop all plans."""
        self._kept.clear()


def plan_cache_of(context: FsdpContext) -> PlanCache:
    """Return the plans of ``context``, which go with it."""
    return _of_contexts.setdefault(context, PlanCache())


_of_contexts: WeakKeyDictionary[FsdpContext, PlanCache] = WeakKeyDictionary()


def _layouts_of(weights: Mapping[str, torch.Tensor]) -> TensorLayouts:
    """Return how each of ``weights`` lies. A tensor that lies otherwise has another spec."""
    return [
        (tensor._spec if isinstance(tensor, DTensor) else None, tensor.shape, tensor.dtype)
        for tensor in weights.values()
    ]


def hash_of(*what: object) -> int:
    """Return a number for ``what``, by its ``repr``, of 56 bits. The same on all ranks."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=7).digest(), "little")


class RankLayouts(NamedTuple):
    """How what a rank ``has`` and ``wants`` is laid out, by name."""

    has: Mapping[str, TensorLayout]
    wants: Mapping[str, TensorLayout]

    def digest(self) -> int:
        """Return a number for all of it."""
        distinct = {id(layout): layout for layouts in self for layout in layouts.values()}
        at = {each: number for number, each in enumerate(distinct)}
        names = [[(name, at[id(layout)]) for name, layout in layouts.items()] for layouts in self]
        return hash_of(names, list(distinct.values()))


class GatheredLayouts(NamedTuple):
    """The layouts of all ranks, and a digest of each rank's."""

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
    comm_stream: CommStream
    error_monitor: ErrorMonitor | None = None
    plans: PlanCache = field(default_factory=PlanCache)

    def planned(
        self,
        find: Callable[[], Mapping[str, torch.Tensor]],
        arguments: str,
        make: Callable[[Layouts], list[TransferRound]],
        alone: str = "",
    ) -> tuple[Mapping[str, torch.Tensor], ExchangePlan]:
        """Return the weights of this rank, as ``find`` gives them, and the plan of their exchange,
        which ``make`` makes of what ranks have. Collective. If all ranks keep the same plan for the
        same ``arguments``, that is the plan. ``alone`` are arguments that change nothing in it.

        Raises:
            RuntimeError: ``find`` raised on another rank.
            ValueError: ranks gave other arguments, or as ``make``, on all ranks.
        """
        weights: Mapping[str, torch.Tensor] = {}
        raised: Exception | None = None
        plan = None
        key = f"{self.what}: {arguments}"
        try:
            weights = find()
            plan = self.plans.find(key, weights)
        except Exception as error:
            raised = error
        if self._all_equal(0 if plan is None else hash_of(plan.number, alone)) and plan:
            return weights, plan

        def describe() -> RankLayouts:
            if raised is not None:
                raise raised
            return self.layouts_of(weights, {})

        gathered = self.gather_layouts(describe, f"{arguments}{alone}")
        plan = ExchangePlan(hash_of(key, gathered.digests), gathered.has, make(gathered.has))
        self.plans.keep(key, weights, plan)
        return weights, plan

    def layouts_of(
        self, has: Mapping[str, torch.Tensor], wants: Mapping[str, torch.Tensor]
    ) -> RankLayouts:
        """Return how this rank's tensors are laid out."""
        known: dict[object, TensorLayout] = {}
        return RankLayouts(self._by_tensor(has, known), self._by_tensor(wants, known))

    def _by_tensor(
        self, weights: Mapping[str, torch.Tensor], known: dict[object, TensorLayout]
    ) -> dict[str, TensorLayout]:
        """Return how each of ``weights`` lies. Those that lie alike, as those of equal blocks, have
        one object, so that it is sent once and planned once."""
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

    def gather_layouts(
        self, describe: Callable[[], RankLayouts], arguments: str
    ) -> GatheredLayouts:
        """Return what all ranks have and want, as their ``describe`` says. Collective. Ranks whose
        layouts are equal send them once.

        Raises:
            RuntimeError: ``describe`` raised on another rank.
            ValueError: ranks gave other ``arguments``.
        """
        raised: Exception | None = None
        local, digest = RankLayouts({}, {}), 0
        try:
            local = describe()
            digest = local.digest()
        except Exception as error:
            raised = error
        answers = self.gather((arguments, digest, f"{raised!r}"))
        if raised is not None:
            raise raised
        members: dict[int, list[int]] = {}
        for rank, (given, other_digest, what) in enumerate(answers):
            if not other_digest:
                raise RuntimeError(f"{self.what}: rank {self.global_rank(rank)} raised {what}")
            if given != answers[0][0]:
                first = f"rank {self.global_rank(0)} gave {answers[0][0]}"
                raise ValueError(f"{self.what}: {first}, and rank {self.global_rank(rank)} {given}")
            members.setdefault(other_digest, []).append(rank)
        found = GatheredLayouts({}, {}, [each for _, each, _ in answers])
        for ranks in members.values():
            each = local if len(members) == 1 else self._broadcast(ranks[0], local)
            for name, layout in each.has.items():
                found.has.setdefault(name, []).append((layout, ranks))
            for name, layout in each.wants.items():
                found.wants.setdefault(name, []).append((layout, ranks))
        return found

    def plan_transfers(
        self, has: Layouts, wants: Layouts, *, strict: bool, one: bool
    ) -> list[PlannedTensor]:
        """Return how each tensor travels. See
        :func:`~fsdp_overlap.weights.transfer_plan.plan_transfers`.

        Raises:
            ValueError: what ranks have and want does not go together.
        """
        try:
            return plan_transfers(has, wants, self.ranks, strict=strict, one=one)
        except ValueError as error:
            raise ValueError(f"{self.what}: {error}") from None

    def check_replicas(self, has: Layouts, weights: Mapping[str, torch.Tensor]) -> None:
        """Check that what lies on each of several meshes under one name are copies. Collective if
        there is any.

        Raises:
            ValueError: they differ, as experts do that have the same names on all ranks.
        """
        # Copies, or tensors of their own, as those of experts.
        names = [
            name for name, layouts in has.items() if len({layout.mesh for layout, _ in layouts}) > 1
        ]
        if not names:
            return
        local = {
            (name, chunk): digest_of(values)
            for name in names
            if name in weights
            for chunk, values in local_chunks(weights[name])
        }
        digests = self.gather(local)
        for name in names:
            by_mesh: dict[tuple[int, ...], dict[Chunk, int]] = {}
            for layout, ranks in has[name]:
                of_mesh = by_mesh.setdefault(layout.mesh, {})
                for rank, chunks in layout.on(ranks):
                    of_mesh.update(
                        {each: digests[rank][name, each] for each in chunks if each.numel}
                    )
            first, *others = by_mesh.items()
            for mesh, of_other in others:
                if of_other != first[1]:
                    raise ValueError(
                        f"{self.what}: {name!r} has other values on ranks {list(mesh)} than on "
                        f"ranks {list(first[0])}, as experts have, or is cut otherwise: give each "
                        "a name of its own by names=, which may depend on the rank"
                    )

    def rounds(
        self, tensors: Sequence[PlannedTensor], piece_bytes: int | None
    ) -> list[TransferRound]:
        """Return the rounds in which ``tensors`` travel."""
        least, most = _PIECE_BYTES
        largest = max(
            (full_chunk(t.plan.shape).numel * t.dtype.itemsize for t in tensors), default=0
        )
        return plan_rounds(tensors, piece_bytes or min(max(largest // 4, least), most))

    def gather(self, mine: T) -> list[T]:
        """Return what each rank gives. Collective."""
        if self.group is None:
            return [mine]
        self._begin()
        return gather_objects(mine, self.group, self.device, self.what)

    def _broadcast(self, rank: int, mine: T) -> T:
        """Return what ``rank`` gives. Collective."""
        assert self.group is not None
        self._begin()
        return broadcast_object(mine, rank, self.group, self.device, self.what)

    def _all_equal(self, number: int) -> bool:
        """Return whether all ranks give the same number. Collective."""
        if self.group is None:
            return True
        self._begin()
        return all_equal(number, self.group, self.device, self.what)

    def _begin(self) -> None:
        if self.error_monitor is not None and self.group is not None:
            self.error_monitor.begin_exchange(self.what, self.group)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.group is None else self.group.rank()

    @property
    def ranks(self) -> int:
        """How many take part."""
        return 1 if self.group is None else self.group.size()

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a place in the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def start(
        self,
        each: TransferRound,
        messages: Messages,
        sources: TensorParts,
        targets: TensorParts,
    ) -> WorkHandle:
        """Enqueue a round, from ``sources`` into ``targets``, which are called in the comm stream's
        order. This rank has ``messages``. Collective."""
        self._begin()
        self.comm_stream.after_compute()  # which may have edited what is sent
        sizes = _sizes(messages.receives, self.ranks)

        def issue() -> PendingCollective:
            for part in messages.own:
                _view(part, targets).copy_(_view(part, sources))
            received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            if self.group is None:
                return PendingCollective((), lambda: received)
            if each.gathered:
                mine = received[sum(sizes[: self.rank]) :][: sizes[self.rank]]
                _pack(mine, messages.sends[self.rank], sources)
                plan = ParamGroupPlan((), (), tuple(sizes))
                collectives = choose(self.group, self.device.type, plan)
                return collectives.all_gather(received, mine, self.group)
            sent_sizes = _sizes(messages.sends, self.ranks)
            sent = torch.empty(sum(sent_sizes), dtype=torch.uint8, device=self.device)
            _pack(sent, _in_order(messages.sends), sources)
            return all_to_all(received, sent, sizes, sent_sizes, self.group)

        def accept(received: torch.Tensor) -> None:
            for part, values in _views(received, _in_order(messages.receives)):
                _view(part, targets).copy_(values)

        label = ", ".join(each.completes[:3])
        return self.comm_stream.enqueue(self.what, label, issue, accept, sum(sizes))

    def run(
        self,
        rounds: Iterable[tuple[TransferRound, Messages]],
        sources: TensorParts,
        targets: TensorParts,
        ahead: int,
    ) -> Iterator[tuple[TransferRound, Messages]]:
        """Enqueue ``rounds`` with what this rank sends and receives in each, so many ``ahead`` of
        the one that is waited for. Yield each when it is done. Collective."""
        in_flight: deque[tuple[WorkHandle, tuple[TransferRound, Messages]]] = deque()
        to_start = iter(rounds)
        try:
            while True:
                while len(in_flight) <= ahead and (each := next(to_start, None)) is not None:
                    in_flight.append((self.start(*each, sources, targets), each))
                if not in_flight:
                    return
                work, done = in_flight.popleft()
                work.wait()
                yield done
        finally:
            # Where the loop was left, what travels still reads shards and writes to memory.
            for work, _ in in_flight:
                with suppress(RuntimeError):
                    work.wait()


def exchange_of(model: nn.Module, weights: Collection[torch.Tensor], what: str) -> WeightExchange:
    """Return the exchange among the ranks that together have ``weights``, those of ``model``.
    Collective over them at its first call.

    Raises:
        ValueError: they lie over several ranks, and no module of the model is a unit.
    """
    ranks, units = connected(weights), units_of(model)
    if not units:
        if len(ranks) > 1:
            raise ValueError(f"{what}: no module of the model was given to fully_shard()")
        device = next((each.device for each in weights), torch.device("cpu"))
        return WeightExchange(what, None, device, make_comm_stream(device))
    context = context_of(units[0])
    comm_stream = context.comm_context.all_gather_stream
    if len(ranks) == 1:
        return WeightExchange(what, None, context.device, comm_stream, plans=plan_cache_of(context))
    mesh_info = context.mesh_info_of(units[0].mesh)
    like = mesh_info.mesh.get_group(mesh_info.mesh.ndim - 1)
    group = mesh_info.group_cache.get_for_optimizer(ranks, like, mesh_info.device_type)
    return WeightExchange(
        what, group, context.device, comm_stream, context.error_monitor, plan_cache_of(context)
    )


def digest_of(values: torch.Tensor) -> int:
    """Return a checksum of the elements."""
    held = values.contiguous().cpu()
    return zlib.crc32((ctypes.c_char * held.nbytes).from_address(held.data_ptr()))


def _sizes(messages: Mapping[int, Sequence[TransferItem]], ranks: int) -> list[int]:
    """Return the bytes of the message of each of so many ``ranks``."""
    sizes = [0] * ranks
    for rank, parts in messages.items():
        sizes[rank] = sum(part.nbytes for part in parts)
    return sizes


def _in_order(messages: Mapping[int, Sequence[TransferItem]]) -> list[TransferItem]:
    """Return all parts, as messages follow each other in memory."""
    return [part for rank in sorted(messages) for part in messages[rank]]


def _pack(message: torch.Tensor, parts: Sequence[TransferItem], sources: TensorParts) -> None:
    for part, values in _views(message, parts):
        values.copy_(_view(part, sources))


def _views(
    message: torch.Tensor, parts: Sequence[TransferItem]
) -> list[tuple[TransferItem, torch.Tensor]]:
    """Return where each of ``parts`` lies in ``message``."""
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
    """Return where the values of ``part`` are, or belong."""
    found = tensors(part.name)
    outer, values = (
        found[0]
        if len(found) == 1
        else next(each for each in found if part.chunk & each[0] == part.chunk)
    )
    return part.chunk.of(outer, values)
