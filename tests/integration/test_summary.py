"""What is printed behind the results of tests."""

from __future__ import annotations

import pytest

from support.pages import TESTS
from support.summary import room_of


@pytest.mark.parametrize(
    ("file", "room"),
    [
        ("tests/engine/test_hooks.py", "engine"),
        ("tests/tools/races/test_rules.py", "tools/races"),
        ("tests/checkpoint/hostile/test_code.py", "checkpoint"),
        ("tests/test_torch_internals.py", "."),
    ],
)
def test_a_room_is_a_folder(file: str, room: str) -> None:
    assert room_of(f"{file}::test_it[a/b]") == room


@pytest.mark.slow
def test_rooms_have_their_time_and_failures_their_command(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    pytester.makeconftest('pytest_plugins = ["support.summary"]')
    for room in ("engine", "comm"):
        folder = pytester.path / "tests" / room
        folder.mkdir(parents=True)
        (folder / f"test_{room}.py").write_text(
            "import pytest, time\n"
            '@pytest.mark.parametrize("name", ["a b", "c"])\n'
            "def test_it(name):\n"
            f"    time.sleep(0.6 if {room!r} == 'comm' else 0)\n"
            '    assert name == "c"\n'
        )
    lines = pytester.runpytest_subprocess("--rooms").outlines
    assert [line.split() for line in lines if line.startswith("| ")][1:] == [
        ["|", "comm", "|", "2", "|", "1", "|"],
        ["|", "engine", "|", "2", "|", "0", "|"],
        ["|", "all", "|", "4", "|", "1", "|"],
    ]
    assert lines[-3:-1] == [
        f"to see it alone: scripts/test.sh 'tests/{room}/test_{room}.py::test_it[a b]'"
        for room in ("comm", "engine")
    ]
    assert "to see" not in pytester.runpytest_subprocess("-k", "c]").stdout.str()
