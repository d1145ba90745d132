"""Runs torch's own tests of FSDP2 on FSDP2, and on this library in its place, and prints a table:
`python scripts/clients/fsdp2_tests.py`. It takes about ten minutes.

The tests come from the sources of torch 2.6, as Debian keeps them. They are made for GPUs; a few
rewrites (`fsdp2_test_rank.py`) make them run on a CPU, on two ranks that talk by gloo. What they
assert stays as it is. `fsdp2_tests.toml` says why tests that FSDP2 passes fail on this library.
The script ends with 1 if a test fails that is not listed, fails with another error, or is listed
and passes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fsdp2_test_rank import Job, Outcome, run_rank

SUITE, SOURCE = "trixie", "pytorch=2.6.0+dfsg-7"
ARCHIVE = "pytorch_2.6.0+dfsg.orig.tar.xz"
SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
TESTS = "/test/distributed/_composable/fsdp/test_"
HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fsdp_overlap"

LEFT_OUT = {
    "test_fully_shard_compile": "compiles for a GPU, and traces the code of FSDP2",
    "test_fully_shard_logging": "reads the log of FSDP2",
    "test_fully_shard_memory": "reads what CUDA's allocator counts",
    "test_fully_shard_overlap": "measures time on a GPU",
}
"""Files that say nothing on a CPU, or nothing of another library."""

# What takes a rank seconds to import. Nothing of it takes over FSDP2's names.
PRELOAD = ["torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"]
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
}
STARTUP_SECONDS = 60.0
GRACE_SECONDS = 3.0  # for the other ranks, once one has failed


@dataclass(frozen=True)
class Known:
    """Why a test that FSDP2 passes fails on this library, and what its error contains."""

    why: str
    error: str


@dataclass(frozen=True)
class Row:
    """How a test ended on either library."""

    name: str
    fsdp2: Outcome
    ours: Outcome

    @property
    def is_loss(self) -> bool:
        return self.fsdp2.is_pass and not self.ours.is_pass


# ---- the tests ----


def folder_in(cache: Path) -> Path:
    """Where torch's test files are kept."""
    return cache / f"torch_tests_{SHA256[:8]}"


def fetch(cache: Path) -> Path:
    """The folder of torch's test files. They are fetched if they are not in `cache` yet."""
    folder = folder_in(cache)
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / ARCHIVE
    if not archive.exists():
        download(archive)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{archive} has another SHA-256 than it should: delete it to fetch it again")
    made = Path(tempfile.mkdtemp(dir=cache))
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if TESTS in member.name and (file := tar.extractfile(member)) is not None:
                    (made / Path(member.name).name).write_bytes(file.read())
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def download(archive: Path) -> None:
    """Get the archive by `apt-get source` from the mirror that this machine is configured with,
    in folders of its own: the machine's package lists stay as they are."""
    print(f"apt-get source {SOURCE} (27 MB)", file=sys.stderr)
    if shutil.which("apt-get") is None:
        sys.exit(f"there is no apt-get here: put {ARCHIVE} of Debian {SUITE} into {archive.parent}")
    listing = ["apt-get", "indextargets", "--format", "$(SITE)"]
    mirror = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split()[0]
    with tempfile.TemporaryDirectory(dir=archive.parent) as made:
        folder = Path(made)
        (folder / "lists" / "partial").mkdir(parents=True)
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        line = f"deb-src [signed-by={keys}] {mirror} {SUITE} main\n"
        (folder / "sources.list").write_text(line)
        command = ["apt-get", "-q", "-o", f"Dir::Etc::SourceList={folder}/sources.list"]
        command += ["-o", "Dir::Etc::SourceParts=/dev/null", "-o", f"Dir::Cache={folder}"]
        command += ["-o", f"Dir::State::Lists={folder}/lists"]
        subprocess.run([*command, "update"], check=True)
        subprocess.run([*command, "source", "--download-only", SOURCE], check=True, cwd=folder)
        (folder / ARCHIVE).rename(archive)


def tests_in(file: Path) -> list[str]:
    """The tests of a file, each as `Class.test_name`."""
    return [
        f"{cls.name}.{method.name}"
        for cls in ast.parse(file.read_text()).body
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test_")
    ]


# ---- running them ----


