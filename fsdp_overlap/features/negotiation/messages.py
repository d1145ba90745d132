"""Agreement on all-gathers, by messages between hosts, among ranks that may run different units.

Each rank reports which unit it is about to run. All ranks then append the same units to one list of
all-gathers, and issue these in its order, each at its own pace. A rank that does not run a unit of
the list takes part in its all-gather, and frees the full buffer at once. See Note [negotiation].
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice, pairwise
from operator import or_
from typing import NamedTuple

from fsdp_overlap.features.negotiation.gathers import (
    AgreedCall,
    AgreedGather,
    NegotiatedPass,
    NegotiatedPrefetcher,
)
from fsdp_overlap.schedule.interface import (
    AutogradEngine,
    CommOps,
    ScheduledUnit,
    UnitIndex,
    UnitRefs,
)

BACKWARD, END = -1, -2
"""What ranks need that are about to begin a backward, and that have ended an evaluation."""
SHADOW, REST = -3, -4
"""What ranks need that take part in what others run until one of these, and until none runs
anything."""

_HEAD = struct.Struct("<iB")
"""What begins a message: a unit's index or one of the above, and flags."""
_ENDS = struct.Struct("<BI")
"""What a message tells about each all-gather: flags, and where this rank's forward ended."""
FRESH, HAS_CALLS, HAS_GRAD, ACCUMULATES = 1, 2, 4, 8
"""Flags of a rank: no forward is under way, a backward may come back to its forwards, it makes a
graph, and its backward accumulates into parameters."""
CALLS, NEEDS, HOLDS, JOINS = 1, 2, 4, 8
"""Flags of an all-gather: this rank's backward comes back to it, reads the parameters, and finds
them gathered; it ran in the activation checkpoint of the one before to which backward comes
back."""


class AgreedBackward(NamedTuple):
    """What ranks agreed on about a backward that begins."""

    passes: Sequence[NegotiatedPass]
    """Those that it may come back to."""
    last_tick: int
    accumulates: bool
    creates_graph: bool


@dataclass(eq=False, slots=True)
class AgreedPass:
    """One pass, and its all-gathers in order."""

    forward_pass: NegotiatedPass
    gathers: list[AgreedGather] = field(default_factory=list)
    position: int = 0
    """How many of them this rank has used or shadowed."""
    reported: int = 0
    """How many of them messages have told about."""
    ran: list[tuple[int, list[UnitIndex]]] = field(default_factory=list)
    """Which units ranks have run, as far as messages told: sets of ranks, each with the units that
    all of them ran."""

    @property
    def has_calls(self) -> bool:
        """Whether a backward may come back to it on this rank."""
        return any(gather.records or gather.may_recompute for gather in self.gathers)


class Message(NamedTuple):
    """A message that some ranks sent."""

    ranks: int
    """The set of these ranks: bit ``r`` for rank ``r``."""
    need: UnitIndex
    flags: int
    used: bytes
    """Whether they used each all-gather that messages have not told about before."""


