"""`fsdp-overlap report` from outside."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_overlap.cli import main
from fsdp_overlap.profiling import Report
from fsdp_overlap.profiling.tables import kinds_table
from support.traces import Step, read, trace_of


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """As `train` leaves it: a trace of each of two ranks."""
    folder = tmp_path / "run"
    (folder / "traces").mkdir(parents=True)
    for rank in range(2):
        with gzip.open(folder / "traces" / f"rank-{rank}.json.gz", "wt") as file:
            json.dump(trace_of(*Step().events, rank=rank), file)
    return folder


def report(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["fsdp-overlap", "report", *map(str, arguments)])
    try:
        return main.run()
    except SystemExit as end:
        return int(end.code or 0)


def test_a_run_is_reported(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(monkeypatch, run_folder) == 0
    out = capsys.readouterr().out
    assert "rank 0" in out
    assert "rank 1" in out
    assert "3 of 4" in out
    assert "nothing to run under" in out
    assert (run_folder / "overlap.html").exists()
    assert (run_folder / "overlap.png").exists()
    record = json.loads((run_folder / "overlap.json").read_text())
    assert [rank["rank"] for rank in record["runs"]["run"]["ranks"]] == [0, 1]


def test_two_runs_are_reported_side_by_side(
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(trace_of(*Step(prefetch=0).events)))
    out = tmp_path / "both"
    assert report(monkeypatch, run_folder, "--against", other, "--out", out) == 0
    shown = capsys.readouterr().out
    assert "run:" in shown
    assert "other:" in shown
    assert "3 of 3 forward all-gathers are waited for as soon as they are issued" in shown
    assert list(json.loads((out / "overlap.json").read_text())["runs"]) == ["run", "other"]


def test_the_table_of_kinds_has_bytes_and_names_each_kind_once() -> None:
    """Also where the first run has none of a kind, as one that keeps parameters for backward."""
    rank = read(*Step().events)
    sizes = {"all_gather": 50_000, "reduce_scatter": None}
    each = tuple(replace(c, nbytes=sizes[c.kind]) for c in rank.collectives)
    plain = replace(rank, collectives=each)
    kept = replace(rank, collectives=tuple(c for c in each if c.pass_ == "forward"))
    table = kinds_table({"kept": Report((kept,)), "plain": Report((plain,))})
    shown = [(label, who, megabytes) for label, who, _, megabytes, *_ in table.rows]
    assert table.header[3] == "MB"
    assert shown == [
        ("forward all-gathers", "kept rank", "0.20"),
        ("", "plain rank", "0.20"),
        ("backward all-gathers", "plain rank", "0.15"),
        ("reduce-scatters", "plain rank", "-"),
    ]


def test_a_report_may_be_made_again_where_it_lies(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = run_folder / "traces"
    assert report(monkeypatch, traces) == 0
    assert report(monkeypatch, traces) == 0


def test_a_job_that_runs_is_reported_again_when_it_has_written_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not while a file is written, and no trace, half a trace or the same ones are no end."""
    traces = tmp_path / "run" / "traces"
    page = tmp_path / "run" / "overlap.html"
    pages: list[float | None] = []
    whole = json.dumps(trace_of(*Step().events))

    def write(text: str) -> None:
        (traces / "rank-0.json").write_text(text)

    def end() -> None:
        raise KeyboardInterrupt

    def nothing() -> None:
        pass

    # After each look; a first trace is seen in the second, and reported in the third.
    happens = iter(
        [
            lambda: write(whole[:100]),
            nothing,
            lambda: write(whole),
            nothing,
            nothing,
            lambda: write(json.dumps(trace_of(*Step(prefetch=0).events))),
            nothing,
            end,
        ]
    )

    def look_again(seconds: float) -> None:
        pages.append(page.stat().st_mtime_ns if page.exists() else None)
        next(happens)()

    monkeypatch.setattr("fsdp_overlap.cli.report.time.sleep", look_again)
    traces.mkdir(parents=True)
    assert report(monkeypatch, tmp_path / "run", "--watch") == 0
    first, second = pages[4], pages[7]
    assert pages == [None, None, None, None, first, first, first, second]
    assert first is not None
    assert second not in (None, first)
    shown = capsys.readouterr()
    assert shown.err.count("not reported: ") == 1
    assert "rank-0.json" in shown.err
    assert shown.out.count("overlap.html") == 2


def test_a_path_that_is_not_there_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(monkeypatch, tmp_path / "rnu", "--watch") == 2
    assert "rnu: no such file or folder" in capsys.readouterr().err


def test_what_cannot_be_reported_is_refused_before_anything_is_written(
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refusal(*arguments: Any) -> str:
        assert report(monkeypatch, *arguments, "--out", tmp_path / "out") == 2
        return capsys.readouterr().err

    no_trace = tmp_path / "no_trace.json"
    no_trace.write_text("[]")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.json").write_text(json.dumps(trace_of()))
    one = run_folder / "traces" / "rank-0.json.gz"
    assert "no such file or folder" in refusal(tmp_path / "nowhere.json")
    assert "holds no trace" in refusal(tmp_path / "empty")
    assert "not a Chrome trace" in refusal(no_trace)
    assert "holds no collective and no compute" in refusal(tmp_path / "empty.json")
    assert "that is the same run" in refusal(run_folder, "--against", run_folder)
    assert "both of rank 0" in refusal(one, one)
    assert "--steps 0: must be at least 1" in refusal(run_folder, "--steps", "0")
    assert not (tmp_path / "out").exists()
