"""A program ends normally whenever it ends: ``--tries 50`` runs it as often."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.ending import RANKS
from support.pages import ROOT, TESTS
from support.tries import Tries


@pytest.mark.slow
def test_a_program_that_trains_and_destroys_its_group_ends_normally(
    tries: Tries, tmp_path: Path
) -> None:
    runs, _ = tries.or_else(1)
    wrong = [said for run in range(runs) for said in complaints_of(tmp_path / str(run))]
    assert not wrong, "\n".join([f"of {runs} runs:", *wrong])
    tries.note(f"{runs} of {runs} runs ended with 0")


def complaints_of(store: Path) -> list[str]:
    """Run the program, in interpreters of its own. Return what ranks that do not end with 0 say."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "support.ending", str(store), str(rank)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=150)[1] for process in ranks]
    return [
        f"{store.name}: rank {rank} ended with {process.returncode}: {text.strip()}"
        for rank, (process, text) in enumerate(zip(ranks, said, strict=True))
        if process.returncode
    ]