def run_some(job: Job) -> Iterator[Outcome]:
    """Starts ranks that run tests until one fails. Yields the outcomes of those that were run."""
    # A fork server imports once for all ranks, and has no threads that a fork would break.
    context: Any = multiprocessing.get_context("forkserver")
    multiprocessing.set_forkserver_preload(PRELOAD)
    processes, homes = [], []
    for rank in range(job.ranks):
        home, theirs = context.Pipe()
        processes.append(context.Process(target=run_rank, args=(job, rank, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        homes.append(home)
    try:
        for at in range(len(job.tests)):
            seconds = job.seconds + (0 if at else STARTUP_SECONDS)
            outcome = _outcome_of_all(_receive(homes, seconds))
            yield outcome
            if outcome.state == "failed":
                return
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(homes: Sequence[Connection], seconds: float) -> list[Outcome]:
    """How the next test ended on each rank. A rank that does not say it has failed."""
    end = time.monotonic() + seconds
    outcomes: dict[Any, Outcome] = {}
    while len(outcomes) < len(homes):
        waiting = [home for home in homes if home not in outcomes]
        ready: list[Any] = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            late = Outcome("failed", f"not done in {seconds:.0f} s")
            outcomes.update(dict.fromkeys(waiting, late))
        for home in ready:
            try:
                outcomes[home] = home.recv()
            except EOFError:
                outcomes[home] = Outcome("failed", "the process ended")
        if any(outcome.state == "failed" for outcome in outcomes.values()):
            end = min(end, time.monotonic() + GRACE_SECONDS)
    return [outcomes[home] for home in homes]


def _outcome_of_all(by_rank: Sequence[Outcome]) -> Outcome:
    """One outcome of all ranks': a failure, of which errors tell most, or what they share."""
    failed = [outcome for outcome in by_rank if outcome.state == "failed"]
    skipped = [outcome for outcome in by_rank if outcome.state == "skipped"]
    if failed:
        return max(failed, key=lambda outcome: bool(outcome.details))
    # A rank that a test has no use for has passed, and has called nothing.
    return skipped[0] if skipped else replace(by_rank[0])


def run_all(job: Job) -> dict[str, Outcome]:
    """The outcomes of the tests of `job`, each in processes in which none has failed before."""
    outcomes: dict[str, Outcome] = {}
    while rest := job.tests[len(outcomes) :]:
        with tempfile.TemporaryDirectory(prefix="fsdp2_tests_") as folder:
            some = run_some(replace(job, tests=rest, folder=Path(folder)))
            for name, outcome in zip(rest, some, strict=False):
                outcomes[name] = outcome
                library = "ours" if job.replaces else "FSDP2"
                print(f"{library:>5} {outcome.state:7} {job.file.stem}.{name}", file=sys.stderr)
    return outcomes


# ---- what comes out ----


def load_known(path: Path) -> dict[str, Known]:
    """What is known of tests that fail on this library, by their names."""
    by_why = tomllib.loads(path.read_text())
    return {
        name: Known(why, error) for why, tests in by_why.items() for name, error in tests.items()
    }


def complaint_of(row: Row, known: Mapping[str, Known]) -> str:
    """What is not as it is known to be. Empty if nothing is."""
    if not row.is_loss:
        is_listed = row.name in known and row.ours.is_pass
        return f"{row.name} passes: take it out of the list" if is_listed else ""
    if row.name not in known:
        return f"{row.name} fails, and is not listed: {row.ours.reason}"
    if known[row.name].error not in row.ours.reason:
        return f"{row.name} fails otherwise than listed: {row.ours.reason}"
    return ""


def _cell(outcome: Outcome) -> str:
    return "passed, bypassed" if outcome.is_pass and outcome.bypassed else outcome.state


def table_of(rows: Sequence[Row], known: Mapping[str, Known]) -> str:
    lines = ["| test | FSDP2 | ours | |", "|---|---|---|---|"]
    for row in rows:
        why = known[row.name].why if row.is_loss and row.name in known else ""
        words = (row.ours if row.is_loss else row.fsdp2).reason[:160].replace("|", "\\|")
        remark = ": ".join(part for part in (why, words) if part)
        lines.append(f"| {row.name} | {_cell(row.fsdp2)} | {_cell(row.ours)} | {remark} |")
    return "\n".join(lines)


def summary_of(rows: Sequence[Row], known: Mapping[str, Known]) -> str:
    able = [row for row in rows if row.fsdp2.is_pass]
    passed = [row for row in able if row.ours.is_pass]
    bypassed = sum(row.ours.bypassed for row in passed)
    whys = Counter(
        known[row.name].why if row.name in known else "not listed" for row in able if row.is_loss
    )
    lines = [f"{count:4} {why}" for why, count in whys.most_common()]
    return "\n".join(
        [
            f"{len(rows)} tests. FSDP2 passes {len(able)} on a CPU; of these this library passes "
            f"{len(passed)}, {bypassed} of them without a call of what they patch in FSDP2.",
            *lines,
            *(f"Left out: {file}, which {why}." for file, why in LEFT_OUT.items()),
        ]
    )


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` tidies up
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the tests are kept")
    parser.add_argument("--only", default="", help="run the tests whose names this regex finds")
    parser.add_argument("--ranks", type=int, default=2, help="some tests need 4")
    parser.add_argument("--seconds", type=float, default=90, help="that a test may take")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks too")
    options = parser.parse_args()
    os.environ.update(VARIABLES)
    known = load_known(HERE / "fsdp2_tests.toml")
    rows: list[Row] = []
    for file in sorted(fetch(options.cache).glob("*.py")):
        if file.stem in LEFT_OUT:
            continue
        tests = [test for test in tests_in(file) if re.search(options.only, f"{file.stem}.{test}")]
        job = Job(False, file, tests, options.ranks, options.seconds, Path(), not options.verbose)
        fsdp2, ours = run_all(job), run_all(replace(job, replaces=True))
        rows += [Row(f"{file.stem}.{test}", fsdp2[test], ours[test]) for test in tests]
    if options.verbose:
        print(*(f"---- {row.name}\n{row.ours.details}" for row in rows if row.is_loss), sep="\n")
    print(table_of(rows, known), summary_of(rows, known), sep="\n\n")
    complaints = [complaint for row in rows if (complaint := complaint_of(row, known))]
    print(*complaints, sep="\n")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
