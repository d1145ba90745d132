"""Plans of param groups: where parameters lie in flat buffers, and which rank holds what."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Protocol, Self
from weakref import WeakKeyDictionary

import torch

# ---- Parameters as layouts see them, the input of planning ----

# A parameter starts on a multiple of both. 16 bytes are what vectorized kernels ask of a pointer.
_ALIGN_ELEMENTS, _ALIGN_BYTES = 8, 16


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as layouts see it."""

    fqn: str
    """Its name relative to its unit."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    is_embedding: bool = False
    """Whether it is the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag``."""
    keeps_dtype: bool = False
    """Whether compute uses it in its own dtype, whatever the policy of its unit."""
    cut_dim: int = 0
    """The dimension along which ``PerTensor()`` cuts it."""
    block: int = 1
    """How many adjacent elements no layout may cut, counted from the first one."""
    is_kept: bool = False
    """Whether it is sent as it is where others of its unit are sent in few bits."""
    grad_dtype: torch.dtype | None = None
    """The dtype of its gradients that the user set. ``None``: its own."""
    never_cast: bool = False
    """Whether its class alone knows what its elements are: nothing may cast them, or send them in
    few bits."""
    is_extension: bool = False
    """Whether its tensor's class defines how it is gathered (``fsdp_pre_all_gather``)."""
    piece: int = 0
    """The number, from 1, of the part of its unit that it is gathered and reduced with. 0 if the
    unit is not divided."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def kind(self) -> tuple[object, ...]:
        """What parameters of one param group have in common."""
        dtypes = self.dtype, self.keeps_dtype, self.grad_dtype
        travels = self.never_cast, self.is_extension, self.is_kept, self.requires_grad
        return dtypes, travels, self.piece

    @property
    def alignment(self) -> int:
        """It starts on a multiple of this many elements of a flat buffer. Where it may be cut
        anywhere, cuts do so too."""
        return max(_ALIGN_ELEMENTS, _ALIGN_BYTES // self.dtype.itemsize)


# ---- The plan of a param group ----

_PICTURE_COLUMNS = 64


def align(numel: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``numel``."""
    return -(-numel // alignment) * alignment


class Plan(Protocol):
    """Where the parameters of a param group lie in its flat buffer, and what each rank holds. All
    numbers are in elements. The same plan has the same ``repr()`` on every rank."""

    @property
    def specs(self) -> tuple[ParamSpec, ...]: ...
    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat buffer."""
        ...

    @property
    def shard_numels(self) -> tuple[int, ...]:
        """The size of each rank's shard."""
        ...

    @property
    def numel(self) -> int:
        """The size of the flat buffer, with padding."""
        ...

    @property
    def world_size(self) -> int: ...
    @property
    def is_equal(self) -> bool:
        """Whether all shards have the same size."""
        ...

    @property
    def padding(self) -> int:
        """How many elements of the flat buffer belong to no parameter."""
        ...

    @property
    def packed(self) -> ParamGroupPlan:
        """The plan of a buffer of all shards, one after the other, as collectives see them."""
        ...

    def places(self, rank: int) -> list[tuple[int, int]]:
        """Return where in the shard of ``rank`` each parameter begins, and how many elements it has
        there."""
        ...

    def merged(self, world_size: int) -> ParamGroupPlan:
        """Return the same flat buffer in ranges on fewer ranks.

        Raises:
            ValueError: ``world_size`` does not divide the number of ranks.
        """
        ...

    def with_specs(self, specs: tuple[ParamSpec, ...]) -> Self:
        """Return the same plan of parameters of the same sizes."""
        ...


@dataclass(frozen=True)
class ParamGroupPlan:
    """Where each parameter of a param group lies in its flat buffer, and which rank holds which
    range.

    All numbers are in elements. Rank ``r`` holds ``[shard_starts[r], shard_starts[r] +
    shard_numels[r])``. Parameters are in the order of their offsets. ``block_sizes[i]`` is the
    number of elements between allowed cuts of ``specs[i]``; without ``block_sizes`` it is 1 for
    all.

    ``print(plan)`` draws the plan.

    Raises:
        ValueError: parameters overlap or lie outside the buffer, or one is cut where it must not
            be.
    """

    specs: tuple[ParamSpec, ...]
    offsets: tuple[int, ...]
    shard_numels: tuple[int, ...]
    block_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            if offset < end:
                raise ValueError(f"{spec.fqn} starts at {offset}, inside the parameter before it")
            end = offset + spec.numel
        if end > self.numel:
            raise ValueError(f"the shards hold {self.numel} elements, the parameters end at {end}")
        if self.block_sizes:
            self._check_cuts()
        else:
            object.__setattr__(self, "block_sizes", (1,) * len(self.specs))

    def _check_cuts(self) -> None:
        for spec, block_size in zip(self.specs, self.block_sizes, strict=True):
            for _, _, stop in self._ranges[spec.fqn]:
                if stop % block_size and stop != spec.numel:
                    raise ValueError(
                        f"{spec.fqn} of shape {spec.shape} is cut at element {stop}, but its "
                        f"layout allows cuts at multiples of {block_size} only"
                    )

    @property
    def world_size(self) -> int:
        return len(self.shard_numels)

    @cached_property
    def numel(self) -> int:
        """The size of the flat buffer, with padding."""
        return sum(self.shard_numels)

    @cached_property
    def shard_starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.shard_numels[:-1]))

    @cached_property
    def is_equal(self) -> bool:
        """Whether all shards have the same size."""
        return len(set(self.shard_numels)) == 1

    @property
    def packed(self) -> ParamGroupPlan:
        return self

    def with_specs(self, specs: tuple[ParamSpec, ...]) -> ParamGroupPlan:
        return replace(self, specs=specs)

    def merged(self, world_size: int) -> ParamGroupPlan:
        """Return the same flat buffer on fewer ranks, each with the shards of several adjacent
        ranks.

        Raises:
            ValueError: ``world_size`` does not divide the number of ranks.
        """
        count, left = divmod(self.world_size, world_size)
        if left:
            raise ValueError(f"{self.world_size} ranks cannot be merged to {world_size}")
        numels = [
            sum(self.shard_numels[first : first + count])
            for first in range(0, self.world_size, count)
        ]
        return replace(self, shard_numels=tuple(numels))

    @property
    def padding(self) -> int:
        """How many elements of the flat buffer belong to no parameter."""
        return self.numel - sum(spec.numel for spec in self.specs)

    def ranges(self, fqn: str) -> list[tuple[int, int, int]]:
        """Return ``(rank, start, stop)`` inside the flattened parameter, for each rank that holds
        any of it.

        Raises:
            KeyError: the param group has no parameter of that name.
        """
        return list(self._ranges[fqn])

    def range_of(self, fqn: str, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of what ``rank`` holds of a flattened parameter."""
        held = ((start, stop) for owner, start, stop in self._ranges[fqn] if owner == rank)
        return next(held, (0, 0))

    def places(self, rank: int) -> list[tuple[int, int]]:
        """Return where in the shard of ``rank`` each parameter begins, and how many elements it has
        there."""
        places = []
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            start, stop = self.range_of(spec.fqn, rank)
            first = offset + start - self.shard_starts[rank] if stop > start else 0
            places.append((first, stop - start))
        return places

    def owner(self, fqn: str) -> int | None:
        """Return the rank that holds all of a parameter. ``None`` if several ranks hold parts of
        it, or if it is empty.

        Raises:
            KeyError: the param group has no parameter of that name.
        """
        ranges = self._ranges[fqn]
        return ranges[0][0] if len(ranges) == 1 else None

    @cached_property
    def _ranges(self) -> dict[str, list[tuple[int, int, int]]]:
        ranges_of: dict[str, list[tuple[int, int, int]]] = {}
        starts, numels = self.shard_starts, self.shard_numels
        rank = 0
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            ranges = ranges_of.setdefault(spec.fqn, [])
            end = offset + spec.numel
            while rank < len(numels) and starts[rank] + numels[rank] <= offset:
                rank += 1
            at = rank
            while at < len(numels) and starts[at] < end:
                first = max(starts[at], offset)
                last = min(starts[at] + numels[at], end)
                if first < last:
                    ranges.append((at, first - offset, last - offset))
                at += 1
        return ranges_of

    def __str__(self) -> str:
        """Return a picture in text. Each rank has a line: a bar as long as its range, and the names
        of the parameters that lie there."""
        kind = "equal" if self.is_equal else "ragged"
        lines = [
            f"{len(self.specs)} parameters on {self.world_size} ranks, {self.numel:,} elements in "
            f"{kind} shards, {self.padding:,} of them padding"
        ]
        names: list[list[str]] = [[] for _ in self.shard_numels]
        for fqn, ranges in self._ranges.items():
            for rank, start, stop in ranges:
                names[rank].append(fqn if len(ranges) == 1 else f"{fqn}[{start:,}:{stop:,}]")
        largest = max(1, *self.shard_numels)
        for rank, numel in enumerate(self.shard_numels):
            bar = "#" * round(_PICTURE_COLUMNS * numel / largest)
            line = f"rank {rank:>4} {bar:<{_PICTURE_COLUMNS}} {numel:>13,}  "
            lines.append((line + ", ".join(names[rank])).rstrip())
        return "\n".join(lines)


def equal_shards(specs: Sequence[ParamSpec], world_size: int) -> ParamGroupPlan:
    """Return the plan of a param group whose parameters may be cut anywhere, in shards of equal
    size."""
    offsets = []
    end, alignment = 0, specs[0].alignment
    for spec in specs:
        offsets.append(align(end, alignment))
        end = offsets[-1] + spec.numel
    shard = align(-(-end // world_size), alignment)
    return ParamGroupPlan(tuple(specs), tuple(offsets), (shard,) * world_size)


# ---- Layouts: where a parameter may be cut ----


class Layout(Protocol):
    """Says where its parameters may be cut between ranks."""

    def block_size(self, spec: ParamSpec) -> int:
        """Return the number of elements between allowed cuts, counted from the parameter's first
        element. It is at least 1. A parameter whose block size is its size or more is never cut."""
        ...

    def work(self, spec: ParamSpec) -> int:
        """Return what the optimizer's step costs the rank that holds the parameter, beyond what
        every element costs. The planner balances it. 0 if every element costs the same."""
        return 0


LayoutRule = Layout | Callable[[str, ParamSpec], Layout]
"""A layout for all parameters, or a function that takes ``(fqn, spec)`` and returns a layout."""


@dataclass(frozen=True)
class Flat(Layout):
    """Ranks hold equal ranges of elements, cut anywhere. For element-wise optimizers."""

    def block_size(self, spec: ParamSpec) -> int:
        return 1


class RowLayout(Layout):
    """A layout under which each rank has rows of each parameter. It plans param groups itself, each
    apart from all else."""

    @abstractmethod
    def plan(self, specs: Sequence[ParamSpec], world_size: int) -> Plan:
        """Return the plan of a param group of these parameters."""


# ---- Planners: in equal shards where everything may be cut, else balanced ----


class UnitPlanner(Protocol):
    """Plans param groups so that all ranks have equal loads, which it keeps."""

    def plan(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]: ...
    def copy(self) -> Self: ...


class Planner:
    """Plans the units of a model over one mesh: as they are made, or together ahead of that.

    ``make_balanced`` makes what plans them once not everything may be cut anywhere.
    """

    _balanced: UnitPlanner | None = None
    _is_first = True
    """Whether no unit with parameters was planned yet."""

    def __init__(
        self,
        world_size: int,
        layout: LayoutRule,
        make_balanced: Callable[[int, LayoutRule], UnitPlanner],
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size} is not a number of ranks; use 1 or more")
        self._world_size, self._layout = world_size, layout
        self._make_balanced = make_balanced
        self._in_equal_shards: list[Sequence[Sequence[ParamSpec]]] = []
        """What was planned while everything could be cut anywhere."""
        self._ahead: WeakKeyDictionary[object, list[Plan]] = WeakKeyDictionary()
        """Plans of units that are not made yet, by their first module."""

    def copy(self) -> Planner:
        """Return a planner that has planned what this one has."""
        other = copy(self)
        other._in_equal_shards = [*self._in_equal_shards]
        other._balanced = None if self._balanced is None else self._balanced.copy()
        other._ahead = self._ahead.copy()
        return other

    def plan(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]:
        """Return the plans of each unit's param groups. Loads are most even if all units are
        planned together. If it raises, the planner is as before."""
        is_flat = type(self._layout) is Flat and all(s.block == 1 for specs in units for s in specs)
        if self._balanced is not None or not is_flat:
            return self._plan_balanced(units)
        self._in_equal_shards.append(units)
        return [_param_groups(specs, self._world_size) for specs in units]

    def _plan_balanced(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]:
        if self._balanced is None:
            self._balanced = self._make_balanced(self._world_size, self._layout)
            for planned in self._in_equal_shards:
                self._balanced.plan(planned)  # the same plans, of which it notes the loads
        return self._balanced.plan(units)

    def plan_unit(
        self, modules: Sequence[object], specs: Sequence[ParamSpec], may_be_first: bool = True
    ) -> list[Plan]:
        """Return the plans for ``modules``, which are becoming a unit of the parameters ``specs``.
        They are made now unless they were made ahead. ``may_be_first``: whether the unit is the
        first of its model if it is the first here.

        Raises:
            ValueError: the unit was planned ahead with other parameters.
        """
        if modules[0] in self._ahead:
            return self._plans_made_ahead(modules, specs)
        is_first = self._is_first and may_be_first and bool(specs)
        [plans] = self.plan([in_pieces(specs, self._world_size) if is_first else specs])
        self._is_first &= not is_first
        return plans

    # Units that are planned ahead

    def has(self, module: object) -> bool:
        """Return whether ``module`` is the first of a unit that was planned ahead and is not made
        yet."""
        return module in self._ahead

    def plan_ahead(
        self, units: Sequence[Sequence[object]], specs: Sequence[Sequence[ParamSpec]]
    ) -> None:
        """Plan ``units`` together: each will be a unit of these modules, with these parameters."""
        for modules, plans in zip(units, self.plan(self._begin_in_pieces(specs)), strict=True):
            self.place(modules, plans)

    def place(self, modules: Sequence[object], plans: list[Plan]) -> None:
        """Note how ``modules`` are to be laid out when they become a unit."""
        self._ahead[modules[0]] = [*self._ahead.get(modules[0], []), *plans]

    def _plans_made_ahead(
        self, modules: Sequence[object], specs: Sequence[ParamSpec]
    ) -> list[Plan]:
        plans = self._ahead[modules[0]]
        made_of = _as_known_ahead(spec for plan in plans for spec in plan.specs)
        different = made_of ^ _as_known_ahead(specs)
        if different:
            names = sorted({spec.fqn for spec in different})
            more = ", ..." if len(names) > 3 else ""
            raise ValueError(
                f"{', '.join(type(module).__name__ for module in modules)} was planned with other "
                f"parameters ({', '.join(names[:3])}{more}): give plan_layout() all modules that "
                "will be units, the same ignored_params, and parameters as frozen as they will be; "
                "units with a param_dtype_override_fn cannot be planned ahead"
            )
        del self._ahead[modules[0]]
        return plans

    def _begin_in_pieces(
        self, units: Sequence[Sequence[ParamSpec]]
    ) -> Sequence[Sequence[ParamSpec]]:
        """Return ``units``, the first of all that are planned in pieces: see Note [pieces]."""
        for index, specs in enumerate(units if self._is_first else ()):
            if specs:
                self._is_first = False
                return [*units[:index], in_pieces(specs, self._world_size), *units[index + 1 :]]
        return units


@contextmanager
def rollback_on_error(planners: Iterable[Planner]) -> Iterator[None]:
    """Take back what is planned in the ``with`` block if the block raises."""
    before = [(planner, planner.copy()) for planner in planners]
    try:
        yield
    except BaseException:
        for planner, as_before in before:
            vars(planner).update(vars(as_before))
        raise


def _as_known_ahead(specs: Iterable[ParamSpec]) -> set[ParamSpec]:
    """Return ``specs`` without what travels how, because ahead of a unit nobody knows that."""
    return {replace(spec, block=1, is_kept=False, piece=0) for spec in specs}


def _param_groups(specs: Sequence[ParamSpec], world_size: int) -> list[Plan]:
    by_kind: dict[tuple[object, ...], list[ParamSpec]] = {}
    for spec in specs:
        by_kind.setdefault(spec.kind, []).append(spec)
    return [equal_shards(each, world_size) for each in by_kind.values()]


# ---- The first unit, which is reduced in pieces as DDP's buckets are: Note [pieces] ----

MAX_PIECES = 4  # of which one's reduction stays exposed
MIN_SHARD_BYTES = 1 << 20  # of a piece: smaller reductions are dominated by latency


def in_pieces(specs: Sequence[ParamSpec], world_size: int) -> list[ParamSpec]:
    """Return ``specs``, in which trainable parameters have the number of a piece. Pieces are
    contiguous and of about equal size. There are none if the parameters are too small for two."""
    movable = [spec for spec in specs if spec.requires_grad and not spec.is_extension]
    total = sum(map(_bytes, movable))
    count = min(MAX_PIECES, total // (MIN_SHARD_BYTES * world_size))
    if count < 2 or len(movable) < 2:
        return list(specs)
    pieces = _pieces_of(movable, count, total)
    return [replace(spec, piece=pieces.get(spec, 0)) for spec in specs]


def _pieces_of(specs: Sequence[ParamSpec], count: int, total: int) -> dict[ParamSpec, int]:
    """Return which of ``count`` pieces each of ``specs`` belongs to, which have ``total`` bytes."""
    pieces: dict[ParamSpec, int] = {}
    before = 0
    for spec in specs:
        pieces[spec] = 1 + before * count // total
        before += _bytes(spec)
    return pieces


def _bytes(spec: ParamSpec) -> int:
    return spec.numel * spec.dtype.itemsize
