"""Remember each test that passes, and leave it out as long as nothing changes.

    pytest -p support.passed --passed FILE --sources KEY

The GPU suite does so. A test passed before if `FILE` has a line with its name, with `KEY`, which
stands for all that it runs on, and with the hash of its own file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.sources import digest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, metavar="FILE")
    parser.addoption("--sources", default="", metavar="KEY")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.passed is not None:
        config.pluginmanager.register(Passed(config), "passed")


class Passed:
    def __init__(self, config: pytest.Config) -> None:
        self.file: Path = config.option.passed
        self.key: str = config.option.sources
        self.root = config.rootpath
        self.before = 0
        self.called: set[str] = set()

    def line(self, nodeid: str) -> str:
        return f"{self.key} {digest(self.root / nodeid.partition('::')[0])} {nodeid}"

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        known = set(self.file.read_text().splitlines()) if self.file.exists() else set()
        left_out = [item for item in items if self.line(item.nodeid) in known]
        self.before = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.called.add(report.nodeid)
        if report.when == "teardown" and report.passed and report.nodeid in self.called:
            with self.file.open("a") as file:  # at once, for the run may be cut short
                file.write(self.line(report.nodeid) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.before:
            terminalreporter.write_line(f"{self.before} passed before")
