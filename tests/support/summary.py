"""Print behind the tests' results how long each room took, with ``--rooms``, and how to run each
test that failed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from shlex import quote

import pytest
from _pytest.terminal import TerminalReporter

AT_MOST = 20
"""How many failed tests are shown."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rooms", action="store_true", help="print the time of each folder of tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: TerminalReporter, config: pytest.Config
) -> Generator[None]:
    yield  # pytest's own summary comes first
    if config.getoption("--rooms"):
        reports = [report for each in terminalreporter.stats.values() for report in each]
        terminalreporter.section("seconds of workers by room")
        for line in rooms_of(report for report in reports if isinstance(report, pytest.TestReport)):
            terminalreporter.write_line(line)
    failed = [
        report.nodeid
        for outcome in ("failed", "error")
        for report in terminalreporter.stats.get(outcome, [])
    ]
    for nodeid in dict.fromkeys(failed[:AT_MOST]):
        terminalreporter.write_line(f"to see it alone: scripts/test.sh {quote(nodeid)}")


def rooms_of(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return the rows of a Markdown table: each room, its tests and the seconds they took."""
    tests, seconds = Counter[str](), Counter[str]()
    for report in reports:
        room = room_of(report.nodeid)
        tests[room] += report.when == "call"
        seconds[room] += report.duration
    width = max(map(len, seconds), default=4)
    return [
        f"| {'room':{width}} | tests | seconds |",
        f"|{'-' * (width + 2)}|------:|--------:|",
        *(f"| {at:{width}} | {tests[at]:5} | {seconds[at]:7.0f} |" for at in sorted(seconds)),
        f"| {'all':{width}} | {tests.total():5} | {seconds.total():7.0f} |",
    ]


def room_of(nodeid: str) -> str:
    """Return the folder of a test: that in ``tests``, or within a room of rooms."""
    folders = nodeid.partition("::")[0].split("/")[1:-1]
    return "/".join(folders[: 2 if folders[:1] in (["tools"], ["integration"]) else 1]) or "."
