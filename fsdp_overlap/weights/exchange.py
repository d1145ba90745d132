"""Run an exchange of weights: ranks gather each other's layouts, and send packed messages in
rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.checkpoint.checksums import checksum_of
from fsdp_overlap.comm.collectives import all_to_all, choose
from fsdp_overlap.comm.comm_streams import (
    CommStream,
    PendingCollective,
    WorkHandle,
    make_comm_stream,
)
from fsdp_overlap.comm.objects import all_equal, broadcast_object, gather_objects
from fsdp_overlap.comm.optimizer_groups import get_for_optimizer
from fsdp_overlap.desync.error_monitor import ErrorMonitor
from fsdp_overlap.engine.context import model_context_of
from fsdp_overlap.engine.interruption import is_interrupted
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.weights.chunks import Chunk, chunks_by_rank, full_chunk, local_chunks
from fsdp_overlap.weights.model_weights import connected_ranks, units_of
from fsdp_overlap.weights.plan_cache import ExchangePlan, PlanCache, plan_cache_of
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

# A piece is a quarter of the largest weight, within these bounds: small beside the weights, and
# large enough for an efficient message.
_PIECE_BYTES = (1 << 20, 64 << 20)

TensorChunks = Callable[[str], Sequence[tuple[Chunk, torch.Tensor]]]
"""Returns the chunks of the tensor of a name, and views of their values."""

T = TypeVar("T")


def hash_of(*what: object) -> int:
    """Return a hash of ``what``, by its ``repr``, of 56 bits. It is the same on all ranks."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=7).digest(), "little")


class RankLayouts(NamedTuple):
    """The layouts of the tensors that a rank ``has`` and ``wants``, by name."""

    has: Mapping[str, TensorLayout]
    wants: Mapping[str, TensorLayout]

    def digest(self) -> int:
        """Return a hash of all layouts."""
        distinct = {id(layout): layout for layouts in self for layout in layouts.values()}
        indices = {address: index for index, address in enumerate(distinct)}
        names = [
            [(name, indices[id(layout)]) for name, layout in layouts.items()] for layouts in self
        ]
        return hash_of(names, list(distinct.values()))


class GatheredLayouts(NamedTuple):
    """The layouts of all ranks, and the digest of each rank's."""

    has: dict[str, list[tuple[TensorLayout, Sequence[int]]]]
    wants: dict[str, list[tuple[TensorLayout, Sequence[int]]]]
    digests: list[int]


