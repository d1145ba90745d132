"""`scripts/bench/curves.py`: which ways of training are equal to the bit, and the page on them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import curves
import losses
from support.pages import ROOT
from support.ranks import run_ranks

SMALL = "--steps 3 --layers 2 --width 32 --heads 2 --batch-size 2 --seq-len 16 --seeds 0".split()


def train_each(folder: str) -> None:
    args = curves.OPTIONS.parse_args(SMALL)
    for name in curves.VARIANTS:
        run = curves.Run(args, name, 0)
        found = run.train()
        if run.is_shown:
            (Path(folder) / f"{name}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_twins_are_equal_to_the_bit(tmp_path: Path) -> None:
    run_ranks(train_each, 2, str(tmp_path))
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in curves.VARIANTS}
    for name, variant in curves.VARIANTS.items():
        if variant.twin and variant.is_equal:
            assert found[name] == found[variant.twin], name


def run(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, "scripts/bench/curves.py", *SMALL, *options]
    command += ["--folder", str(folder), "--json", str(folder / "all.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stderr, json.loads((folder / "all.json").read_text())


@pytest.mark.slow
def test_runs_are_kept_and_not_repeated(tmp_path: Path) -> None:
    log, first = run(tmp_path, "--variants", "unsharded", "unsharded, clipped")
    assert "unsharded, seed 0: step 3" in log
    log, again = run(tmp_path, "--variants", "unsharded")
    assert "step" not in log
    assert again == first
    assert [each["variant"] for each in again["runs"]] == ["unsharded", "unsharded, clipped"]


def test_the_page_has_the_losses_that_were_found() -> None:
    found = json.loads(losses.FOUND.read_text())
    assert losses.PAGE.read_text() == losses.page_of(found)
    drawing = (losses.DOCS / "curves.svg").read_text()
    for names in losses.lines_of(found).values():
        assert re.search(re.escape(" = ".join(names)), drawing)
