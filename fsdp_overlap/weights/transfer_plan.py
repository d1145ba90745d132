"""Who sends which part of which tensor to whom, in rounds of a bounded size. All ranks plan
the same rounds from the layouts of all. What one rank sends and receives in a round is
reckoned when the round begins, and takes time for that alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch

from fsdp_overlap.weights.mesh_transfer import ChunkHolders, MeshTransfer, between
from fsdp_overlap.weights.tensor_chunks import Chunk, full_chunk, slab, slab_count

ALIGNMENT = 16
"""Bytes. Parts of a message begin at multiples of it, so that they can be viewed in any dtype."""


class TensorLayout(NamedTuple):
    """How a tensor lies on ranks that have it, or want it. ``chunks`` are those of each rank, by
    its place in the group; ``None`` if each has all, as of a plain tensor. ``mesh`` lists the ranks
    that it is spread over. It is empty for a plain tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[int, tuple[Chunk, ...]] | None = None
    mesh: tuple[int, ...] = ()

    def on(self, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[Chunk, ...]]]:
        """Return what each of ``ranks`` has, if anything."""
        if self.chunks is None:
            everything = (full_chunk(self.shape),)
            yield from ((rank, everything) for rank in ranks)
        else:
            among = set(ranks)
            yield from (each for each in self.chunks.items() if each[0] in among)


Layouts = Mapping[str, Sequence[tuple[TensorLayout, Sequence[int]]]]
"""By the names of tensors: how each lies, and on which ranks, in ascending order. Several where
ranks differ."""


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
    """What one rank sends to others and receives from them in a round. What it has itself is in
    ``own``. If the round is gathered, each rank sends the same to all, and ``sends`` has that once,
    at the place of this rank, as has ``receives``."""

    own: list[TransferItem] = field(default_factory=list)
    sends: dict[int, list[TransferItem]] = field(default_factory=dict)
    receives: dict[int, list[TransferItem]] = field(default_factory=dict)