class Negotiation:
    """Agrees with the other ranks on what is gathered.

    Messages are sent where ranks went different ways before, and at the begin of a pass and of a
    backward. Between them, what followed a unit before is expected to follow it again, and gathered
    by all ranks. A rank that runs something else takes part, and asks for its own at the next
    message.

    ``prepare`` brings full buffers to rest, before a message after which a pass may begin. It gets
    the unit that this rank needs, if any. ``begin_pass`` is called when a pass begins, on all
    ranks, and gives its :class:`NegotiatedPass`. It is told whether some rank makes a graph.
    ``has_grad`` says whether this rank makes one.

    What messages say is handled once for each set of ranks that say the same, since most do: host
    time does not grow with the number of ranks.
    """

    def __init__(
        self,
        comm: CommOps,
        prefetcher: NegotiatedPrefetcher,
        refs: UnitRefs,
        prepare: Callable[[ScheduledUnit | None], None],
        begin_pass: Callable[[bool], NegotiatedPass],
        engine: AutogradEngine,
    ) -> None:
        self._comm = comm
        self._prefetcher = prefetcher
        self._refs = refs
        self._prepare = prepare
        self._begin_pass = begin_pass
        self._engine = engine
        self._checkpoint: object = None
        """The activation checkpoint in which this rank ran its last unit, in the pass under way."""
        self._checkpoints = 0
        """How many there were."""
        self._first_node = self._last_node = 0
        """The number of the next node when the unit before that checkpoint ran, and when this
        rank's last one did."""
        self._next: dict[UnitIndex, UnitIndex] = {}
        """For each unit, what first followed it on a rank: a unit, ``BACKWARD`` or ``END``."""
        self._branches: set[UnitIndex] = set()
        """Units that something else followed, too."""
        self._passes: list[AgreedPass] = []
        """Those since the last backward, the one under way last."""
        self._completed: list[NegotiatedPass] = []
        """Those that the last backward came back to, or may come back to again."""
        self._flags = 0
        """What some rank told of itself in the last message."""
        self._facts: set[bytes] = set()
        """What ranks told, in the last message, about the all-gathers that their backwards come
        back to."""

    def request(self, unit: ScheduledUnit, is_fresh: bool, has_grad: bool) -> AgreedGather:
        """Gather ``unit``, which this rank is about to run, after what other ranks run before.
        ``is_fresh``: whether no forward is under way, so that a pass may begin. ``has_grad``:
        whether that makes a graph.

        Raises:
            RuntimeError: ranks run different units that are not conditional; names them.
        """
        while (gather := self._find(unit.index)) is None:
            self._shadow_rest()
            if is_fresh:
                self._prepare(unit)
            self._agree(unit.index, is_fresh, HAS_GRAD * has_grad)
        gather.is_used = True
        self._number(gather)
        self._prefetcher.use_agreed(unit, gather)
        self._gather_ahead(self._passes[-1])
        return gather

    def begin_backward(self, tick: int, accumulates: bool | None) -> AgreedBackward:
        """Shadow what other ranks run before their backward begins too, unless all know already
        that it begins: then this rank shadows, and ``accumulates`` is ``None``. Then give each pass
        the calls of all ranks, with ticks after ``tick``.

        Raises:
            RuntimeError: a rank runs a unit that is not conditional; names it.
        """
        self._checkpoint = None
        if accumulates is not None:
            # What a checkpoint runs again has gradients enabled, whatever the backward makes.
            makes_graph = self._engine.is_grad_enabled() and self._engine.keeps_graph()
            self._shadow_until(BACKWARD, ACCUMULATES * accumulates + HAS_GRAD * makes_graph)
        if self._passes:
            self._completed, tick = self._complete_passes(tick)
        flags = self._flags
        return AgreedBackward(
            self._completed, tick, bool(flags & ACCUMULATES), bool(flags & HAS_GRAD)
        )

    def end_pass(self) -> None:
        """Shadow what other ranks run before their pass ends too. No backward may tell of that."""
        self._checkpoint = None
        if self._passes:
            self._shadow_until(END)

    def shadow(self, need: int) -> int:
        """Shadow what other ranks run, as one that runs nothing. ``need``: ``SHADOW`` or ``REST``.
        Return what all ranks do next: ``BACKWARD``, ``END``, or if none runs anything, ``SHADOW``
        where a rank shadows, else ``REST``.

        Raises:
            RuntimeError: other ranks run different units that are not conditional; names them.
        """
        for current in self._passes:
            for gather in current.gathers:
                gather.records.clear()  # no backward comes back to what this rank ran
                gather.may_recompute = False
        chosen = 0
        while chosen >= 0:
            self._shadow_rest()
            self._prepare(None)
            chosen = self._agree(need, False)
        return chosen

    @property
    def position(self) -> int:
        """How many all-gathers of the pass under way this rank has used or shadowed."""
        return self._passes[-1].position if self._passes else 0

    def _number(self, gather: AgreedGather) -> None:
        """Note in which activation checkpoint ``gather`` is used, and before which nodes."""
        node = self._engine.sequence_number()
        if node < self._last_node:  # of another thread, which counts by itself
            self._last_node = 0
        before, self._checkpoint = self._checkpoint, self._engine.checkpoint()
        if self._checkpoint is None or self._checkpoint is not before:
            self._first_node = self._last_node
        if self._checkpoint is not None:
            self._checkpoints += self._checkpoint is not before
            gather.checkpoint = self._checkpoints
        gather.first_node = self._first_node
        self._last_node = node

    # One list

    def _find(self, index: UnitIndex) -> AgreedGather | None:
        """Return the next all-gather of unit ``index``, after shadowing those before it. ``None``
        if none was agreed on."""
        current = self._passes[-1] if self._passes else None
        if current is None:
            return None
        for at in range(current.position, len(current.gathers)):
            if current.gathers[at].unit_index == index:
                if at > current.position:
                    self._shadow(current, at)
                current.position = at + 1
                return current.gathers[at]
        return None

    def _shadow_until(self, need: int, flags: int = 0) -> None:
        chosen: int | None = None
        while chosen != need:
            self._shadow_rest()
            chosen = self._agree(need, False, flags)

    def _shadow_rest(self) -> None:
        current = self._passes[-1] if self._passes else None
        if current is not None and current.position < len(current.gathers):
            self._shadow(current, len(current.gathers))

    def _shadow(self, current: AgreedPass, end: int) -> None:
        """Take part in all-gathers up to ``end``, which this rank does not need."""
        for gather in current.gathers[current.position : end]:
            unit = self._refs[gather.unit_index]()
            if unit is not None and gather.is_issued:
                self._prefetcher.drop_ahead(gather.unit_index)
            elif unit is not None:
                self._prefetcher.shadow(unit, gather)
        current.position = max(current.position, end)

    def _gather_ahead(self, current: AgreedPass) -> None:
        ahead = current.gathers[current.position : current.position + self._prefetcher.prefetch]
        for gather in ahead:
            if gather.is_issued or not gather.gathers:
                continue
            unit = self._refs[gather.unit_index]()
            if unit is None:
                continue
            if unit.is_gathered:
                return  # it is read, and would be waited for at once
            self._prefetcher.gather_ahead(unit, gather, is_needed=True)

    # Messages

    def _agree(self, need: UnitIndex, is_fresh: bool, flags: int = 0) -> UnitIndex:
        """Tell the other ranks what this one needs. Return what all ranks do next. A unit is
        appended to the list."""
        current = self._passes[-1] if self._passes else None
        flags += FRESH * is_fresh + HAS_CALLS * (current is not None and current.has_calls)
        recent = [] if current is None else current.gathers[current.reported :]
        used = bytes([gather.is_used for gather in recent])
        held = self._held(may_begin=is_fresh or current is None or need <= SHADOW)
        facts = self._facts_of_passes(is_last=need <= BACKWARD)
        replies = self._comm.exchange(_HEAD.pack(need, flags) + used + held + facts)
        start, end = _HEAD.size, _HEAD.size + len(recent)
        told = []
        for reply, ranks in replies.items():
            its_need, its_flags = _HEAD.unpack_from(reply)
            told.append(Message(ranks, its_need, its_flags, reply[start:end]))
        self._flags = some_flags = reduce(or_, [each.flags for each in told])
        self._facts = {reply[len(reply) - len(facts) :] for reply in replies}
        running = [each.flags for each in told if each.need > SHADOW]
        is_fresh = bool(running) and all(flags & FRESH for flags in running)
        if current is not None:
            self._learn(current, told)
        under_way = None if is_fresh else current
        chosen = self._choose(told, under_way) if running else max(each.need for each in told)
        if under_way is None:
            if current is not None and not some_flags & HAS_CALLS:
                self._passes.pop()
            if chosen >= 0:
                self._append_pass(
                    chosen,
                    bool(some_flags & HAS_GRAD),
                    {reply[end : end + len(held)] for reply in replies},
                    reduce(or_, replies.values()),
                )
        elif chosen >= 0:
            following = self._expected_from(chosen)
            under_way.gathers += [AgreedGather(index, True) for index in following]
        return chosen

    def _held(self, may_begin: bool) -> bytes:
        """Return which units this rank holds gathered. Zeros unless a pass ``may_begin``: none does
        while a rank is within one."""
        if not may_begin:
            return bytes(len(self._refs))
        units = [ref() for ref in self._refs]
        return bytes([unit is not None and unit.is_up_to_date for unit in units])

    def _append_pass(
        self, first: UnitIndex, has_grad: bool, held: Iterable[bytes], ranks: int
    ) -> None:
        by_all = {i for i, by_rank in enumerate(zip(*held, strict=True)) if all(by_rank)}
        current = AgreedPass(self._begin_pass(has_grad), ran=[(ranks, [])])
        for index in self._expected_from(first):
            current.gathers.append(AgreedGather(index, index not in by_all))
        self._passes.append(current)

    def _is_conditional(self, index: UnitIndex) -> bool:
        unit = self._refs[index]() if index >= 0 else None
        return unit is not None and unit.is_conditional

    def _choose(self, told: Sequence[Message], current: AgreedPass | None) -> UnitIndex:
        """Return what comes first of what ranks need: conditional units, in their order. Then what
        a rank shadowed while it asked for a conditional one, so that it comes as far as others."""
        needs = {each.need for each in told}
        is_alike = current is None or all(ran == current.ran[0][1] for _, ran in current.ran)
        if is_alike and len(needs) == 1:
            return told[0].need
        conditional = [index for index in needs if self._is_conditional(index)]
        if conditional:
            return min(conditional)
        ahead: list[tuple[int, list[UnitIndex]]] = []
        for ranks, ran in [(-1, [])] if current is None else current.ran:
            others = [index for index in ran if not self._is_conditional(index)]
            ahead += [
                (ranks & each.ranks, [*others, each.need])
                for each in told
                if each.need > SHADOW and ranks & each.ranks
            ]
        runs = [units for _, units in ahead]
        shortest, longest = min(runs, key=len), max(runs, key=len)
        if any(units != longest[: len(units)] for units in runs):
            raise RuntimeError(self._difference(ahead))
        return shortest[-1]

    def _difference(self, ran: Sequence[tuple[int, Sequence[UnitIndex]]]) -> str:
        """Return where ranks first ran different units that are not conditional, in words. ``ran``:
        sets of ranks, with what they ran."""
        most = max(len(units) for _, units in ran)
        at = next(at for at in range(most) if len({tuple(units[: at + 1]) for _, units in ran}) > 1)
        by_unit: dict[str, int] = {}
        for ranks, units in sorted(ran, key=lambda each: each[0] & -each[0]):  # by the first rank
            name = self._name(units[at]) if at < len(units) else "nothing yet"
            by_unit[name] = by_unit.get(name, 0) | ranks
        return (
            "ranks ran different units: "
            + "; ".join(f"{name} on ranks {_listed(ranks)}" for name, ranks in by_unit.items())
            + ". Only units of fully_shard(conditional=True), and those within them, may run on "
            "some ranks alone"
        )

    def _name(self, index: UnitIndex) -> str:
        unit = self._refs[index]() if index >= 0 else None
        if unit is not None:
            return f"unit {unit.name!r}"
        return "a backward" if index == BACKWARD else "the end of an evaluation"

    def _learn(self, current: AgreedPass, told: Sequence[Message]) -> None:
        """Note which units each rank has run since the last message, and what followed each."""
        recent = current.gathers[current.reported :]
        current.reported = len(current.gathers)
        before, current.ran = current.ran, []
        for ranks, ran in before:
            by_use: dict[bytes, int] = {}
            for each in told:
                if both := ranks & each.ranks:
                    by_use[each.used] = by_use.get(each.used, 0) | both
                    self._note_order(ran[-1:] + _used(recent, each.used), each.need)
            for used, those in by_use.items():
                further = _used(recent, used)
                if len(by_use) == 1:  # no copy, which would grow with the pass
                    ran += further
                    current.ran.append((those, ran))
                else:
                    current.ran.append((those, ran + further))

    def _note_order(self, ran: list[UnitIndex], need: UnitIndex) -> None:
        """Note that a rank has run these units one after the other, and needs another one next."""
        for before, after in pairwise([*ran, need] if need > SHADOW else ran):
            if self._next.setdefault(before, after) != after:
                self._branches.add(before)

    def _expected_from(self, first: UnitIndex) -> list[UnitIndex]:
        """Return ``first`` and what is expected to follow it, up to where ranks may differ."""
        units = {first: None}
        last = first
        while last not in self._branches and (last := self._next.get(last, END)) >= 0:
            if last in units:
                break
            units[last] = None
        return list(units)

    # Backward

    def _complete_passes(self, tick: int) -> tuple[list[NegotiatedPass], int]:
        """Complete the passes that backward comes back to on some rank."""
        # How many ranks tell the same does not matter.
        of_gathers = zip(*map(_ENDS.iter_unpack, self._facts), strict=True)
        completed = []
        for current in self._passes:
            facts = list(islice(of_gathers, len(current.gathers)))
            _complete(current, facts, tick, bool(self._flags & HAS_GRAD))
            if current.forward_pass.calls:
                completed.append(current.forward_pass)
            for call in current.forward_pass.calls:
                if isinstance(call, AgreedCall) and not call.gathers:
                    self._prefetcher.keep(call.unit_index)
            tick += 2 * len(current.gathers) + 2
        self._passes.clear()
        return completed, tick

    def _facts_of_passes(self, is_last: bool) -> bytes:
        """Return which all-gathers of the passes this rank's backward comes back to, and where
        their forwards ended. Zeros unless it ``is_last``, the message after which a backward may
        begin: none does while a rank needs a unit."""
        if not is_last:
            return bytes(_ENDS.size * sum(len(current.gathers) for current in self._passes))
        facts = []
        for current in self._passes:
            checkpoint = 0
            for gather in current.gathers:
                flags = self._flags_of(gather)
                if flags:
                    flags += JOINS * (gather.checkpoint == checkpoint > 0)
                    checkpoint = gather.checkpoint
                facts.append(_ENDS.pack(flags, gather.end))
        return b"".join(facts)

    def _flags_of(self, gather: AgreedGather) -> int:
        unit = self._refs[gather.unit_index]()
        if unit is None or not (gather.records or gather.may_recompute):
            return 0
        needs = bool(gather.may_recompute or gather.checkpoint)
        for call in gather.records:
            needs |= call.needs_parameters
        return CALLS + NEEDS * needs + HOLDS * unit.is_up_to_date


