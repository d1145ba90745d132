"""Options of tests that try random cases: how many, and which.

    pytest tests/integration/fuzz/test_fuzz.py --tries 200 --seed 1

Without them such a test tries a few, always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from _pytest.terminal import TerminalReporter

_TRIED = "tried"


@dataclass(frozen=True)
class Tries:
    """What the options say. ``note`` is for what was tried; a line of it is printed at the end."""

    count: int | None
    seed: int | None
    program: str | None
    note: Callable[[str], None]

    @property
    def are_given(self) -> bool:
        return (self.count, self.seed, self.program) != (None, None, None)

    def or_else(self, count: int, seed: int = 0) -> tuple[int, int]:
        """Return how many to try, and the seed: by the options, else those of the test."""
        return (
            count if self.count is None else self.count,
            seed if self.seed is None else self.seed,
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tries", type=int, metavar="N", help="programs, kills, runs or steps to try")
    parser.addoption("--seed", type=int, metavar="N", help="the same one tries the same ones")
    parser.addoption("--program", help="one random program, as printed for one that failed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests take as long as the tries take."""
    if config.getoption("--tries") is not None:
        for item in items:
            if "tries" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.fixture
def tries(pytestconfig: pytest.Config, record_property: Callable[[str, object], None]) -> Tries:
    return Tries(
        pytestconfig.getoption("--tries"),
        pytestconfig.getoption("--seed"),
        pytestconfig.getoption("--program"),
        lambda text: record_property(_TRIED, text),
    )


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--tries") is None and config.getoption("--seed") is None:
        return
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties if report.when == "call" else ():
            if name == _TRIED:
                terminalreporter.write_line(f"{report.nodeid}: {text}")
