"""What tests of random cases are told by options."""

from __future__ import annotations

import pytest

from support.pages import TESTS

PROGRAM = """
import time

import pytest

@pytest.mark.timeout(1)
def test_random(tries):
    count, seed = tries.or_else(3)
    for _ in range(count):
        time.sleep(0.3)
    tries.note(f"{count} with {seed}")
"""


@pytest.mark.slow
def test_options_say_how_many_and_which_and_lift_the_limit(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    pytester.makepyfile(PROGRAM)
    pytester.makeconftest('pytest_plugins = ["support.tries"]')
    more = pytester.runpytest_subprocess("--tries", "4", "--seed", "7")
    more.assert_outcomes(passed=1)
    more.stdout.fnmatch_lines(["*::test_random: 4 with 7"])
    few = pytester.runpytest_subprocess()
    few.assert_outcomes(passed=1)
    few.stdout.no_fnmatch_line("*3 with 0")