def _used(gathers: Sequence[AgreedGather], used: bytes) -> list[UnitIndex]:
    return [gather.unit_index for gather, is_used in zip(gathers, used, strict=True) if is_used]


def _listed(ranks: int) -> list[int]:
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]


def _complete(
    current: AgreedPass,
    facts: Sequence[Sequence[tuple[int, int]]],
    tick: int,
    creates_graph: bool,
) -> None:
    """Give the pass one call for each all-gather that some rank comes back to, in an order that is
    the same on all ranks: by ends, of which the latest on any rank counts. What those hold that
    come back to it is not gathered, unless all ranks are to keep it for a graph that backward
    makes."""
    forward_pass = current.forward_pass
    forward_pass.ticks.clear()
    forward_pass.without_call.clear()
    calls: list[AgreedCall] = []
    joined: list[tuple[AgreedCall, AgreedCall]] = []
    last: dict[int, AgreedCall] = {}
    held = set()
    for at, (gather, by_rank) in enumerate(zip(current.gathers, facts, strict=True)):
        some, each, end = 0, HOLDS, 0
        for flags, its_end in by_rank:
            if flags & CALLS:
                some, each, end = some | flags, each & flags, max(end, its_end)
        if not some:
            continue
        start, end = tick + 2 * at + 2, tick + 2 * end + 1
        call = AgreedCall(
            gather.unit_index,
            start,
            end,
            forward_pass,
            version=-1,
            needs_parameters=bool(some & NEEDS),
            is_own=gather.may_recompute,
            first_node=gather.first_node,
        )
        for own in gather.records:
            own.agreed, call.is_own, call.version = call, True, own.version
        if each and not creates_graph:
            held.add(call)
        for rank, (flags, _) in enumerate(by_rank):
            if flags & JOINS:
                joined.append((last[rank], call))
            if flags & CALLS:
                last[rank] = call
        forward_pass.record(gather.unit_index, start, end)
        calls.append(call)
    calls.sort(key=lambda call: (call.end, -call.start))
    seen: set[UnitIndex] = set()
    for call in reversed(calls):  # as backward comes to them
        if call.unit_index not in seen and call in held:
            call.gathers = False
        seen.add(call.unit_index)
    forward_pass.calls = [*calls]
    forward_pass.is_for_all_ranks = len(last) < len(facts[0])
    place = {call: at for at, call in enumerate(calls)}
    for at, other in (sorted((place[call], place[other])) for call, other in joined):
        for call in calls[at + 1 : other + 1]:
            call.is_joined = True
