"""``fsdp-overlap compare`` on a program for FSDP2, with and without faults, and ``diff``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_overlap.tools.cli.compare import _read, diff_recordings
from fsdp_overlap.tools.cli.main import app
from fsdp_overlap.tools.cli.output import BadInput
from fsdp_overlap.tools.comparison.differences import Comparison
from fsdp_overlap.tools.comparison.options import OursOptions
from fsdp_overlap.tools.comparison.program import ProgramRun, RankResult
from fsdp_overlap.tools.comparison.report import CompareReport, Way
from fsdp_overlap.tools.races.runner import Program

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "support" / "compared" / "program.py"


def run(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "fsdp_overlap", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return done.returncode, done.stdout + done.stderr


def compared(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    status, said = run("compare", "--steps", "2", "--out", str(folder), *arguments)
    told = (
        json.loads((folder / "compare.json").read_text())
        if (folder / "compare.json").exists()
        else {}
    )
    return status, said, told


@pytest.mark.slow
def test_a_program_that_computes_the_same(tmp_path: Path) -> None:
    status, said, told = compared(tmp_path, "--ddp", str(PROGRAM), "", "16", "{run}")
    assert status == 0, said
    assert [each["is_equal"] for each in told["against"]] == [True] * 3, told["sentences"]
    assert told["loss_difference"] == 0
    assert "fsdp_overlap beside FSDP2: Equal to the bit" in said
    assert re.search(r"all-gathers, MB +0\.0 in 10 +0\.0 in 8 ", said)
    assert re.search(r"reduce-scatters, MB +0\.0 in 6 +0\.0 in 6 ", said)
    logs = [tmp_path / f"{way}/round-0/rank-0.log" for way in ("fsdp2", "ours")]
    assert [log.read_text().split()[0] for log in logs] == ["fsdp2-0", "ours-0"]
    for way, units in (("fsdp2", {"fsdp2": 3}), ("ours", {"ours": 3}), ("replicated", {})):
        seen = told["ways"][way]
        assert [rank["units"] for rank in seen["ranks"][0]] == [units] * 2
        assert len(seen["step_seconds"]) == 2
        assert len(seen["losses"]) == 7
        assert seen["peak"] > 1 << 20
    assert "overlap.html" in (tmp_path / "compare.html").read_text()

    status, said = run("diff", str(tmp_path / "fsdp2/round-0"), str(tmp_path / "ours/round-0"))
    assert status == 0
    assert "Equal to the bit" in said
    assert "step 1: loss" in said


@pytest.mark.slow
def test_options_and_assertions(tmp_path: Path) -> None:
    options = tmp_path / "ours.toml"
    options.write_text('optimizers = ["AdamW"]\n[context]\nlayout = "Flat"\nprefetch = 0\n')
    status, said, told = compared(
        tmp_path, "--options", str(options), "--assert-loss", "1e-3", "--assert-time", "0",
        str(PROGRAM),
    )  # fmt: skip
    assert told["against"][0]["unexplained"] is None, told["sentences"]
    assert status == 1
    assert "--assert-time 0: a step takes" in said
    assert "--assert-loss" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "step 0, gradient of 1.weight"),
        ("seed", "step 0, input of the model on rank 1"),
    ],
)
def test_a_fault_is_found_and_named(fault: str, said: str, tmp_path: Path) -> None:
    status, _, told = compared(tmp_path, str(PROGRAM), fault)
    assert status == 1
    found = told["against"][0]["unexplained"]
    assert said in found["text"]
    causes = {"missing": "missing contribution", "seed": "other data"}
    assert found["cause"] == causes[fault]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("gpu", "it needs GPUs"),
        ("ranks", "needs another number of --ranks"),
        ("unsharded", "calls no fully_shard()"),
        ("no backward", "ended before a backward"),
        ("raises", "fsdp_overlap failed on rank 0: RuntimeError: a fault in the program"),
    ],
)
def test_a_program_that_cannot_be_compared(fault: str, said: str, tmp_path: Path) -> None:
    status, output, told = compared(tmp_path, str(PROGRAM), fault)
    assert status == 2
    assert said in output
    assert any(said in each for each in told["failures"])


@pytest.mark.slow
def test_a_program_without_an_optimizer(tmp_path: Path) -> None:
    status, output, told = compared(tmp_path, str(PROGRAM), "no step", "1")
    assert status == 0, output
    assert told["against"][0]["is_equal"]
    assert "no torch.optim.Optimizer has stepped" in output


@pytest.mark.slow
def test_a_program_that_ends_early(tmp_path: Path) -> None:
    status, output, told = compared(tmp_path, str(PROGRAM), "", "3")
    assert status == 0, output
    assert "the program ended after 3 of 7 steps" in output
    assert told["time_ratio"] is None


@pytest.mark.slow
def test_a_program_for_gpus_on_emulated_ones(tmp_path: Path) -> None:
    program = PROGRAM.parent.with_name("gpu_programs") / "fsdp2.py"
    status, output, told = compared(tmp_path, "--emulate-gpus", str(program))
    assert status == 0, output
    assert told["against"][0]["is_equal"], told["sentences"]  # with dropout
    assert told["time_ratio"] is None


@pytest.mark.slow
def test_a_prediction_of_both(tmp_path: Path) -> None:
    program = PROGRAM.parent.with_name("gpu_programs") / "llama.py"
    arguments = ["--predict", "h100_sxm", "--gpus", "64", str(program), "meta"]
    status, output, told = compared(tmp_path, *arguments)
    assert status == 0, output
    ratio = told["fsdp_overlap"]["seconds"] / told["FSDP2"]["seconds"]
    assert f"A step takes {ratio:.2f} of FSDP2's time" in output
    assert 0.8 < ratio < 1
    assert (tmp_path / "overlap.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py"], "nothing.py: there is no such file"),
        (["--steps", "0", str(PROGRAM)], "--steps 0"),
        (["--timeout", "0", str(PROGRAM)], "--timeout 0"),
        (["--ranks", "0", str(PROGRAM)], "--ranks 0"),
    ],
)
def test_bad_input(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp-overlap", "compare", *arguments])
    with pytest.raises(BadInput, match=said):
        app(standalone_mode=False)


def _report(*losses: list[list[float]]) -> CompareReport:
    """Return the report of a program with these losses of FSDP2's steps, and of ours."""
    ways = [
        Way(way, [[RankResult(0, units={way: 1}, steps=3, losses=each)]])
        for way, each in zip(("fsdp2", "ours"), losses, strict=True)
    ]
    return CompareReport("train.py", ways)


