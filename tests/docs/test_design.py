"""The picture of a training step in docs/design.md, and its table, are what the schedule does."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from support.pages import ROOT, rows_of

DESIGN = ROOT / "docs" / "design.md"
SECTION = DESIGN.read_text().partition("## 1. One training step\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def drawing() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "draw" / "step.py"))


def test_the_table_and_the_picture_of_a_step_are_what_the_schedule_does(
    drawing: dict[str, Any],
) -> None:
    hooks, boxes = drawing["record"]()
    rows = [row[:3] for row in rows_of(SECTION) if row[0].isdigit()]
    assert rows == [
        [str(number), hook.name, ", ".join(hook.commands) or "none"]
        for number, hook in enumerate(hooks, 1)
    ]
    picture = DESIGN.parent / "step.svg"
    assert picture.read_text() == drawing["svg"](boxes), "run python scripts/draw/step.py"


def test_the_page_says_what_the_picture_shows(drawing: dict[str, Any]) -> None:
    _, boxes = drawing["record"]()
    busy = [(box.start, box.end) for box in boxes if box.row == "compute"]
    exposed = [
        box.text
        for box in boxes
        if box.text.startswith(("gather", "reduce"))
        and not any(start < box.end and box.start < end for start, end in busy)
    ]
    assert exposed == ["gather 0", "reduce 0"]
    assert "Only gather 0 and reduce 0 are exposed." in SECTION
    inputs = [box for box in boxes if box.row == "reduce inputs"]
    for box in inputs:
        at_once = [other for other in inputs if other.start <= box.start < other.end]
        assert len(at_once) <= 2
