"""Transfer plans: the rounds of bounded size in which tensors travel, and what each rank sends to
which.

All ranks plan the same rounds, from the layouts of all ranks. The messages of one rank in a round
are computed when the round begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch

from fsdp_overlap.weights.chunks import Chunk, full_chunk, slab, slab_count
from fsdp_overlap.weights.mesh_transfer import ChunkHolders, MeshTransfer, at_places

ALIGNMENT = 16
"""Bytes. Items of a message begin at multiples of it, so that they can be viewed in any dtype."""


class TensorLayout(NamedTuple):
    """The layout of a tensor on the ranks that have it, or want it. ``chunks`` are those of each
    rank, by its place in the group, or ``None`` for a plain tensor. ``mesh`` lists the ranks of the
    tensor's mesh. It is empty for a plain tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[int, tuple[Chunk, ...]] | None = None
    mesh: tuple[int, ...] = ()

    def on(self, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[Chunk, ...]]]:
        """Yield each of ``ranks`` that has chunks, and these."""
        if self.chunks is None:
            chunks = (full_chunk(self.shape),)
            yield from ((rank, chunks) for rank in ranks)
        else:
            among = set(ranks)
            yield from (item for item in self.chunks.items() if item[0] in among)


Layouts = Mapping[str, Sequence[tuple[TensorLayout, Sequence[int]]]]
"""The layouts of each tensor, by name, with the ranks that have them, in ascending order. There are
several if ranks differ."""


