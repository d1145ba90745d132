"""The short run has what it says, and the same in every run."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.pages import TESTS
from support.short import covering

PROGRAM = """
import pytest

def test_ordinary(): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", range(9))
def test_sampled(n): ...

@pytest.mark.pairs
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("c", "xyz")
def test_pairs(a, b, c): ...

@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.gpu) for n in (2, 3))])
def test_gpu(n): ...

@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sampled_of_those_that_are_not_slow(n): ...
"""


def pairs_in(cases: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_pairs_are_all_there_in_fewer_cases(sizes: list[int]) -> None:
    cases = [*product(*map(range, sizes))]
    chosen = covering(cases, lambda case: {str(at): place for at, place in enumerate(case)}, str)
    assert pairs_in(chosen) == pairs_in(cases)
    assert len(chosen) <= len(cases)
    if len(sizes) == 4 and min(sizes) >= 3:
        assert len(chosen) < len(cases) / 2


@pytest.mark.slow
def test_the_short_run_leaves_out_what_marks_say(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    pytester.makepyfile(PROGRAM)
    pytester.makeconftest('pytest_plugins = ["support.short"]')

    def names(*options: str) -> list[str]:
        ran = pytester.runpytest_subprocess("--collect-only", "-q", *options)
        return [line.partition("::")[2] for line in ran.outlines if "::" in line]

    assert len(names()) == 1 + 1 + 9 + 18 + 3 + 2
    short = names("--short")
    assert short == names("--short")
    counts = {name: sum(each.startswith(name) for each in short) for name in COUNTS}
    assert counts == COUNTS


COUNTS = {"test_ordinary": 1, "test_slow": 0, "test_sampled[": 3, "test_pairs[": 9} | {
    "test_gpu[": 3,
    "test_sampled_of_those_that_are_not_slow[": 1,
}
