"""What the programs of the tables run in: a release of torch, and libraries.

Each environment is made when it is first asked for, in a folder that is kept: a virtual environment
for a release of torch that the script's own Python does not have, and a folder for each set of
libraries, which PYTHONPATH names. So no library can change what another one runs with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BESIDE_TORCH = [
    *("cuda-bindings==13.5.0", "cuda-pathfinder==1.9.1", "filelock==4.2.11", "fsspec==2026.9.0"),
    *("jinja2==3.1.6", "markupsafe==3.0.4", "mpmath==1.3.0", "networkx==3.6.1", "numpy==2.4.6"),
    *("setuptools==81.0.0", "sympy==1.14.0", "typing-extensions==4.16.0"),
]
"""What a release of torch leaves open. It names its libraries of CUDA itself."""


class NotRun(Exception):
    """Why a program was not run, in a line, and what was ``printed`` about it."""

    def __init__(self, reason: str, printed: str = "") -> None:
        super().__init__(" ".join(reason.split()).replace("|", "/"))
        self.printed = printed


@dataclass(frozen=True)
class Environment:
    """``libraries``: all that pip installs, pinned; the first one names them. ``torch``: a release,
    or else that of the script's own Python. ``python``: the version whose wheels are taken where
    the script's own is older."""

    libraries: tuple[str, ...] = ()
    torch: str = ""
    python: str = ""

    def __str__(self) -> str:
        return self.libraries[0] if self.libraries else f"torch=={self.torch}"


@dataclass(frozen=True)
class Made:
    """An environment on disk."""

    python: Path
    paths: list[Path]
    """Of libraries, to import from."""

    @property
    def python_path(self) -> str:
        return os.pathsep.join(map(str, [ROOT, *self.paths]))


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Give a script the option that says where environments are."""
    folder = Path("~/.cache/fsdp_overlap_races")
    parser.add_argument(
        "--cache",
        type=lambda text: Path(text).expanduser().resolve(),
        default=folder.expanduser(),
        help=f"keeps environments, which are made on first use [default: {folder}]",
    )


_failed: dict[Path, NotRun] = {}


def fill(folder: Path, wanted: str, commands: Sequence[Sequence[object]], advice: str) -> None:
    """Run ``commands``, which fill ``folder`` with what is ``wanted``, unless they have before.

    Raises:
        NotRun: one of them failed, now or in a call before.
    """
    stamp = folder.with_name(f"{folder.name}.made")  # written last
    if folder.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    if folder in _failed:
        raise _failed[folder]
    print(f"making {folder}", file=sys.stderr)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        try:
            status, printed = _run([*map(str, command)])
        except OSError as error:  # as where git is not installed
            status, printed = 1, str(error)
        if status:
            said = [line for line in printed.splitlines() if line.strip()]
            errors = [line for line in said if line.lower().startswith(("error", "fatal"))]
            why = [*(errors or said), f"exit status {status}"][0]
            _failed[folder] = NotRun(f"{folder.name}: {why}; {advice}", printed)
            raise _failed[folder]
    stamp.write_text(wanted)


def _run(command: Sequence[str], **options: Any) -> tuple[int, str]:
    """Run a command. Return its exit status and what it printed."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **options,
    )
    return done.returncode, done.stdout


def make(environment: Environment, cache: Path) -> Made:
    """Return an environment, which is made where it is not there.

    Raises:
        NotRun: it could not be made.
    """
    own = version("torch").partition("+")[0]
    python, paths = Path(sys.executable), []
    advice = "pip must reach an index of packages"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if environment.torch not in ("", own):
        folder = cache / f"torch-{environment.torch}"
        python = folder / "bin" / "python"
        requirements = [f"torch=={environment.torch}", *BESIDE_TORCH]
        commands = [[sys.executable, "-m", "venv", folder], [python, *pip, *requirements]]
        fill(folder, _inputs(requirements), commands, advice)
    if environment.libraries:
        folder = cache / str(environment).replace("==", "-")
        # Some import torch while they are built.
        options = ["--no-deps", "--no-build-isolation", "--target", str(folder)]
        if environment.python and sys.version_info < tuple(map(int, environment.python.split("."))):
            options += ["--python-version", environment.python, "--only-binary", ":all:"]
            options += ["--ignore-requires-python"]
        command = [sys.executable, *pip, *options, *environment.libraries]
        fill(folder, _inputs([f"torch=={own}", *environment.libraries]), [command], advice)
        paths.append(folder)
    return Made(python, paths)


def _inputs(requirements: Sequence[str]) -> str:
    return "\n".join([f"python=={platform.python_version()}", *requirements])


@dataclass(frozen=True)
class Found:
    """What a program has shown: ``told`` as JSON, and what it printed."""

    told: dict[str, Any]
    printed: str
    seconds: float


def find_races(
    environment: Environment,
    cache: Path,
    arguments: Sequence[object],
    change: str = "",
    folder: Path = HERE,
    seconds: float = 300,
) -> Found:
    """Run a program in ``environment``, and ``folder``: ``arguments`` as for ``fsdp-overlap
    races``. Call the function ``change`` of ``changes.py`` before.

    Raises:
        NotRun: the environment could not be made, or the program did not run to its end.
    """
    made = make(environment, cache)
    start = ["-m", "fsdp_overlap.tools.races"]  # which needs none of the command line's libraries
    path = made.python_path
    if change:
        main = "from fsdp_overlap.tools.races.__main__ import main; raise SystemExit(main())"
        start = ["-c", f"import changes; changes.{change}(); {main}"]
        path += f"{os.pathsep}{HERE}"
    variables = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as written:
        found = Path(written, "found.json")
        command = [str(made.python), *start, f"--json={found}", *map(str, arguments)]
        began = time.perf_counter()
        try:
            _, printed = _run(command, cwd=folder, env=variables, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise NotRun(f"not done in {seconds:.0f} s") from None
        took = time.perf_counter() - began
        told = json.loads(found.read_text()) if found.exists() else {"error": "see what it printed"}
    if told["error"]:
        raise NotRun(told["error"], printed)
    return Found(told, printed, took)