class TransferItem(NamedTuple):
    """A chunk of a tensor within a message."""

    name: str
    chunk: Chunk
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return -(-self.chunk.numel * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass
class Messages:
    """What one rank sends and receives in a round, by the other rank. ``own`` is copied from its
    own chunks. In a gathered round each rank sends the same to all. Then ``sends`` and
    ``receives`` have that once, under this rank."""

    own: list[TransferItem] = field(default_factory=list)
    sends: dict[int, list[TransferItem]] = field(default_factory=dict)
    receives: dict[int, list[TransferItem]] = field(default_factory=dict)


@dataclass
class TransferPlan:
    """How tensors of the same layouts travel among ``ranks`` ranks: one transfer for each mesh that
    they come from."""

    shape: tuple[int, ...]
    transfers: list[MeshTransfer]
    ranks: int

    @cached_property
    def is_gathered(self) -> bool:
        """Whether every rank wants the full tensor, and no two ranks hold the same chunk."""
        if self.ranks == 1 or len(self.transfers) != 1:
            return False
        [transfer] = self.transfers
        wanting = transfer.wants.get((full_chunk(self.shape),), ())
        return len(wanting) == self.ranks and all(
            len(holders) == 1 for holders in transfer.holders.values()
        )

    @cached_property
    def send_factor(self) -> int:
        """The largest ratio of the bytes that a rank sends of a piece to the bytes of the piece."""
        numel = full_chunk(self.shape).numel
        wanted = sum(transfer.wanted_numel for transfer in self.transfers)
        most = max((transfer.max_held_numel for transfer in self.transfers), default=0)
        return max(1, -(-wanted * most // max(1, numel * numel)))

    def split(self, max_numel: int) -> PieceSplit:
        """Return how to split it into pieces of about ``max_numel`` elements."""
        numel = full_chunk(self.shape).numel
        count = max(1, -(-numel // max_numel))
        largest = max(
            (chunk.numel for transfer in self.transfers for chunk in transfer.holders), default=0
        )
        wanted = sum(transfer.wanted_numel for transfer in self.transfers)
        copies = 1 if self.is_gathered else -(-wanted // max(1, numel))
        if count == 1 or largest * _MIN_CHUNKS * copies <= max_numel:
            return PieceSplit(count)
        sizes = {chunk.sizes for transfer in self.transfers for chunk in transfer.holders}
        return PieceSplit(max(slab_count(size, _slab_numel(size, count)) for size in sizes), count)


_MIN_CHUNKS = 16  # in a piece of complete chunks: so many can be divided evenly


class PieceSplit(NamedTuple):
    """How a tensor is split into ``pieces``. If chunks are small, a piece has some adjacent ones.
    Else chunks are split into about ``parts`` slabs, and piece *i* has slab *i* of each, so that
    all ranks that hold chunks send some of each piece. If rows are large there are more slabs."""

    pieces: int
    parts: int | None = None


def _slab_numel(sizes: tuple[int, ...], parts: int) -> int:
    return max(1, -(-full_chunk(sizes).numel // parts))


class PlannedTensor(NamedTuple):
    """A tensor, the dtype in which it travels, and its plan."""

    name: str
    dtype: torch.dtype
    plan: TransferPlan


class TensorPiece(NamedTuple):
    """Piece ``number`` of a tensor."""

    tensor: PlannedTensor
    number: int
    split: PieceSplit

    def add_gathered(self, messages: Messages) -> None:
        """Add what each rank sends to all."""
        [transfer] = self.tensor.plan.transfers
        for chunk in transfer.ordered[self._places(transfer)]:
            [sender] = transfer.holders[chunk]
            if items := self._items(chunk, [chunk]):
                messages.receives.setdefault(sender, []).extend(items)

    def add_exchanged(self, messages: Messages, me: int) -> None:
        """Add what rank ``me`` sends and receives. Both sides go through chunks, and then through
        those that are wanted of each, in the same order."""
        for transfer in self.tensor.plan.transfers:
            places = self._places(transfer)
            for chunk, wanting in at_places(transfer.sends(me), places):
                for wants, targets in wanting:
                    items = self._items(chunk, wants)
                    for target in targets if items else ():
                        messages.sends.setdefault(target, []).extend(items)
            for chunk, (sender, wants) in at_places(transfer.receives(me), places):
                items = self._items(chunk, wants)
                if sender == me:
                    messages.own += items
                elif items:
                    messages.receives.setdefault(sender, []).extend(items)

    def _places(self, transfer: MeshTransfer) -> slice:
        """Return the places of the chunks of which the piece has some elements."""
        return slice(None) if self.split.parts else transfer.part(self.number, self.split.pieces)

    def _items(self, chunk: Chunk, wants: Iterable[Chunk]) -> list[TransferItem]:
        """Return what the piece has of ``chunk``, at one of its places, and of ``wants``."""
        if self.split.parts is not None:
            max_numel = _slab_numel(chunk.sizes, self.split.parts)
            if self.number >= slab_count(chunk.sizes, max_numel):
                return []
            chunk = slab(chunk.sizes, max_numel, self.number).moved(chunk.offsets)
        name, dtype, _ = self.tensor
        both = (chunk & want for want in wants)
        return [TransferItem(name, part, dtype) for part in both if part is not None]


@dataclass
class TransferRound:
    """Pieces that travel together. If it is ``gathered``, each rank sends the same to all.
    ``completes`` lists the tensors whose last piece it has."""

    gathered: bool
    pieces: list[TensorPiece] = field(default_factory=list)
    completes: list[str] = field(default_factory=list)

    def messages(self, me: int) -> Messages:
        """Return what rank ``me`` sends and receives."""
        messages = Messages()
        for piece in self.pieces:
            if self.gathered:
                piece.add_gathered(messages)
            else:
                piece.add_exchanged(messages, me)
        if self.gathered:
            messages.sends[me] = messages.receives.get(me, [])
        return messages


def full_layout(shape: Sequence[int], dtype: torch.dtype, to: torch.dtype | None) -> TensorLayout:
    """Return the layout of a full tensor. A floating-point one is cast ``to`` a dtype, if given."""
    return TensorLayout(tuple(shape), to if to is not None and dtype.is_floating_point else dtype)


def want_all(has: Layouts, to: torch.dtype | None, among: Collection[int] | None) -> Layouts:
    """Return the layouts that ranks want to get full tensors of all that they have, cast as by
    :func:`full_layout`. ``among`` are the ranks that want any, all by default."""
    full: dict[tuple[object, ...], TensorLayout] = {}
    members: dict[int, list[int]] = {}
    wants: dict[str, list[tuple[TensorLayout, Sequence[int]]]] = {}
    for name, layouts in has.items():
        for layout, ranks in layouts:
            key = id(ranks)
            if key not in members:
                members[key] = [rank for rank in ranks if among is None or rank in among]
            if members[key]:
                want = full.setdefault((layout.shape, layout.dtype), full_layout(*layout[:2], to))
                wants.setdefault(name, []).append((want, members[key]))
    return wants


def plan_transfers(
    has: Layouts, wants: Layouts, ranks: int, *, strict: bool, unique_names: bool
) -> list[PlannedTensor]:
    """Return how tensors travel among ``ranks`` ranks, in the order of ``has``.

    ``strict``: whether a tensor that nobody wants is an error. ``unique_names``: whether tensors of
    one name on several meshes are replicas. Otherwise each rank gets that of its own mesh.

    Raises:
        ValueError: what ranks have and want does not match; names each tensor.
    """
    problems = [f"nobody has {name!r}" for name in wants if name not in has]
    if strict:
        problems += [f"nobody wants {name!r}" for name in has if name not in wants]
    plans: dict[tuple[tuple[int, int], ...], TransferPlan] = {}
    tensors = []
    for name, layouts in has.items():
        if wanted := wants.get(name):
            try:
                _check_same(name, "shape", [*_shapes(layouts), *_shapes(wanted)])
                for side in (layouts, wanted):
                    _check_same(name, "dtype", [(ranks[0], layout.dtype) for layout, ranks in side])
                # Equal layouts are one object, which ranks sent once.
                key = tuple((id(layout), id(ranks)) for layout, ranks in (*layouts, *wanted))
                if key not in plans:
                    plans[key] = _plan_transfer(name, layouts, wanted, ranks, unique_names)
                dtype = min(layouts[0][0].dtype, wanted[0][0].dtype, key=attrgetter("itemsize"))
                tensors.append(PlannedTensor(name, dtype, plans[key]))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("; ".join(problems[:8]) + more)
    return tensors


def _shapes(layouts: Sequence[tuple[TensorLayout, Sequence[int]]]) -> list[tuple[int, object]]:
    return [(ranks[0], layout.shape) for layout, ranks in layouts]


def _plan_transfer(
    name: str,
    has: Sequence[tuple[TensorLayout, Sequence[int]]],
    wants: Sequence[tuple[TensorLayout, Sequence[int]]],
    ranks: int,
    unique_names: bool,
) -> TransferPlan:
    shape = has[0][0].shape
    by_mesh: dict[tuple[int, ...], ChunkHolders] = {}
    for layout, members in has:
        holders = by_mesh.setdefault(layout.mesh, {})
        for rank, chunks in layout.on(members):
            for chunk in chunks:
                holders.setdefault(chunk, []).append(rank)
    for holders in by_mesh.values():
        held, numel = sum(chunk.numel for chunk in holders), full_chunk(shape).numel
        if held != numel:
            raise ValueError(f"of {name!r} ranks have {held} elements, and it has {numel}")
    # The index of the mesh from which a rank gets what it wants: its own, or else the first.
    own: dict[int, int] = {}
    if len(by_mesh) > 1 and not unique_names:
        numbers = {mesh: number for number, mesh in enumerate(by_mesh)}
        own = {rank: numbers[layout.mesh] for layout, members in has for rank in members}
    wanted: list[dict[tuple[Chunk, ...], list[int]]] = [{} for _ in by_mesh]
    for layout, members in wants:
        for rank, chunks in layout.on(members):
            wanted[own.get(rank, 0)].setdefault(chunks, []).append(rank)
    transfers = [
        MeshTransfer(holders, of_mesh, shape, ranks)
        for holders, of_mesh in zip(by_mesh.values(), wanted, strict=True)
        if of_mesh
    ]
    return TransferPlan(shape, transfers, ranks)


def _check_same(name: str, what: str, values_of_ranks: Sequence[tuple[int, object]]) -> None:
    first: dict[object, int] = {}
    for rank, value in values_of_ranks:
        first.setdefault(value, rank)
    if len(first) > 1:
        values = ", ".join(f"{value} on rank {rank}" for value, rank in first.items())
        raise ValueError(f"{name!r} has not the same {what} everywhere: {values}")


def plan_rounds(tensors: Iterable[PlannedTensor], max_bytes: int) -> list[TransferRound]:
    """Return the rounds in which ``tensors`` travel. In each, no rank sends or receives more than
    about ``max_bytes``."""
    rounds: list[TransferRound] = []
    splits: dict[tuple[int, int], PieceSplit] = {}
    room = 0
    for tensor in tensors:
        gathered = tensor.plan.is_gathered
        cost = tensor.dtype.itemsize * (1 if gathered else tensor.plan.send_factor)
        key = id(tensor.plan), cost
        if key not in splits:
            splits[key] = tensor.plan.split(max(1, max_bytes // cost))
        split = splits[key]
        nbytes = -(-full_chunk(tensor.plan.shape).numel // (split.parts or split.pieces)) * cost
        for number in range(split.pieces):
            if not rounds or nbytes > room or rounds[-1].gathered != gathered:
                rounds.append(TransferRound(gathered))
                room = max_bytes
            room -= nbytes
            rounds[-1].pieces.append(TensorPiece(tensor, number, split))
        rounds[-1].completes.append(tensor.name)
    return rounds