def test_losses_that_differ_after_what_was_recorded() -> None:
    report = _report([[1.0], [2.0]], [[1.0], [2.5]])
    report.against = [Comparison(("A", "B"), 1, 9, 9, [], None, None, 0)]
    said = "But from step 1 on, which was not recorded, losses differ: record it by --steps 2."
    assert said in report.sentences
    report.ways[1].rounds[0][0].losses = [[1.0], [2.0]]
    assert said not in report.sentences


def test_losses_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    infinite = [[float("-inf")], [float("nan")]]
    _report(infinite, infinite).write(tmp_path)
    text = (tmp_path / "compare.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["ways"]["ours"]["losses"] == [None, None]


def test_a_rank_that_did_not_train_is_named(tmp_path: Path) -> None:
    report = _report([[1.0]], [[1.0]])
    assert not _read(report, tmp_path)
    assert "FSDP2: " in report.failures[0]
    assert "has no recording" in report.failures[0]


def test_folders_stay_where_the_program_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ProgramRun(Program("train.py"), "ours", Path("runs"), 1, 1, 0, 0).write(Path("run.json"))
    assert ProgramRun.read(Path("run.json")).folder == tmp_path / "runs"


def test_a_folder_without_a_recording(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no recording"):
        diff_recordings((tmp_path, tmp_path), None)


def test_options_that_are_not_known(tmp_path: Path) -> None:
    options = tmp_path / "ours.toml"
    for text, said in (
        ("x = 1", "'x' is not known"),
        ('[context]\nlayout = "Round"', "layout = 'Round'; use one of"),
        ('optimizers = ["SGD"]', "'SGD'; optimizers are"),
    ):
        options.write_text(text)
        with pytest.raises(ValueError, match=re.escape(said)):
            OursOptions.read(options)