@dataclass
class WeightExchange:
    """An exchange of weights among the ranks of ``group``, which is ``None`` for one rank. ``what``
    names the exchange in errors and traces."""

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
        other_arguments: str = "",
    ) -> tuple[Mapping[str, torch.Tensor], ExchangePlan]:
        """Return the weights of this rank, from ``find``, and the plan of their exchange, which
        ``make`` makes of the layouts of all ranks, or which all ranks have cached for the same
        ``arguments``. Collective. The plan does not depend on ``other_arguments``.

        Raises:
            RuntimeError: ``find`` raised on another rank.
            ValueError: arguments differ between ranks, or ``make`` raised it on all ranks.
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
        number = 0 if plan is None else hash_of(plan.number, other_arguments)
        if self._all_equal(number) and plan:
            return weights, plan

        def describe() -> RankLayouts:
            if raised is not None:
                raise raised
            return self.layouts_of(weights, {})

        gathered = self.gather_layouts(describe, f"{arguments}{other_arguments}")
        plan = ExchangePlan(hash_of(key, gathered.digests), gathered.has, make(gathered.has))
        self.plans.keep(key, weights, plan)
        return weights, plan

    def layouts_of(
        self, has: Mapping[str, torch.Tensor], wants: Mapping[str, torch.Tensor]
    ) -> RankLayouts:
        """Return the layouts of this rank's tensors. Equal ones, as of equal blocks of a model, are
        one object, which is sent once and planned once."""
        layouts: dict[object, TensorLayout] = {}

        def layout_of(tensor: torch.Tensor) -> TensorLayout:
            plain = tuple(tensor.shape), tensor.dtype
            key = tensor._spec if isinstance(tensor, DTensor) else plain
            if key not in layouts:
                layouts[key] = TensorLayout(*plain)
                if isinstance(tensor, DTensor):
                    by_rank, group_ranks = chunks_by_rank(tensor), self.group_ranks
                    mesh = tensor.device_mesh.mesh.flatten().tolist()
                    ranks = [rank for rank in sorted(by_rank) if rank in group_ranks]
                    chunks = {group_ranks[rank]: by_rank[rank] for rank in ranks}
                    layouts[key] = TensorLayout(*plain, chunks, tuple(sorted(mesh)))
            return layouts[key]

        return RankLayouts(
            {name: layout_of(tensor) for name, tensor in has.items()},
            {name: layout_of(tensor) for name, tensor in wants.items()},
        )

    @cached_property
    def group_ranks(self) -> Mapping[int, int]:
        """The group rank of each global rank."""
        if self.group is None:
            return {dist.get_rank() if dist.is_initialized() else 0: 0}
        ranks = dist.get_process_group_ranks(self.group)
        return {rank: group_rank for group_rank, rank in enumerate(ranks)}

    def gather_layouts(
        self, describe: Callable[[], RankLayouts], arguments: str
    ) -> GatheredLayouts:
        """Return the layouts of all ranks, from their ``describe``. Collective. Equal layouts are
        sent once.

        Raises:
            RuntimeError: ``describe`` raised on another rank.
            ValueError: ``arguments`` differ between ranks.
        """
        raised: Exception | None = None
        local, digest = RankLayouts({}, {}), 0
        try:
            local = describe()
            digest = local.digest()
        except Exception as error:
            raised = error
        by_rank = self.gather((arguments, digest, f"{raised!r}"))
        if raised is not None:
            raise raised
        members: dict[int, list[int]] = {}
        for rank, (of_rank, digest, error_of_rank) in enumerate(by_rank):
            who = f"rank {self.global_rank(rank)}"
            if not digest:
                raise RuntimeError(f"{self.what}: {who} raised {error_of_rank}")
            if of_rank != by_rank[0][0]:
                first = f"rank {self.global_rank(0)} gave {by_rank[0][0]}"
                raise ValueError(f"{self.what}: {first}, and {who} {of_rank}")
            members.setdefault(digest, []).append(rank)
        gathered = GatheredLayouts({}, {}, [digest for _, digest, _ in by_rank])
        for ranks in members.values():
            layouts = local if len(members) == 1 else self._broadcast(ranks[0], local)
            for name, layout in layouts.has.items():
                gathered.has.setdefault(name, []).append((layout, ranks))
            for name, layout in layouts.wants.items():
                gathered.wants.setdefault(name, []).append((layout, ranks))
        return gathered

    def plan_transfers(
        self, has: Layouts, wants: Layouts, *, strict: bool, unique_names: bool
    ) -> list[PlannedTensor]:
        """Call :func:`~fsdp_overlap.weights.transfer_plan.plan_transfers` for these ranks, and name
        the exchange in its errors."""
        try:
            return plan_transfers(has, wants, self.ranks, strict=strict, unique_names=unique_names)
        except ValueError as error:
            raise ValueError(f"{self.what}: {error}") from None

    def check_replicas(self, has: Layouts, weights: Mapping[str, torch.Tensor]) -> None:
        """Check that tensors of one name on several meshes are replicas. Collective if there are
        any.

        Raises:
            ValueError: they differ, as those of experts with the same names on all ranks.
        """
        names = [
            name for name, layouts in has.items() if len({layout.mesh for layout, _ in layouts}) > 1
        ]
        if not names:
            return
        local = {
            (name, chunk): checksum_of(values)
            for name in names
            if name in weights
            for chunk, values in local_chunks(weights[name])
        }
        checksums = self.gather(local)
        for name in names:
            by_mesh: dict[tuple[int, ...], dict[Chunk, int]] = {}
            for layout, ranks in has[name]:
                of_mesh = by_mesh.setdefault(layout.mesh, {})
                for rank, chunks in layout.on(ranks):
                    for chunk in chunks:
                        if chunk.numel:
                            of_mesh[chunk] = checksums[rank][name, chunk]
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

    def gather(self, own: T) -> list[T]:
        """Return the object of each rank. Collective."""
        if self.group is None:
            return [own]
        self._begin()
        return gather_objects(own, self.group, self.device, self.what)

    def on_all(self, run: Callable[[], T], do: str) -> list[T]:
        """Call ``run`` on each rank, and return what it returns on each. Collective. ``do`` says in
        errors what a rank could not.

        Raises:
            RuntimeError: ``run`` raised on another rank, or an ``OSError`` on this one; names it.
            Exception: ``run`` raised it on this rank.
        """
        failure: Exception | None = None
        own: T | None = None
        try:
            own = run()
        except Exception as error:
            failure = error
        by_rank = self.gather((None if failure is None else repr(failure), own))
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        for rank, (error_of_rank, _) in enumerate(by_rank):
            if error_of_rank is not None:
                who = f"{self.what}: rank {self.global_rank(rank)}"
                raise RuntimeError(f"{who} could not {do}: {error_of_rank}") from failure
        return [cast(T, result) for _, result in by_rank]

    def _broadcast(self, rank: int, own: T) -> T:
        """Return the object of ``rank``. Collective."""
        assert self.group is not None
        self._begin()
        return broadcast_object(own, rank, self.group, self.device, self.what)

    def _all_equal(self, number: int) -> bool:
        """Return whether all ranks have the same number. Collective."""
        if self.group is None:
            return True
        self._begin()
        return all_equal(number, self.group, self.device, self.what)

    def _begin(self) -> None:
        if self.error_monitor is not None and self.group is not None:
            self.error_monitor.begin_exchange(self.what, self.group)

    @property
    def rank(self) -> int:
        """This rank's group rank."""
        return 0 if self.group is None else self.group.rank()

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 if self.group is None else self.group.size()

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a group rank."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def start(
        self,
        transfer_round: TransferRound,
        messages: Messages,
        sources: TensorChunks,
        targets: TensorChunks,
    ) -> WorkHandle:
        """Enqueue a round with this rank's ``messages``, from ``sources`` into ``targets``, which
        are called in the comm stream's order. Collective."""
        self._begin()
        self.comm_stream.after_compute()  # which may have edited what is sent
        sizes = _sizes(messages.receives, self.ranks)

        def issue() -> PendingCollective:
            for item in messages.own:
                _view(item, targets).copy_(_view(item, sources))
            received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            if self.group is None:
                return PendingCollective((), lambda: received)
            if transfer_round.gathered:
                shard = received[sum(sizes[: self.rank]) :][: sizes[self.rank]]
                _pack(shard, messages.sends[self.rank], sources)
                plan = ParamGroupPlan((), (), tuple(sizes))
                collectives = choose(self.group, self.device.type, plan)
                return collectives.all_gather(received, shard, self.group)
            sent_sizes = _sizes(messages.sends, self.ranks)
            sent = torch.empty(sum(sent_sizes), dtype=torch.uint8, device=self.device)
            _pack(sent, _in_order(messages.sends), sources)
            return all_to_all(received, sent, sizes, sent_sizes, self.group)

        def accept(received: torch.Tensor) -> None:
            for item, values in _views(received, _in_order(messages.receives)):
                _view(item, targets).copy_(values)

        label = ", ".join(transfer_round.completes[:3])
        return self.comm_stream.enqueue(self.what, label, issue, accept, sum(sizes))

    def run(
        self,
        rounds: Iterable[tuple[TransferRound, Messages]],
        sources: TensorChunks,
        targets: TensorChunks,
        prefetch: int,
    ) -> Iterator[tuple[TransferRound, Messages]]:
        """Enqueue ``rounds``, each with this rank's messages, ``prefetch`` of them ahead of the one
        that is waited for. Yield each when it is done. Collective."""
        in_flight: deque[tuple[WorkHandle, tuple[TransferRound, Messages]]] = deque()
        to_start = iter(rounds)
        try:
            while True:
                while len(in_flight) <= prefetch and (following := next(to_start, None)):
                    in_flight.append((self.start(*following, sources, targets), following))
                if not in_flight:
                    return
                work, done = in_flight.popleft()
                work.wait()
                yield done
        finally:
            # If the caller left the loop, rounds in flight still read shards and write to memory.
            for work, _ in in_flight:
                with suppress(RuntimeError):
                    work.wait()


