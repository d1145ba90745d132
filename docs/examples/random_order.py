"""A feature in a file of its own: units are gathered ahead in a random order, equal on all ranks.

Call ``gather_in_random_order(ctx, seed)`` after ``fully_shard()``. It gains nothing: it shows what
a variant of the schedule may decide, and that results do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fsdp_overlap import FsdpContext
from fsdp_overlap.schedule.interface import ScheduledUnit, UnitIndex, UnitRefs
from fsdp_overlap.schedule.prefetch import Prefetcher
from fsdp_overlap.schedule.scheduler import Schedule


def random_order(seed: int) -> type[Schedule]:
    """Return the class of schedules that gather in the order of ``seed``."""

    def place(unit: UnitIndex) -> float:
        # It follows from what all ranks know. A generator with a state would not do: one rank may
        # ask it more often than another, as where only that one still has a unit gathered.
        return Random(f"{seed} {unit}").random()

    class RandomPrefetcher(Prefetcher):
        """Gathers as many units at once as may exist, and the next ones when these were used."""

        def use(
            self,
            unit: ScheduledUnit,
            upcoming: Sequence[UnitIndex] = (),
            asked: UnitRefs = (),
        ) -> bool:
            waiting = self._ahead.keys() - {unit.index}
            following = [index for index in upcoming if index in waiting or not waiting]
            return super().use(unit, sorted(following, key=place), asked)

    class RandomSchedule(Schedule):
        prefetcher_class = RandomPrefetcher

    return RandomSchedule


def gather_in_random_order(ctx: FsdpContext, seed: int) -> None:
    """Gather units of ``ctx`` in a random order, on every rank with the same ``seed``."""
    if ctx.has_schedule or any(unit.schedule_class is not Schedule for unit in ctx.units):
        raise RuntimeError("call it before the first forward, and on units of one module each")
    schedule_class = random_order(seed)
    for unit in ctx.units:
        unit.schedule_class = schedule_class
