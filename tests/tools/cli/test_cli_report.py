"""`fsdp-overlap report` from outside."""

from __future__ import annotations

import gzip
import json
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_overlap.tools.cli import main
from fsdp_overlap.tools.cli.model import GPT
from fsdp_overlap.tools.profiling import Report
from fsdp_overlap.tools.profiling.tables import kinds_table
from support.cli_runs import export, run_main
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

    monkeypatch.setattr("fsdp_overlap.tools.cli.report.time.sleep", look_again)
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


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may have more than 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkpoint of a bare state dict, as of a model whose names begin with "model."."""
    weights = {"model.embed.weight": torch.ones(1000), "head.weight": torch.zeros(2)}
    with warnings.catch_warnings(action="ignore"):
        dcp.save({**weights, "step": 3}, checkpoint_id=tmp_path / "bare", no_dist=True)
    return tmp_path / "bare"


def test_where_nothing_can_be_written_nothing_is(
    run_folder: Path,
    bare: Path,
    tmp_path: Path,
    full_disk: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "overlap.html").write_text("of before")
    assert report(monkeypatch, run_folder, "--out", out) == 2
    shown = capsys.readouterr()
    assert f"error: {out}: cannot write there: File too large\n" in shown.err
    assert "rank 0" in shown.out  # what was found is not lost
    for name in ("model.pt", "model.safetensors"):
        assert export(bare, out / name) == 2
        assert "File too large" in capsys.readouterr().err
    assert run_main("simulate", f"{__name__}:tiny", "--sequence", "16", "--out", str(out)) == 2
    assert "File too large" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["overlap.html"]
    assert (out / "overlap.html").read_text() == "of before"


def tiny() -> nn.Module:
    return GPT(layers=2, width=16, heads=2)


def test_a_folder_that_cannot_be_written_to_is_said_first(
    run_folder: Path,
    bare: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below", Path("/proc/nothing")):
        assert report(monkeypatch, run_folder, "--out", folder) == 2
        assert run_main("simulate", f"{__name__}:tiny", "--out", str(folder)) == 2
        assert export(bare, folder / "model.pt") == 2
        error = capsys.readouterr().err
        assert error.count(f"error: {folder} is not a folder to write to") == 3, error
        assert error.count("\n") == 3, error


def test_a_bare_state_dict_is_exported_whole(bare: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    assert export(bare, out) == 0
    assert torch.load(out, weights_only=True).keys() == {"model.embed.weight", "head.weight"}
    out.unlink()
    assert export(bare, out, "--prefix", "model") == 0
    assert torch.load(out, weights_only=True).keys() == {"embed.weight"}
    nested = {"model": {"model.w": torch.ones(2)}, "optimizer": {"w": torch.ones(2)}}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(nested, checkpoint_id=tmp_path / "nested", no_dist=True)
    out.unlink()
    assert export(tmp_path / "nested", out) == 0
    assert torch.load(out, weights_only=True).keys() == {"model.w"}
