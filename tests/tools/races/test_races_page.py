"""The page about races: its program is right, and its edits are found as it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_overlap.tools.races.runner import CLEAN, FOUND
from support.pages import ROOT

PAGE = ROOT / "docs" / "races.md"
SECONDS = 60.0  # for one command


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def look(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp_overlap", "races", "prefetch.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.slow
def test_what_a_reader_leaves_out_is_found(tmp_path: Path) -> None:
    name, _, program = blocks("python")[0].partition("\n")
    assert name == "# prefetch.py"
    file = tmp_path / "prefetch.py"
    file.write_text(program)
    done = look(tmp_path)
    assert (done.returncode, done.stdout) == (CLEAN, ""), done.stderr
    edits = re.findall(r'sed -i "/(\w+)/d" prefetch.py', "".join(blocks("bash")))
    for edit, shown in zip(edits, blocks("text"), strict=True):
        file.write_text("".join(line for line in program.splitlines(True) if edit not in line))
        done = look(tmp_path)
        assert done.returncode == FOUND, done.stderr
        assert done.stdout == shown
