"""Choose the tests of the short run, ``pytest --short``. Without the option all tests run.

The short run leaves out tests marked ``slow``. Of a test marked ``sampled(n)`` it runs one case in
``n``, and of one marked ``pairs`` the fewest cases in which every pair of values of its parameters
occurs. Which cases these are depends on their names alone, so that every worker and every run has
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")

Pair = tuple[tuple[str, int], ...]
"""Two parameters and the places of their values among all values; one if a test has no other."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help="leave out what takes long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--short"):
        return
    kept = {*of_short_run(items)}
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def of_short_run(items: Iterable[pytest.Item]) -> Iterable[pytest.Item]:
    """Return those of ``items`` that the short run has."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one in cases.values():
        # Those for a GPU are skipped without one, and would be chosen in place of others.
        yield from (item for item in of_one if item.get_closest_marker("gpu") is not None)
        ordinary = [
            item
            for item in of_one
            if all(item.get_closest_marker(mark) is None for mark in ("gpu", "slow"))
        ]
        if not ordinary:
            continue
        sampled = ordinary[0].get_closest_marker("sampled")
        if ordinary[0].get_closest_marker("pairs") is not None:
            yield from covering(ordinary, parameters_of, name_of)
        elif sampled is not None:
            count = -(-len(ordinary) // sampled.args[0])
            yield from covering(ordinary, parameters_of, name_of, count)
        else:
            yield from ordinary


def name_of(item: pytest.Item) -> str:
    return item.nodeid


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def covering(
    cases: Sequence[T],
    parameters: Callable[[T], Mapping[str, Any]],
    name: Callable[[T], str],
    count: int | None = None,
) -> list[T]:
    """Return ``count`` of ``cases``, each with the most pairs of values that none before has. By
    default as many as all pairs take. A hash of names decides between equals."""
    pairs = pairs_of([parameters(case) for case in cases])
    left = sorted(range(len(cases)), key=lambda case: crc32(name(cases[case]).encode()))
    chosen: list[int] = []
    missing = set().union(*pairs)
    while left and (missing if count is None else len(chosen) < count):
        best = max(left, key=lambda case: len(pairs[case] & missing))
        left.remove(best)
        chosen.append(best)
        missing -= pairs[best]
    return [cases[case] for case in sorted(chosen)]


def pairs_of(cases: Sequence[Mapping[str, Any]]) -> list[set[Pair]]:
    """Return the pairs of values that each case has, by their places."""
    seen: dict[str, list[Any]] = {}
    placed = []
    for case in cases:
        places = {}
        for parameter, value in sorted(case.items(), key=lambda each: each[0]):
            values = seen.setdefault(parameter, [])
            place = next((at for at, other in enumerate(values) if _is_same(value, other)), None)
            if place is None:
                place = len(values)
                values.append(value)
            places[parameter] = place
        placed.append(places)
    return [set(combinations(places.items(), min(2, len(places)))) for places in placed]


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two cases have the same value. Values need not be comparable."""
    plain = bool | int | float | str | None
    return value is other or (
        isinstance(value, plain) and type(value) is type(other) and value == other
    )
