"""The overlap report in a terminal and in files."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from fsdp_overlap.tools.cli.output import BadInput, check_writable, writing
from fsdp_overlap.tools.profiling import Report, diagnose, read_report
from fsdp_overlap.tools.profiling.html import write_html
from fsdp_overlap.tools.profiling.json_report import write_json
from fsdp_overlap.tools.profiling.plot import write_png
from fsdp_overlap.tools.profiling.tables import ReportTable, kinds_table, ranks_table

_SUFFIXES = (".json", ".json.gz")
_RECORD = "overlap.json"
_LOOK_SECONDS = 1.0  # between two looks at the files of a job that runs


def report(
    given: Sequence[Path], against: Sequence[Path], out: Path | None, steps: int | None
) -> None:
    """Read the traces of one run, or of two, show the report and write it to `out`, by default
    where the first trace is. Raise BadInput before anything is written."""
    first = given[0]
    folder = out or (first if first.is_dir() else first.parent)
    check_writable(folder)
    runs = [(paths, find_traces(paths)) for paths in (given, against) if paths]
    if len(runs) == 2 and runs[0][1] == runs[1][1]:
        raise BadInput(f"--against {against[0]}: that is the same run")
    names = _names([paths for paths, _ in runs])
    reports = {name: _read(traces, steps) for name, (_, traces) in zip(names, runs, strict=True)}
    show_report(reports)
    with writing(folder) as new:
        write_report(reports, new)
    print(f"\n{folder / 'overlap.html'}, .png and .json")


def watch(
    given: Sequence[Path], against: Sequence[Path], out: Path | None, steps: int | None
) -> None:
    """Report as `report` does, each time that there are other traces, until Ctrl-C. A file is read
    when it was the same in two looks. Raise BadInput for a path that is not there."""
    if out is not None:
        check_writable(out)
    console = Console(stderr=True, highlight=False)
    before: dict[Path, tuple[int, int]] = {}
    reported: dict[Path, tuple[int, int]] = {}
    with console.status("waiting for traces; Ctrl-C ends this"), suppress(KeyboardInterrupt):
        while True:
            now = _changes(given, against)
            if now and now == before and now != reported:
                try:
                    report(given, against, out, steps)
                except BadInput as error:  # such as a file that is written right now
                    console.print(f"not reported: {error}", markup=False, soft_wrap=True)
                reported = now
            before = now
            time.sleep(_LOOK_SECONDS)


def _changes(*runs: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Return when each trace was changed and its size; nothing while a run has none."""
    for path in chain(*runs):
        if not path.exists():
            raise BadInput(f"{path}: no such file or folder")
    try:
        traces = {trace: trace.stat() for paths in runs for trace in find_traces(paths)}
    except (BadInput, FileNotFoundError):
        return {}
    return {trace: (found.st_mtime_ns, found.st_size) for trace, found in traces.items()}


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """Return the trace files that `paths` name. A folder stands for the traces in it or, if `train`
    wrote it, for those in its `traces` folder. Raise BadInput for a path without a trace."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise BadInput(f"{path}: no such file or folder")
            found.append(path)
            continue
        folder = path / "traces" if (path / "traces").is_dir() else path
        traces = sorted(
            p for p in folder.iterdir() if p.name.endswith(_SUFFIXES) and p.name != _RECORD
        )
        if not traces:
            raise BadInput(f"{path}: holds no trace (*.json or *.json.gz)")
        found += traces
    return found


def write_report(reports: Mapping[str, Report], folder: Path) -> None:
    """Write overlap.html, overlap.png and overlap.json."""
    write_html(reports, folder / "overlap.html")
    write_png(reports, folder / "overlap.png")
    write_json(reports, folder / _RECORD)


def show_report(reports: Mapping[str, Report]) -> None:
    """Print the tables and what was found to stdout."""
    # A file takes long lines; a terminal says how long.
    width = None if sys.stdout.isatty() else 160
    console = Console(highlight=False, soft_wrap=True, width=width)
    for table in (ranks_table(reports), kinds_table(reports)):
        show_table(console, table)
    for name, one in reports.items():
        if len(reports) > 1:
            console.print(f"{name}:", markup=False)
        for finding in diagnose(one):
            console.print(f"- {finding.text}", markup=False)


def show_table(console: Console, table: ReportTable) -> None:
    """Print a table, and an empty line."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for k, cell in enumerate(table.header):
        is_label = k < table.labels
        justify: JustifyMethod = "left" if is_label else "right"
        shown.add_column(cell, justify=justify, no_wrap=is_label, overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown, "")


def _read(traces: Sequence[Path], steps: int | None) -> Report:
    columns = TextColumn("reading"), BarColumn(), DownloadColumn()
    try:
        total = sum(path.stat().st_size for path in traces)
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("reading", total=total)
            return read_report(
                *traces, steps=steps, progress=lambda read: progress.update(task, completed=read)
            )
    except ValueError as error:
        raise BadInput(str(error)) from None
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}") from None


def _names(runs: Sequence[Sequence[Path]]) -> list[str]:
    """Return short names of the runs if they differ, else their paths."""
    short = [paths[0].absolute().name.split(".")[0] for paths in runs]
    return short if len(set(short)) == len(runs) else [str(paths[0]) for paths in runs]
