"""The examples in the documents run."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from program import Program
from ranks import run_ranks
from test_fsdp2_table import named_tests_in, rows_of

DOCS = Path(__file__).parents[1] / "docs"


def blocks_of(page: Path, language: str) -> list[str]:
    """The page's examples, each padded so that its line numbers are the page's."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]
    assert blocks
    assert len(blocks) == text.count(f"```{language}")
    return blocks


def run_blocks(blocks: list[str], name: str) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)


@pytest.mark.parametrize(
    "page",
    [
        "sharded_tensors.md",
        "checkpoints.md",
        "layouts.md",
        "muon.md",
        "modelled_device.md",
    ],
)
def test_the_python_examples_run(page: str) -> None:
    run_ranks(run_blocks, 2, blocks_of(DOCS / page, "python"), page)


def run_blocks_in(folder: str, blocks: list[str], name: str) -> None:
    with contextlib.chdir(folder):
        run_blocks(blocks, name)


def test_the_examples_on_overlap_run(tmp_path: Path) -> None:
    page = DOCS / "overlap.md"
    run_ranks(run_blocks_in, 2, str(tmp_path), blocks_of(page, "python"), page.name)
    run_commands(page, tmp_path)
    assert (tmp_path / "overlap.html").exists()
    assert (tmp_path / "both" / "overlap.json").exists()


def run_commands(page: Path, folder: Path) -> None:
    """The page's commands, of fsdp-overlap all."""
    for line in "".join(blocks_of(page, "bash")).split("\n"):
        if not line:
            continue
        program, *arguments = shlex.split(line)
        assert program == "fsdp-overlap"
        process = Program(folder, arguments)
        _, err = process.communicate(timeout=150)
        assert process.returncode == 0, err


@pytest.mark.slow
def test_the_commands_on_checkpoints_run(tmp_path: Path) -> None:
    run_commands(DOCS / "checkpoints.md", tmp_path)
    assert (tmp_path / "small.pt").exists()
    assert (tmp_path / "small.safetensors").exists()


def test_the_formulas_of_memory_are_what_ranks_allocate() -> None:
    script = DOCS.parent / "scripts" / "draw" / "memory.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_fault_names_tests_that_exist() -> None:
    faults, heading, _ = (DOCS / "robustness.md").read_text().partition("## Random programs")
    assert heading
    for row in rows_of(faults):
        assert named_tests_in(row[-1]), row[0]
