"""Runs plain programs with releases of libraries that have published faults, and shows whether the
emulated device finds them.

    python scripts/races/published.py FOLDER [ISSUE ...]

FOLDER keeps an environment for each release of torch, and a folder for each of other libraries,
which pip installs where they are missing."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NEEDED = ("numpy", "packaging", "einops")
MEGATRON_PYTHON = "3.12"  # what wheels of megatron-core are for; their Python runs on 3.11 too
TIMEOUT = 300


@dataclass(frozen=True)
class Setup:
    """What a program runs with. ``change``: a function of ``changes.py``, called before."""

    torch: str
    library: str = ""
    change: str = ""

    def __str__(self) -> str:
        text = self.library or f"torch=={self.torch}"
        return f"{text}, {self.change}" if self.change else text


@dataclass(frozen=True)
class Case:
    """A published fault: the ``program`` runs into it with ``faulty``, and not with ``control``.
    ``still``: a later release that says to have mended it."""

    issue: str
    program: str
    faulty: Setup
    control: Setup
    is_found: bool = True
    still: Setup | None = None
    ranks: int = 4


T212, T213, T215 = map(Setup, ("2.12.1", "2.13.0", "2.15.0"))
UNHELD = Setup("2.13.0", change="hold_no_reduced_gradients")
MFSDP = "megatron-fsdp==0.5.1"
LATER_MFSDP = "megatron-fsdp==0.6.1"
CORE = "megatron-core==0.19.2"

CASES = [
    Case("pytorch#180665", "180665", UNHELD, T213),
    Case("pytorch#180665, in a release", "180665_hook", T213, T215),
    Case("pytorch#179443", "179443", UNHELD, T213),
    Case("pytorch#180666", "180666", T212, T213),
    Case("pytorch#178142", "178142", T213, T215),
    Case(
        "pytorch#181218",
        "181218",
        Setup("2.13.0", change="do_not_wait_between_pieces"),
        T213,
        is_found=False,
    ),
    Case("pytorch#177319", "177319", T212, T213, is_found=False),
    Case(
        "Megatron-LM#5222",
        "5222",
        Setup("2.13.0", MFSDP, "do_not_compare_shards"),
        Setup("2.13.0", LATER_MFSDP, "wait_for_gradient_buffers"),
        still=Setup("2.13.0", LATER_MFSDP, "do_not_compare_shards"),
    ),
    Case(
        "Megatron-LM#5788",
        "5788",
        Setup("2.13.0", MFSDP, "do_not_compare_shards"),
        Setup("2.13.0", LATER_MFSDP, "do_not_compare_shards"),
        is_found=False,
    ),
    Case(
        "Megatron-LM#6187",
        "6187",
        Setup("2.13.0", LATER_MFSDP),
        Setup("2.13.0", LATER_MFSDP, "allocate_gradients_where_reduced"),
    ),
    Case(
        "Megatron-LM#7398",
        "7398",
        Setup("2.12.1", CORE, "offload_without_transformer_engine"),
        Setup("2.12.1", CORE, "wait_before_reload"),
        ranks=1,
    ),
]


def install(setup: Setup, folder: Path) -> tuple[Path, list[Path]]:
    """Return the Python of ``setup`` and the folders that it imports from."""
    python = folder / f"torch-{setup.torch}" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        command = [python, "-m", "pip", "install", "-q", f"torch=={setup.torch}", *NEEDED]
        subprocess.run(command, check=True)
    if not setup.library:
        return python, []
    target = folder / setup.library.replace("==", "-")
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target]
        if "core" in setup.library and sys.version_info < (3, 12):
            command += ["--python-version", MEGATRON_PYTHON, "--only-binary", ":all:"]
            command += ["--ignore-requires-python"]
        subprocess.run([*command, setup.library], check=True)
    return python, [target]


def findings_of(program: Path, setup: Setup, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run ``program`` as the first of so many ``ranks``. Return what was found.

    Raises:
        RuntimeError: it could not run.
    """
    python, libraries = install(setup, folder)
    command = [python, HERE / "as_json.py", "--ranks", str(ranks), "--change", setup.change]
    path = os.pathsep.join(map(str, (ROOT, *libraries)))
    # Else 2.15 makes groups of a class of C++ that has another constructor.
    env = os.environ | {"PYTHONPATH": path, "TORCH_DIST_USE_NCCL2": "0"}
    done = subprocess.run(
        [*command, program], env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result = json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}
    if result["error"]:
        raise RuntimeError(f"{program.name} with {setup}: {result['error']}")
    found: list[dict[str, Any]] = result["findings"]
    return found


def line_of(access: dict[str, Any]) -> str:
    """Return the operation and the line of the library, or else of the program."""
    lines = access["lines"]
    place = next((each for each in lines if each["of"] == "library"), lines[0])["place"]
    return f"`{access['operation']}` at {place}"


def show(case: Case, folder: Path) -> bool:
    """Print the row of ``case``. Return whether it is as expected."""
    program = HERE / "published" / f"{case.program}.py"
    found = findings_of(program, case.faulty, case.ranks, folder)
    control = findings_of(program, case.control, case.ranks, folder)
    still = case.still and findings_of(program, case.still, case.ranks, folder)
    after = f"{'not ' if control else ''}clean with {case.control}"
    if case.still:
        after += f"; {'still there' if still else 'gone'} with {case.still}"
    lines = f"{line_of(found[0]['first'])}, {line_of(found[0]['second'])}" if found else ""
    print(f"| {case.issue} | {case.faulty} | {len(found)} | {lines} | {after} |", flush=True)
    return bool(found) == case.is_found and not control


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("issues", nargs="*")
    given = parser.parse_args(arguments)
    wrong = []
    print("| fault | with | findings | of the first, the lines | without the fault |")
    print("|---|---|---:|---|---|")
    for case in CASES:
        if given.issues and not any(each in case.issue for each in given.issues):
            continue
        try:
            is_right = show(case, given.folder.resolve())
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"| {case.issue} | {case.faulty} | could not run: {error} |", flush=True)
            is_right = False
        if not is_right:
            wrong.append(case.issue)
    if wrong:
        print(f"not as expected: {', '.join(wrong)}")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
