"""Ranks without tensors that run different programs, and exchange messages.

Each is a greenlet, which goes on when all ranks have sent their next message.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from greenlet import getcurrent, greenlet

from fsdp_overlap.features.negotiation.schedule import NegotiatedSchedule, negotiate
from fsdp_overlap.schedule.interface import Replies
from support.schedule_model import Action, Forward, Options, Rank, Unit, Wrong


class Step(NamedTuple):
    """What ranks do at once: each its own action."""

    actions: tuple[Action, ...]


class NegotiatingRank(Rank):
    """One of ``ranks``, of which some ``conditional`` units may run on a part."""

    def __init__(
        self, units: int, options: Options, conditional: Collection[int], ranks: Ranks
    ) -> None:
        super().__init__(units, options, NegotiatedSchedule)
        self._ranks = ranks
        self.messages = 0
        self.shadowed = 2  # for others, and until a forward ended on all ranks
        for index in conditional:
            self.units[index].is_conditional = True
        negotiate(self.schedule)

    def exchange(self, message: bytes) -> Replies:
        self.messages += 1
        return self._ranks.exchange(message)

    def gather(self, unit: Unit, again: bool = False, shadow: bool = False) -> None:
        was_ready = unit.is_ready
        super().gather(unit, again, shadow)
        if again and unit.in_use:  # compute waits at once
            unit.is_ready = was_ready


class Ranks:
    """Runs a program on ``count`` ranks."""

    def __init__(
        self, count: int, units: int, options: Options, conditional: Collection[int]
    ) -> None:
        self.ranks = [NegotiatingRank(units, options, conditional, self) for _ in range(count)]
        self._messages: dict[greenlet, bytes] = {}

    def exchange(self, message: bytes) -> Replies:
        me = getcurrent()
        self._messages[me] = message
        replies: Replies = me.parent.switch()
        return replies

    def run(self, program: Sequence[Step]) -> None:
        """Run the program.

        Raises:
            Wrong: a rank waits for messages of one that is done, they issue different collectives,
                or one does what may not be.
        """
        running = [
            greenlet(lambda at=at, rank=rank: [_act(rank, step.actions[at]) for step in program])
            for at, rank in enumerate(self.ranks)
        ]
        for each in running:
            each.switch()
        while any(not each.dead for each in running):
            if any(each.dead for each in running):
                raise Wrong("a rank waits for a message of one that is done")
            messages, self._messages = self._messages, {}
            replies: dict[bytes, int] = {}
            for rank, each in enumerate(running):
                replies[messages[each]] = replies.get(messages[each], 0) | 1 << rank
            if len({len(reply) for reply in replies}) > 1:
                raise Wrong("messages have different sizes")
            for each in running:
                each.switch(replies)
        first, *others = self.ranks
        for other in others:
            if other.collectives != first.collectives:
                raise Wrong(f"ranks issue {first.collectives} and {other.collectives}")

    def issued(self, kind: str) -> set[int]:
        """Return the units of collectives of a kind."""
        return {int(each[1]) for each in self.ranks[0].collectives if each[0] == kind}


def _act(rank: Rank, action: Action) -> None:
    rank.act(action, frozenset())


def each_its_own(*runs: Forward | None, kind: str = "train") -> Step:
    """Return a step in which each rank runs a forward of its own, or shadows the others."""
    return Step(tuple(Action(kind, run) for run in runs))