def exchange_of(
    model: nn.Module, weights: Collection[torch.Tensor], what: str, with_replicas: bool = False
) -> WeightExchange:
    """Return the exchange among the ranks that together hold ``weights``, those of ``model``.
    Collective over them at the first call. ``with_replicas``: and those that hold replicas.

    Raises:
        ValueError: there are several, and no module of the model is a unit.
        RuntimeError: the last forward or backward was interrupted, and nobody called
            ``ctx.reset()``.
    """
    ranks, units = connected_ranks(weights, with_replicas), units_of(model)
    if not units:
        if len(ranks) > 1:
            raise ValueError(f"{what}: no module of the model was given to fully_shard()")
        device = next((weight.device for weight in weights), torch.device("cpu"))
        return WeightExchange(what, None, device, make_comm_stream(device))
    context = model_context_of(units[0])
    comm_stream = context.comm_context.all_gather_stream
    if len(ranks) == 1:
        return WeightExchange(what, None, context.device, comm_stream, plans=plan_cache_of(context))
    context.error_monitor.before_save(what, is_interrupted(context), uses_groups=True)
    mesh_info = context.mesh_info_of(units[0].mesh)
    like = mesh_info.mesh.get_group(mesh_info.mesh.ndim - 1)
    group = get_for_optimizer(mesh_info.group_cache, ranks, like, mesh_info.device.type)
    return WeightExchange(
        what, group, context.device, comm_stream, context.error_monitor, plan_cache_of(context)
    )


