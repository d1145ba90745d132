"""Print the size of the package and its documents, in the tree and at a commit beside it.

    python scripts/measure_size.py
    python scripts/measure_size.py --before HEAD~50 --names

In old commits ``engine/`` is called ``runtime/``, ``simulator/`` ``simulating/``, and ``emulator/``
``modelled/``.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fsdp_overlap"
ENGINE = {"engine", "runtime"}
OUTSIDE_CORE = {
    *("checkpoint", "cli", "profiling", "weights"),
    *("emulator", "modelled", "simulator", "simulating", "tools"),
}
LONGEST_FUNCTION = 80
"""In lines, without its signature and its docstring, as ``tests/docs/test_house.py`` counts."""

Files = Mapping[PurePosixPath, str]
"""The text of each measured file, by its path in the repository."""


def is_measured(path: PurePosixPath) -> bool:
    if path.suffix == ".md":
        return str(path.parent) in {".", "docs"}
    return path.suffix == ".py" and path.parts[0] == PACKAGE


def read_tree(root: Path = ROOT) -> Files:
    """Return the files that are measured, as they lie in ``root``."""
    paths = [root / "README.md", *root.glob("docs/*.md"), *root.glob(f"{PACKAGE}/**/*.py")]
    return {PurePosixPath(path.relative_to(root)): path.read_text() for path in paths}


def read_commit(commit: str) -> Files:
    """Return the files that are measured, as ``commit`` has them."""
    command = ["git", "archive", commit, "README.md", "docs", PACKAGE]
    archive = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if member.isfile() and is_measured(path):
                content = tar.extractfile(member)
                assert content is not None
                files[path] = content.read().decode()
    return files


def lines_of(text: str) -> int:
    return text.count("\n")


def room_of(path: PurePosixPath) -> str:
    """Return the folder of the package that ``path`` is in, or "" at the package's top level."""
    return path.parts[1] if len(path.parts) > 2 else ""


def count_long_functions(tree: ast.Module) -> int:
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 > LONGEST_FUNCTION:
                count += 1
    return count


def public_names(files: Files) -> set[str]:
    """Return the names in each ``__all__`` of the package, its folders and its files."""
    names: set[str] = set()
    for path, text in files.items():
        depth = len(path.parts) - (room_of(path) == "tools")
        is_public = depth == 2 or (depth == 3 and path.stem == "__init__")
        if path.suffix != ".py" or not is_public:
            continue
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= {f"{module}.{name}" for name in ast.literal_eval(node.value)}
    return names


def measure(files: Files) -> dict[str, int]:
    """Return each measure by its name."""
    code = {path: text for path, text in files.items() if path.suffix == ".py"}
    trees = {path: ast.parse(text) for path, text in code.items()}
    classes = Counter(
        name
        for tree in trees.values()
        for name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    )
    return {
        "package: lines": sum(map(lines_of, code.values())),
        "package: files": len(code),
        "core: lines": sum(
            lines_of(text) for path, text in code.items() if room_of(path) not in OUTSIDE_CORE
        ),
        "engine: files": sum(room_of(path) in {"", *ENGINE} for path in code),
        "class names of several modules": sum(count > 1 for count in classes.values()),
        f"functions above {LONGEST_FUNCTION} lines": sum(map(count_long_functions, trees.values())),
        "public names": len(public_names(files)),
        "documents: words": sum(len(files[path].split()) for path in files if path.suffix == ".md"),
    }


def table_of(columns: Mapping[str, Mapping[str, int]]) -> str:
    """Return a Markdown table with a column for each measured state."""
    names = next(iter(columns.values()))
    rows = [["", *columns], ["---", *("---:" for _ in columns)]]
    rows += [[name, *(f"{column[name]:,}" for column in columns.values())] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the size of the package.")
    parser.add_argument("--before", metavar="COMMIT", help="a commit to print beside the tree")
    parser.add_argument(
        "--names", action="store_true", help="list public names too: all, or with --before changes"
    )
    args = parser.parse_args()
    states = {"now": read_tree()}
    if args.before:
        states = {args.before: read_commit(args.before), **states}
    print(table_of({state: measure(files) for state, files in states.items()}))
    if args.names:
        now, before = (
            public_names(files) for files in (states["now"], states.get(args.before, {}))
        )
        marks = dict.fromkeys(now - before, "+" if args.before else " ")
        marks |= dict.fromkeys(before - now, "-")
        print(*(f"{marks[name]} {name}" for name in sorted(marks)), sep="\n")


if __name__ == "__main__":
    main()
