"""A small, fixed number of the random programs that ``scripts/fuzz.py`` tries."""

from __future__ import annotations

from collections import Counter

from fuzz import OPERATIONS, SEEN, Program, programs, run_on_ranks
from hypothesis import HealthCheck, given, seed, settings


def test_random_programs_do_what_they_do_without_sharding() -> None:
    """And every kind of operation was among them, and did something."""
    done: Counter[str] = Counter()

    @seed(0)
    @settings(
        max_examples=60,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def try_one(program: Program) -> None:
        done.update(run_on_ranks(program))

    try_one()
    wanted = {kind.__name__ for kind in OPERATIONS} | SEEN
    assert not wanted - {name for name, count in done.items() if count}
