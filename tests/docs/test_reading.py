"""The plain path stays small: `scripts/reading.py` measures what a plain run enters and loads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdp_overlap.torch_internals import refuse_access
from support.pages import ROOT, linked_code_in

LIMITS = {
    "plain run, code lines": 2851,
    "plain run, files": 23,
    "steady forward and backward, code lines": 1029,
    "steady forward and backward, files": 12,
    "fully_shard, code lines": 844,
    "fully_shard, files": 10,
    "loaded by the import, code lines": 7596,
    "loaded by the import, files": 42,
    "Python calls a unit and steady step": 130,
    "branches of Schedule.after_forward": 11,
    "branches of hooks.after_forward": 12,
    "files of the core that name a feature": 0,
}
"""At most. Lower them with the figures; whoever raises one says why."""
LATER = {
    "plain run, code lines": 16,
    "steady forward and backward, code lines": 10,
    "fully_shard, code lines": 6,
    "fully_shard, files": 1,
    "Python calls a unit and steady step": 3,
}
"""More where torch can refuse accesses to freed memory, as from 2.15 on, and keeps a grad_dtype."""


def problems_of(measured: dict[str, Any], limits: dict[str, int]) -> list[str]:
    figures = measured["figures"]
    assert figures.keys() == limits.keys()
    return [
        *(
            f"{name}: {figures[name]}, at most {limit} (see scripts/reading.py --files)"
            for name, limit in limits.items()
            if figures[name] > limit
        ),
        *(f"a plain run enters a feature, {chain}" for chain in measured["features"]),
        *(f"the core imports a feature: {place}" for place in measured["imports"]),
    ]


def plant(root: Path) -> int:
    """Copy the package, and call a feature from a hook there. Return the line of its import."""
    package = root / "fsdp_overlap"
    shutil.copytree(ROOT / "fsdp_overlap", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "features").mkdir(exist_ok=True)
    (package / "features" / "toy.py").write_text("def count():\n    return 1\n")
    hooks = package / "engine" / "hooks.py"
    text = hooks.read_text()
    begins = re.search(r"^def after_forward\((?:.|\n)*?:\n(?=    )", text, re.MULTILINE)
    assert begins is not None
    planted = "    from fsdp_overlap.features.toy import count\n    count()\n"
    hooks.write_text(text[: begins.end()] + planted + text[begins.end() :])
    return text.count("\n", 0, begins.end()) + 1


@dataclass
class Readings:
    ours: dict[str, Any]
    planted: dict[str, Any]
    line: int


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> Readings:
    """What the script measures of the package, and of one with a feature in the plain path."""
    folder = tmp_path_factory.mktemp("reading")
    line = plant(folder / "planted")
    out = folder / "reading.json"
    script = ROOT / "scripts" / "reading.py"
    command = [sys.executable, script, "--json", out, "--beside", folder / "planted"]
    subprocess.run(command, check=True, timeout=150)
    return Readings(*json.loads(out.read_text()), line)


@pytest.mark.slow
def test_the_plain_path_stays_small_and_enters_no_feature(readings: Readings) -> None:
    later = LATER if refuse_access is not None else {}
    limits = {name: limit + later.get(name, 0) for name, limit in LIMITS.items()}
    if problems := problems_of(readings.ours, limits):
        pytest.fail("\n".join(problems), pytrace=False)


def test_a_feature_in_the_plain_path_is_found_with_the_calls_that_lead_there(
    readings: Readings,
) -> None:
    before, line = readings.ours["figures"], readings.line
    problems = problems_of(readings.planted, before)
    lines, steady = "code lines", "steady forward and backward"
    grown = before[f"{steady}, {lines}"] + 4
    imported = f"engine/hooks.py:{line} after_forward > features/toy.py:1 <module>"
    called = f"engine/hooks.py:{line + 1} after_forward > features/toy.py:1 count"
    assert any(problem.startswith(f"{steady}, {lines}: {grown}, at most") for problem in problems)
    assert f"a plain run enters a feature, plain run: {imported}" in problems
    assert f"a plain run enters a feature, {steady}: {called}" in problems
    assert f"the core imports a feature: engine/hooks.py:{line}" in problems


# ---- docs/design.md, "One step, line by line" ----

STEP = (ROOT / "docs" / "design.md").read_text().partition("\n### One step, line by line\n")[2]
STEP = STEP.partition("\n## ")[0]


def problems_of_page(page: str, entered: dict[str, list[str]]) -> list[str]:
    """Return which files a steady step enters that ``page`` does not link, and which functions it
    links that no steady step enters."""
    linked = linked_code_in(page)
    files = {file for file, functions in entered.items() if functions}
    missing = files - {file for file, _ in linked}
    return [
        *(f"a steady step enters {file}, which is not linked" for file in sorted(missing)),
        *(
            f"no steady step enters {name} of {file}"
            for file, name in linked
            if not name.rpartition(".")[2][0].isupper() and name not in entered.get(file, ())
        ),
    ]


def test_a_step_line_by_line_goes_through_all_that_a_steady_step_enters(
    readings: Readings,
) -> None:
    entered = readings.ours["functions"]["steady forward and backward"]
    if problems := problems_of_page(STEP, entered):
        pytest.fail("\n".join(problems), pytrace=False)
    assert len(STEP.split()) <= 500


def test_files_and_functions_that_the_page_has_wrong_are_found() -> None:
    page = "[`f`](../fsdp_overlap/engine/a.py), [`C`](../fsdp_overlap/engine/a.py)"
    assert not problems_of_page(page, {"engine/a.py": ["f"], "engine/b.py": []})
    assert problems_of_page(page, {"engine/a.py": ["C.f"], "engine/b.py": ["g"]}) == [
        "a steady step enters engine/b.py, which is not linked",
        "no steady step enters f of engine/a.py",
    ]
