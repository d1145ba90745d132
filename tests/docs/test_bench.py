"""`scripts/bench/all.py`: what it makes of benchmarks' files, and that real ones run under it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.distributed.tensor.debug import CommDebugMode

import all as running
import link
import results
from all import bench
from fsdp_overlap.tools.cli import main
from harness import link_training
from harness.benchmarks import Benchmark
from harness.measurement import (
    Claim,
    Figure,
    Measurement,
    Ratio,
    Spread,
    Sweep,
    number,
    read_measurement,
)
from harness.plot import plot
from harness.summary import SWEPT, not_met, read_summary, rows_of
from support.pages import ROOT
from support.ranks import run_ranks

SCRIPTS = ROOT / "scripts" / "bench"
# Ours got slower from round to round, as FSDP2 did: 0.5, 0.5 and 0.8 of it.
ROUNDS = {"ours": [1.0, 2.0, 8.0], "FSDP2": [2.0, 4.0, 10.0]}


def measured(at_most: float | None, claims: Sequence[Claim] = ()) -> Measurement:
    return Measurement(
        "two systems, three rounds",
        {"ranks": 2},
        ["scripts/bench/one.py", "--rounds", "3"],
        [Figure("step", name, "ms", Spread.of(values)) for name, values in ROUNDS.items()],
        [Ratio.between("step", "ours", "FSDP2", ROUNDS, at_most=at_most)],
        list(claims),
    )


def fake(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: Measurement | str
) -> dict[str, Any]:
    """Runs benchmarks that write the given measurements, or are the given programs, in a repository
    of their own; the summary and whether all was well."""
    scripts = folder / "scripts" / "bench"
    scripts.mkdir(parents=True)
    benchmarks = []
    for name, program in programs.items():
        if isinstance(program, Measurement):
            program.write(scripts / f"{name}.json")
            program = (
                "import shutil, sys; "
                f"shutil.copy('scripts/bench/{name}.json', sys.argv[sys.argv.index('--json') + 1])"
            )
        (scripts / f"{name}.py").write_text(program)
        benchmarks.append(Benchmark(name, f"{name}.py", "--rounds 9", "--rounds 3"))
    monkeypatch.setattr(running, "BENCHMARKS", tuple(benchmarks))
    is_good = bench([], folder / "out", quick=True, repository=folder)
    return {**json.loads((folder / "out" / "summary.json").read_text()), "is_good": is_good}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["all.py", *map(str, arguments)])
    try:
        running.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_ratio_is_the_median_of_the_ratios_of_rounds() -> None:
    [row] = rows_of("one", measured(0.6))
    assert row.ratio == Spread(0.5, 0.5, 0.8, 3)
    assert (row.ours, row.other, row.unit) == (2.0, 4.0, "ms")


def test_a_measurement_is_read_as_it_was_written(tmp_path: Path) -> None:
    measurement = measured(0.5, [Claim("memory is flat", True, "+0.1 MiB")])
    measurement = replace(measurement, sweep=Sweep("blocks"))
    measurement.write(tmp_path / "one.json")
    assert read_measurement(tmp_path / "one.json") == measurement


def test_something_else_than_a_measurement_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"about": ""}')
    with pytest.raises(ValueError, match="is not what a benchmark wrote"):
        read_measurement(tmp_path / "one.json")


def test_a_target_of_a_figure_is_told_beside_its_ratio() -> None:
    measurement = measured(None)
    ours, theirs = measurement.figures
    [row] = rows_of("one", replace(measurement, figures=[replace(ours, at_most=1.5), theirs]))
    assert (row.ratio, row.target, row.is_met) == (Spread(0.5, 0.5, 0.8, 3), "1.5 ms", False)


def test_a_target_of_a_figure_without_a_ratio_is_a_row() -> None:
    measurement = measured(0.6)
    ours, theirs = measurement.figures
    rows = rows_of("one", replace(measurement, figures=[ours, replace(theirs, at_most=4.0)]))
    assert [row.compared for row in rows] == ["step: ours / FSDP2", "step: FSDP2"]
    assert (rows[1].ours, rows[1].target, rows[1].is_met) == (4.0, "4 ms", True)


def test_whatever_is_not_met_is_listed_with_what_was_found() -> None:
    measurement = measured(0.4)
    ours, theirs = measurement.figures
    rows = rows_of("one", replace(measurement, figures=[ours, replace(theirs, at_most=3.5)]))
    of_ours = replace(measured(None), figures=[replace(ours, at_most=1.5), theirs])
    rows += rows_of("two", of_ours)
    rows += rows_of("three", measured(0.5, [Claim("ranks agree", True, "6 losses")]))
    assert not_met(rows) == [
        "one: step: ours / FSDP2: 0.500, at most 0.4",
        "one: step: FSDP2: 4 ms, at most 3.5 ms",
        "two: step: ours / FSDP2: 2 ms, at most 1.5 ms",
    ]


@pytest.mark.parametrize(
    ("rate", "target"), [("2gbit", 0.87), ("500mbit", 0.87), ("10gbit", 1.0), (None, 1.0)]
)
def test_training_has_a_target_for_what_overlap_gains(
    rate: str | None, target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = ["--no-limit"] if rate is None else ["--rate", rate]
    monkeypatch.setattr(sys, "argv", ["link.py", "--optimizer", "muon", *limit])
    args = link.OPTIONS.parse_args()
    samples = {link.ON: [9.0], link.OFF: [10.0], link.FSDP2: [20.0]}
    found = link.report(args, samples).measurement(args)
    [row] = [row for row in rows_of("training", found) if row.target]
    assert row.compared == "step: ours, overlap on / ours, overlap off"
    assert (row.target, row.is_met) == (f"{target:g}", target >= 0.9)


def fsdp2_with_our_collectives() -> None:
    args = argparse.Namespace(blocks=1, sleep=0.0)
    gradients = []
    for with_ours in (False, True):
        model = link_training.shard_fsdp2(args, with_our_collectives=with_ours)
        with CommDebugMode() as called:
            model(link_training.make_batch(64)).square().mean().backward()
        names = {str(op).split(".")[1] for op in called.get_comm_counts()}
        assert ("broadcast_" in names) == with_ours, names
        assert ("_allgather_base_" in names) != with_ours, names
        gradients.append([p.grad.to_local() for p in model.parameters()])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_fsdp2_with_our_collectives_computes_the_same_gradients() -> None:
    run_ranks(fsdp2_with_our_collectives, 2)


@pytest.mark.parametrize(
    ("value", "shown"), [(1268.4, "1268"), (32.14, "32.1"), (1.0234, "1.023"), (432.0, "432")]
)
def test_numbers_keep_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_met_and_missed_targets_are_told_and_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = fake(tmp_path, monkeypatch, met=measured(0.5), missed=measured(0.49))
    assert summary["is_good"]
    assert [row["is_met"] for row in summary["rows"]] == [True, False]
    assert summary["rows"][0]["command"] == "python scripts/bench/one.py --rounds 3"
    assert summary["quick"] is True
    assert summary["cores"] >= 1
    table = (tmp_path / "out" / "summary.md").read_text()
    assert table.startswith("a quick run")
    _, _, missed = table.partition("**missed**: `python scripts/bench/one.py --rounds 3`\n")
    assert "\n| ours / FSDP2 | 2, 4 ms | 0.500 (0.500-0.800) | 0.49, missed |\n" in missed
    shown = capsys.readouterr().out
    assert "0.500 (0.500-0.800)" in shown
    line = "missed: step: ours / FSDP2: 0.500, at most 0.49"
    assert table.endswith(f"## Not met\n\n- {line}\n")
    assert shown.count(f"\n- {line}\n") == 1


def test_a_script_that_fails_is_a_row_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = fake(
        tmp_path,
        monkeypatch,
        dies="raise RuntimeError('no tc here')",
        exits="import sys; print('x'); sys.exit('one.py: limiting the link needs root')",
        silent="",
        runs=measured(0.5),
    )
    assert not summary["is_good"]
    failures = [row["failure"] for row in summary["rows"]]
    assert failures == [
        "RuntimeError: no tc here",
        "one.py: limiting the link needs root",
        "it wrote no figures",
        "",
    ]
    summary_page = (tmp_path / "out" / "summary.md").read_text()
    assert "\n- silent: not measured: it wrote no figures\n" in summary_page
    assert "no tc here" in (tmp_path / "out" / "dies.log").read_text()


def test_a_claim_that_does_not_hold_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = [Claim("memory is flat", False, "+9 MiB"), Claim("ranks agree", True, "6 losses")]
    summary = fake(tmp_path, monkeypatch, flat=measured(0.5, claims))
    assert not summary["is_good"]
    assert [row["is_met"] for row in summary["rows"][1:]] == [False, True]
    assert summary["rows"][1]["compared"] == "memory is flat: +9 MiB"
    assert "\n- flat: memory is flat: +9 MiB\n" in (tmp_path / "out" / "summary.md").read_text()


def test_an_unknown_name_is_refused_with_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "link", "lnik", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "there is no benchmark 'lnik'; there are host_overhead, host_copies" in error
    assert not (tmp_path / "out").exists()


def test_the_installed_program_needs_nothing_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp-overlap", "--help"])
    with pytest.raises(SystemExit):
        main.run()
    commands = capsys.readouterr().out.split("Commands:")[1]
    assert [line.split()[0] for line in commands.strip().splitlines()] == [
        "train",
        "export",
        "report",
        "simulate",
        "races",
        "compare",
        "diff",
        "doctor",
    ]
    for source in (ROOT / "fsdp_overlap").rglob("*.py"):
        assert "scripts/" not in source.read_text(), source


def test_the_results_are_those_of_all_benchmarks() -> None:
    where, rows = read_summary(results.FIGURES)
    assert not where.quick
    assert {row.benchmark for row in rows} == {one.name for one in running.BENCHMARKS}
    assert results.RESULTS.read_text() == results.results_of(where, rows)


def test_the_results_mark_each_target_that_is_missed() -> None:
    where, rows = read_summary(results.FIGURES)
    lines: dict[str, list[str]] = {}
    _, _, tables = results.results_of(where, rows).partition("\n## ")
    for line in tables.splitlines():
        if line.startswith("**") and "**: " in line and "GPU" not in line:
            lines[line.split("**")[1]] = below = []
        elif line.startswith(("| ", "- ")):
            below.append(line)
    assert lines.keys() == {row.benchmark for row in rows}
    for row in filter(results.is_shown, rows):
        missed = ", missed" if row.is_met is False else ""
        if row.target == "must hold":
            assert f"- {row.compared}{missed}" in lines[row.benchmark]
            continue
        if swept := SWEPT.fullmatch(row.compared):
            [line] = [line for line in lines[row.benchmark] if line.startswith(f"| {swept[1]} | ")]
            sign = {True: " ≤ ", False: " > ", None: ""}[row.is_met]
            assert f"| {row.ratio.median:.3f}{sign}{row.target} |" in line
            continue
        heads = (f"| {row.compared} | ", f"| {row.compared.partition(': ')[2]} | ")
        end = f"| {row.target}{missed} |"
        assert any(
            line.startswith(heads) and line.endswith(end) for line in lines[row.benchmark]
        ), row
    marks = sum(
        line.count(", missed") + line.count(" > ") for one in lines.values() for line in one
    )
    assert marks == sum(row.is_met is False for row in rows)
    assert all(row.is_met is None for row in rows if not results.is_shown(row))
    for benchmark in running.BENCHMARKS:
        assert benchmark.topic
        assert benchmark.measures


def test_the_page_on_performance_has_the_figures_that_were_measured() -> None:
    page = results.PERFORMANCE.read_text()
    assert page == results.performance_of(page, *read_summary(results.FIGURES))
    assert len(page.split()) <= 1_000  # more than half of them in the tables
    assert len(results.HEADLINES) < 10  # with the one of a GPU
    for headline in results.HEADLINES:
        assert f"`python scripts/bench/all.py {headline.benchmark}`" in page
    changed = [
        replace(row, ratio=row.ratio and replace(row.ratio, median=9.0))
        for row in read_summary(results.FIGURES)[1]
    ]
    again = results.performance_of(page, read_summary(results.FIGURES)[0], changed)
    for headline in results.HEADLINES:
        [line] = [line for line in again.splitlines() if headline.what in line]
        assert line.count("**9.000**") == len(headline.compared)


def test_the_row_of_a_gpu_has_the_figures_of_its_page() -> None:
    lines = (ROOT / "docs" / "gpu.md").read_text().splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines if "|" in line}
    (_, tokens, step, *_), (_, their_tokens, their_step, *_) = cells["ours"], cells["FSDP2"]
    faster = float(tokens.replace(",", "")) / float(their_tokens.replace(",", ""))
    assert results.GPU[1] == (
        f"**{float(step) / float(their_step):.2f}**, which is {faster:.2f} times the tokens/s"
    )


def test_the_page_on_performance_lists_each_target_that_is_missed() -> None:
    _, rows = read_summary(results.FIGURES)
    _, _, table = results.PERFORMANCE.read_text().partition("## Missed targets")
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    left = [line[2] for line in lines]
    for row in rows:
        if row.is_met is False:
            swept = SWEPT.fullmatch(row.compared)
            key = [swept[1] if swept else row.compared, row.target]
            [line] = [k for k, cells in enumerate(lines) if cells[:2] == key]
            assert row.benchmark in left[line]
            assert row.found in left[line]
            left[line] = left[line].replace(row.found, "", 1)
    assert not re.search(r"\d\.\d", "".join(left))


def test_a_quick_run_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"quick": true}')
    before = results.FIGURES.read_bytes()
    with pytest.raises(typer.BadParameter, match="holds a quick run"):
        results.main(tmp_path)
    assert results.FIGURES.read_bytes() == before


def test_every_benchmark_has_its_script() -> None:
    for benchmark in running.BENCHMARKS:
        assert (SCRIPTS / benchmark.script).is_file()


def test_a_plot_is_drawn_of_a_sweep_alone(tmp_path: Path) -> None:
    plot(measured(0.5), "a title", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
    figures = [
        Figure("step", name, "ms", Spread.of(values), at=at)
        for at in (1.0, 2.0)
        for name, values in ROUNDS.items()
    ]
    ratios = [Ratio.between("step", "ours", "FSDP2", ROUNDS, at=at) for at in (1.0, 2.0)]
    sweep = Sweep("link, Gbit/s", log_y=True)
    path = tmp_path / "plot.svg"
    plot(Measurement("", {}, [], figures, ratios, sweep=sweep), "a title", path)
    drawing = path.read_text()
    # matplotlib says in a comment what each drawn text is.
    assert "<!-- a title -->" in drawing
    assert "link, Gbit/s" in drawing


@pytest.mark.slow
def test_the_cheapest_script_runs_under_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Benchmark("host_overhead", "host_overhead.py", "--blocks 2 --rounds 3 --warmup 1", "")
    monkeypatch.setattr(running, "BENCHMARKS", (tiny,))
    out = tmp_path / "out"
    assert command(monkeypatch, "host_overhead", "--out", out) == 0
    row, in_rows = json.loads((out / "summary.json").read_text())["rows"]
    assert row["compared"] == "overhead a unit: ours / FSDP2"
    assert in_rows["compared"] == "overhead a unit: ours, in rows / FSDP2"
    assert row["ratio"]["rounds"] == 3
    assert row["command"].endswith("bench/host_overhead.py --blocks 2 --rounds 3 --warmup 1")