def _sizes(messages: Mapping[int, Sequence[TransferItem]], ranks: int) -> list[int]:
    """Return the bytes of the message of each of ``ranks`` ranks."""
    return [sum(item.nbytes for item in messages.get(rank, ())) for rank in range(ranks)]


def _in_order(messages: Mapping[int, Sequence[TransferItem]]) -> list[TransferItem]:
    """Return the items of all messages, in the order of ranks."""
    return [item for rank in sorted(messages) for item in messages[rank]]


def _pack(message: torch.Tensor, items: Sequence[TransferItem], sources: TensorChunks) -> None:
    for item, values in _views(message, items):
        values.copy_(_view(item, sources))


def _views(
    message: torch.Tensor, items: Sequence[TransferItem]
) -> Iterator[tuple[TransferItem, torch.Tensor]]:
    """Yield each of ``items`` with the view of its values in ``message``."""
    start = 0
    for item in items:
        stop = start + item.chunk.numel * item.dtype.itemsize
        yield item, message[start:stop].view(item.dtype).view(item.chunk.sizes)
        start += item.nbytes


def _view(item: TransferItem, tensors: TensorChunks) -> torch.Tensor:
    """Return the view of the values of ``item`` in its tensor."""
    chunks = tensors(item.name)
    if len(chunks) > 1:
        chunks = [(outer, values) for outer, values in chunks if item.chunk & outer == item.chunk]
    return item.chunk.of(*chunks[0])
