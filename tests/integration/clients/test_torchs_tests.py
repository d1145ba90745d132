"""torch's own tests of FSDP2, a few of them, on FSDP2 and on this library in its place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsdp2_test_rank import Outcome
from fsdp2_tests import CACHE, HERE, Known, Row, complaint_of, folder_in, load_known, summary_of

PASSED = Outcome("passed")
FAILED = Outcome("failed", "ValueError: no")
KNOWN = {"a": Known("refused", "ValueError")}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (Row("a", PASSED, FAILED), ""),
        (Row("a", PASSED, Outcome("failed", "KeyError: no")), "a fails otherwise than listed"),
        (Row("a", PASSED, PASSED), "a passes: take it out of the list"),
        (Row("b", PASSED, FAILED), "b fails, and is not listed"),
        (Row("b", PASSED, PASSED), ""),
        (Row("b", FAILED, FAILED), ""),
    ],
)
def test_what_is_not_as_listed_is_told(row: Row, complaint: str) -> None:
    assert complaint_of(row, KNOWN).startswith(complaint)
    assert bool(complaint_of(row, KNOWN)) == bool(complaint)


def test_the_summary_counts_what_fsdp2_passes() -> None:
    bypassed = Outcome("passed", bypassed=True)
    rows = [Row("a", PASSED, FAILED), Row("b", PASSED, bypassed), Row("c", FAILED, PASSED)]
    first, second, *_ = summary_of(rows, KNOWN).splitlines()
    assert "3 tests. FSDP2 passes 2" in first
    assert "library passes 1, 1 of them without a call" in first
    assert second.split() == ["1", "refused"]


def test_the_list_says_for_each_test_why_it_fails() -> None:
    for known in load_known(HERE / "fsdp2_tests.toml").values():
        assert known.why
        assert known.error


@pytest.mark.slow
def test_a_few_of_torchs_tests_end_as_listed() -> None:
    if not folder_in(CACHE).exists():
        pytest.skip("torch's tests are not there: `scripts/clients/fsdp2_tests.py` fetches them")
    few = "clip_grad_norm_1d|test_fully_shard_state|dim0|post_optim_event$|shard_tensor_parameters"
    ended = subprocess.run(
        [sys.executable, str(HERE / "fsdp2_tests.py"), f"--only={few}"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "FSDP2 passes 13" in ended.stdout