@dataclass
class TransferPlan:
    """How tensors travel that lie in the same way: one transfer for each mesh that ranks get it
    from. ``ranks`` is how many ranks there are."""

    shape: tuple[int, ...]
    transfers: list[MeshTransfer]
    ranks: int

    @cached_property
    def is_gathered(self) -> bool:
        """Whether every rank wants all of it, and no two have the same."""
        if self.ranks == 1 or len(self.transfers) != 1:
            return False
        [transfer] = self.transfers
        asking = transfer.wants.get((full_chunk(self.shape),), ())
        return len(asking) == self.ranks and all(
            len(each) == 1 for each in transfer.holders.values()
        )

    @cached_property
    def send_factor(self) -> int:
        """How many times as much as a piece the rank that has most of it may have to send."""
        numel = full_chunk(self.shape).numel
        wanted = sum(transfer.wanted_numel for transfer in self.transfers)
        most = max((transfer.max_held_numel for transfer in self.transfers), default=0)
        return max(1, -(-wanted * most // max(1, numel * numel)))

    def cut(self, most: int) -> PieceSplit:
        """Return how to cut it into pieces of about ``most`` elements."""
        count = max(1, -(-full_chunk(self.shape).numel // most))
        largest = max(
            (chunk.numel for transfer in self.transfers for chunk in transfer.holders), default=0
        )
        if count == 1 or largest * _MANY * (1 if self.is_gathered else self._times_asked) <= most:
            return PieceSplit(count)
        sizes = {chunk.sizes for transfer in self.transfers for chunk in transfer.holders}
        return PieceSplit(max(slab_count(each, _part(each, count)) for each in sizes), count)

    @property
    def _times_asked(self) -> int:
        numel = full_chunk(self.shape).numel
        return -(-sum(transfer.wanted_numel for transfer in self.transfers) // max(1, numel))


_MANY = 16


class PieceSplit(NamedTuple):
    """How a tensor is cut into so many ``pieces``. Each has some of the chunks, as they follow
    each other, where these are small. Else it has the part of one number of each chunk, cut in so
    many ``parts``, so that all ranks that have something send some of each piece. There are more
    pieces than that if a row is large."""

    pieces: int
    parts: int | None = None


def _part(sizes: tuple[int, ...], parts: int) -> int:
    return max(1, -(-full_chunk(sizes).numel // parts))


class PlannedTensor(NamedTuple):
    """One tensor, in the dtype in which it travels."""

    name: str
    dtype: torch.dtype
    plan: TransferPlan


class TensorPiece(NamedTuple):
    """A piece of a tensor."""

    tensor: PlannedTensor
    number: int
    cut: PieceSplit

    def gather(self, into: Messages) -> None:
        """Add what each rank sends to all."""
        [transfer] = self.tensor.plan.transfers
        for chunk in transfer.ordered[self._places(transfer)]:
            if (found := self._of(chunk)) is not None:
                [sender] = transfer.holders[chunk]
                into.receives.setdefault(sender, []).append(self._message(found))

    def exchange(self, into: Messages, me: int) -> None:
        """Add what rank ``me`` sends and receives. Both sides go through chunks, and then
        through those that are wanted of each, in the same order."""
        for transfer in self.tensor.plan.transfers:
            places = self._places(transfer)
            for chunk, wanting in between(transfer.sends(me), places):
                for wants, targets in wanting:
                    parts = self._parts(chunk, wants)
                    for target in targets if parts else ():
                        into.sends.setdefault(target, []).extend(parts)
            for chunk, (sender, wants) in between(transfer.receives(me), places):
                parts = self._parts(chunk, wants)
                if sender == me:
                    into.own += parts
                elif parts:
                    into.receives.setdefault(sender, []).extend(parts)

    def _places(self, transfer: MeshTransfer) -> slice:
        """Return which chunks of ``transfer`` the piece has some of."""
        return slice(None) if self.cut.parts else transfer.run(self.number, self.cut.pieces)

    def _of(self, chunk: Chunk) -> Chunk | None:
        """Return what of ``chunk``, which is at one of these places, is in the piece."""
        if self.cut.parts is None:
            return chunk
        most = _part(chunk.sizes, self.cut.parts)
        if self.number >= slab_count(chunk.sizes, most):
            return None
        return slab(chunk.sizes, most, self.number).moved(chunk.offsets)

    def _parts(self, chunk: Chunk, wants: Iterable[Chunk]) -> list[TransferItem]:
        if (found := self._of(chunk)) is None:
            return []
        return [self._message(both) for want in wants if (both := found & want) is not None]

    def _message(self, chunk: Chunk) -> TransferItem:
        return TransferItem(self.tensor.name, chunk, self.tensor.dtype)


@dataclass
class TransferRound:
    """Pieces that travel together. If it is ``gathered``, each rank sends the same to all.
    ``completes`` lists the tensors of which nothing comes later."""

    gathered: bool
    pieces: list[TensorPiece] = field(default_factory=list)
    completes: list[str] = field(default_factory=list)

    def messages(self, me: int) -> Messages:
        """Return what rank ``me`` sends and receives."""
        found = Messages()
        for piece in self.pieces:
            if self.gathered:
                piece.gather(found)
            else:
                piece.exchange(found, me)
        if self.gathered:
            found.sends[me] = found.receives.get(me, [])
        return found


def whole_of(shape: Sequence[int], dtype: torch.dtype, to: torch.dtype | None) -> TensorLayout:
    """Return all of a tensor, cast ``to`` a dtype if one is given and it has floating-point
    numbers."""
    return TensorLayout(tuple(shape), to if to is not None and dtype.is_floating_point else dtype)


def wants_all(has: Layouts, to: torch.dtype | None, among: Collection[int] | None) -> Layouts:
    """Return what ranks want if each has to get all of what it has a part of, cast as by
    :func:`whole_of`. ``among`` are the ranks that want anything, all by default."""
    layouts: dict[tuple[object, ...], TensorLayout] = {}
    members: dict[int, list[int]] = {}
    found: dict[str, list[tuple[TensorLayout, Sequence[int]]]] = {}
    for name, each in has.items():
        for layout, ranks in each:
            key = id(ranks)
            if key not in members:
                members[key] = [rank for rank in ranks if among is None or rank in among]
            if members[key]:
                want = layouts.setdefault((layout.shape, layout.dtype), whole_of(*layout[:2], to))
                found.setdefault(name, []).append((want, members[key]))
    return found


def plan_transfers(
    has: Layouts, wants: Layouts, ranks: int, *, strict: bool, one: bool
) -> list[PlannedTensor]:
    """Return how tensors travel among so many ``ranks``, in the order of ``has``.

    ``strict``: whether it is an error if nobody wants a tensor. ``one``: whether a name stands for
    one tensor, of which those on several meshes are copies; else each rank gets that of its own
    mesh.

    Raises:
        ValueError: what ranks have and want does not go together; names each tensor.
    """
    problems = [f"nobody has {name!r}" for name in wants if name not in has]
    if strict:
        problems += [f"nobody wants {name!r}" for name in has if name not in wants]
    known: dict[tuple[tuple[int, int], ...], TransferPlan] = {}
    found = []
    for name, layouts in has.items():
        if wanted := wants.get(name):
            try:
                _check_same(name, "shape", [*_shapes(layouts), *_shapes(wanted)])
                for each in (layouts, wanted):
                    _check_same(name, "dtype", [(ranks[0], layout.dtype) for layout, ranks in each])
                # Layouts that are sent once are one object for all tensors that lie so.
                key = tuple((id(layout), id(ranks)) for layout, ranks in (*layouts, *wanted))
                if key not in known:
                    known[key] = _plan_transfer(name, layouts, wanted, ranks, one)
                dtypes = layouts[0][0].dtype, wanted[0][0].dtype
                found.append(
                    PlannedTensor(name, min(dtypes, key=attrgetter("itemsize")), known[key])
                )
            except ValueError as error:
                problems.append(str(error))
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("; ".join(problems[:8]) + more)
    return found


def _shapes(layouts: Sequence[tuple[TensorLayout, Sequence[int]]]) -> list[tuple[int, object]]:
    return [(ranks[0], layout.shape) for layout, ranks in layouts]


def _plan_transfer(
    name: str,
    has: Sequence[tuple[TensorLayout, Sequence[int]]],
    wants: Sequence[tuple[TensorLayout, Sequence[int]]],
    ranks: int,
    one: bool,
) -> TransferPlan:
    shape = has[0][0].shape
    by_mesh: dict[tuple[int, ...], ChunkHolders] = {}
    for layout, members in has:
        holders = by_mesh.setdefault(layout.mesh, {})
        for rank, chunks in layout.on(members):
            for chunk in chunks:
                holders.setdefault(chunk, []).append(rank)
    for holders in by_mesh.values():
        there, all_of_it = sum(chunk.numel for chunk in holders), full_chunk(shape).numel
        if there != all_of_it:
            raise ValueError(f"of {name!r} ranks have {there} elements, and it has {all_of_it}")
    # The number of the mesh from which a rank gets what it wants: its own, or else the first.
    own: dict[int, int] = {}
    if len(by_mesh) > 1 and not one:
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


def _check_same(name: str, what: str, given: Sequence[tuple[int, object]]) -> None:
    first: dict[object, int] = {}
    for rank, value in given:
        first.setdefault(value, rank)
    if len(first) > 1:
        values = ", ".join(f"{value} on rank {rank}" for value, rank in first.items())
        raise ValueError(f"{name!r} has not the same {what} everywhere: {values}")


def plan_rounds(tensors: Iterable[PlannedTensor], max_bytes: int) -> list[TransferRound]:
    """Return the rounds in which ``tensors`` travel. In each, no rank sends or receives more than
    about ``max_bytes``."""
    rounds: list[TransferRound] = []
    cuts: dict[tuple[int, int], PieceSplit] = {}
    room = 0
    for tensor in tensors:
        gathered = tensor.plan.is_gathered
        cost = tensor.dtype.itemsize * (1 if gathered else tensor.plan.send_factor)
        key = id(tensor.plan), cost
        if key not in cuts:
            cuts[key] = tensor.plan.cut(max(1, max_bytes // cost))
        cut = cuts[key]
        nbytes = -(-full_chunk(tensor.plan.shape).numel // (cut.parts or cut.pieces)) * cost
        for number in range(cut.pieces):
            if not rounds or nbytes > room or rounds[-1].gathered != gathered:
                rounds.append(TransferRound(gathered))
                room = max_bytes
            room -= nbytes
            rounds[-1].pieces.append(TensorPiece(tensor, number, cut))
        rounds[-1].completes.append(tensor.name)
    return rounds
