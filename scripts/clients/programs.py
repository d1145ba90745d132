"""Gets public programs that call FSDP2's `fully_shard`, and compares them on this library:

    python scripts/clients/programs.py              # all of programs.toml
    python scripts/clients/programs.py NAME...      # some
    python scripts/clients/programs.py --list

Each comes from its repository at the commit that `programs.toml` names, into a cache outside of
this repository (`--cache`), with the packages that it needs beside those installed. With `--mirror
FOLDER` repositories are git folders there, as `FOLDER/OWNER+NAME/repo`, and nothing is fetched.
Programs run as they are: models and data that they would download are small files, which
`program_files.py` writes. The script ends with 1 if a program ends otherwise than is expected.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fsdp_overlap"
COMPARE = "fsdp-overlap compare"
ON_EMULATED_GPUS = ["--emulate-gpus"]
"""What tells the comparison that the program is one for GPUs."""

VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
}


@dataclass(frozen=True)
class Program:
    """A program, as `programs.toml` describes it."""

    name: str
    command: str
    """Its script, or `-m` and its module, and its arguments."""
    license: str = ""
    repository: str = ""
    """`owner/name` on GitHub. Empty if it comes with a package."""
    commit: str = ""
    paths: Sequence[str] = ()
    """What of the repository is needed."""
    folder: str = "."
    """Where it runs, in the repository."""
    ranks: int = 2
    device: str = "cuda"
    """`cuda` if it is written for GPUs: it runs on emulated ones. Else `cpu`."""
    steps: int = 0
    """Ends it after so many steps of its optimizer, unless 0."""
    requirements: Sequence[str] = ()
    files: Sequence[Sequence[str]] = ()
    """Arguments of `program_files.py`, for each file that it reads."""
    environment: dict[str, str] = field(default_factory=dict)
    expected: str = "equal"
    """`equal`, or what the comparison's output contains."""
    uses: str = ""


def load(path: Path) -> dict[str, Program]:
    """Return the programs of a manifest by their names."""
    programs = tomllib.loads(path.read_text())
    return {name: Program(name, **fields) for name, fields in programs.items()}


def run(*command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> bytes:
    """Return what a command prints.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    words = list(map(str, command))
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, cwd=cwd, env=env).stdout


def fetch(program: Program, cache: Path, mirror: Path | None) -> Path:
    """Return a git folder that has the program's commit."""
    name = program.repository.replace("/", "+")
    if mirror is not None:
        return mirror / name / "repo"
    folder = cache / "repositories" / name
    if not folder.exists():
        run("git", "init", "--quiet", "--bare", folder)
    git = ["git", f"--git-dir={folder}"]
    if subprocess.run(
        [*git, "cat-file", "-e", program.commit], stderr=subprocess.DEVNULL
    ).returncode:
        url = f"https://github.com/{program.repository}"
        run(*git, "fetch", "--quiet", "--depth=1", url, program.commit)
    return folder


def install(program: Program, cache: Path) -> Path:
    """Return a folder with the packages that the program needs."""
    folder = cache / "packages" / program.name
    listed = folder / "requirements"
    wanted = "\n".join(program.requirements)
    if wanted and not (listed.exists() and listed.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
        run(*pip, *program.requirements)
        listed.write_text(wanted)
    return folder


def prepare(program: Program, cache: Path, mirror: Path | None) -> tuple[Path, dict[str, str]]:
    """Return the folder in which the program runs, made anew, and its environment."""
    root = cache / "programs" / program.name
    shutil.rmtree(root, ignore_errors=True)
    folder = root / program.folder
    if program.repository:
        git = ["git", f"--git-dir={fetch(program, cache, mirror)}"]
        archive = run(*git, "archive", program.commit, *program.paths)
        with tarfile.open(fileobj=BytesIO(archive)) as tar:
            tar.extractall(root, filter="data")
    folder.mkdir(parents=True, exist_ok=True)
    own = program.environment.get("PYTHONPATH", "")
    packages = [own, str(install(program, cache)), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **VARIABLES,
        "HF_HOME": str(root / "huggingface"),
        **program.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, packages)),
    }
    for each in program.files:
        run(sys.executable, HERE / "program_files.py", *each, cwd=folder, env=environment)
    return folder, environment


def compare(program: Program, folder: Path, environment: dict[str, str], compared_by: str) -> bool:
    """Compare a prepared program on both libraries. Return whether it ended as expected."""
    options = ["--ranks", str(program.ranks)]
    if program.steps:
        options += ["--steps", str(program.steps)]
    if program.device == "cuda":
        options += ON_EMULATED_GPUS
    words = shlex.split(program.command)
    if words[0] == "-m":
        options.append(words.pop(0))
    command = [*shlex.split(compared_by), *options, "--", *words]
    print(f"{program.name}: {shlex.join(command)}", flush=True)
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if program.expected == "equal":
        return done.returncode == 0 and "Equal to the bit" in done.stdout
    return program.expected in done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of programs.toml; by default all")
    parser.add_argument("--list", action="store_true", help="list them")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"by default {CACHE}")
    parser.add_argument("--mirror", type=Path, help="a folder with git folders")
    parser.add_argument("--by", default=COMPARE, help=f"what compares: by default {COMPARE}")
    arguments = parser.parse_args()
    programs = load(HERE / "programs.toml")
    if unknown := [name for name in arguments.names if name not in programs]:
        parser.error(f"not in programs.toml: {', '.join(unknown)}")
    chosen = [programs[name] for name in arguments.names or programs]
    if arguments.list:
        for program in chosen:
            where = (
                f"{program.repository}@{program.commit[:7]}" if program.repository else "a package"
            )
            print(f"{program.name:32} {where:48} {program.command}")
        return 0
    failed = []
    for program in chosen:
        folder, environment = prepare(program, arguments.cache.resolve(), arguments.mirror)
        if not compare(program, folder, environment, arguments.by):
            failed.append(program.name)
    print(f"{len(chosen) - len(failed)} as expected, {len(failed)} not: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
