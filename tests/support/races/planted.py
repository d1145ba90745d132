"""Leaves out each statement of a library that orders something, one at a time, and shows which of
them `fsdp-overlap races` finds: `python tests/support/races/planted.py fsdp2`.

The statements are found in the library's source: calls of methods that wait, and those that
`planted.toml` names because they only keep memory from being used again. A statement is left out
as the library is imported: nothing installed is changed. Training programs
(`train_fsdp2.py` and others) that reach it run as one of four ranks, until one of them has a
finding that it has not with the library as it is. As it is, the library must have none but those
that `planted.toml` knows of. `planted.toml` has the reason for each statement that is not found.
The script ends with 1 where one has none, or where a reason is not needed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from environments import HERE, Environment, NotRun, add_cache, make

RANKS = 4
LIMIT = 30.0  # seconds of the processor that a program takes at most
WAITS = re.compile(r"wait|wait_stream|wait_event|synchronize|record_stream")
"""The methods whose calls order something."""


class Statement(NamedTuple):
    """A statement of a library. ``text`` says which one of its function it is."""

    file: str
    line: int
    function: str
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What stays the same from release to release."""
        return self.file, self.function, self.text


@dataclass(frozen=True)
class Library:
    """A library, as ``planted.toml`` tells of it."""

    package: str
    """A module, and a folder in it."""
    program: str
    variants: list[str]
    """Arguments of the program."""
    libraries: list[str] = field(default_factory=list)
    """What to install, in a folder of its own."""
    waits: str = "()"
    """A pattern of the library's own functions that only wait."""
    keeps: list[list[str]] = field(default_factory=list)
    """What keeps memory: file, function, text."""
    known: dict[str, str] = field(default_factory=dict)
    """Variants that have findings with the library as it is, and why."""
    reasons: list[list[str]] = field(default_factory=list)
    """Why a statement is not found: file, function, text, reason."""

    @property
    def folder(self) -> Path:
        """Where its source is."""
        package, _, inner = self.package.partition("/")
        spec = find_spec(package)
        assert spec is not None, f"{package} is not installed"
        assert spec.submodule_search_locations is not None
        return Path(spec.submodule_search_locations[0], inner)

    def install(self, cache: Path) -> None:
        """Make it importable here, and in processes started from here."""
        made = make(Environment(tuple(self.libraries)), cache)
        sys.path[1:1] = map(str, made.paths)  # a program has the first place for its folder
        os.environ["PYTHONPATH"] = made.python_path


class Planter(ast.NodeTransformer):
    """Marks the statements of a file that order something, and leaves one of them out."""

    def __init__(self, library: Library, file: str, left_out: Statement | None = None) -> None:
        self.library, self.file, self.left_out = library, file, left_out
        self.statements: list[Statement] = []
        self._function: list[str] = []
        self._seen = Counter[tuple[str, str]]()

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._function.append(node.name)
            super().generic_visit(node)
            self._function.pop()
            return node
        if not isinstance(node, ast.Expr | ast.Assign | ast.Return):
            return super().generic_visit(node)
        function, text = ".".join(self._function), ast.unparse(node)
        if not self._waits(node) and [self.file, function, text] not in self.library.keeps:
            return node
        self._seen[function, text] += 1
        if (count := self._seen[function, text]) > 1:
            text += f"  # {count}"
        found = Statement(self.file, node.lineno, function, text)
        self.statements.append(found)
        mark = ast.parse(f"__reached__({tuple(found)!r})").body[0]
        for each in ast.walk(mark):
            ast.copy_location(each, node)
        return [mark, _without(node) if found == self.left_out else node]

    def _waits(self, node: ast.AST) -> bool:
        return any(
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and bool(
                WAITS.fullmatch(name := each.func.attr) or re.fullmatch(self.library.waits, name)
            )
            for each in ast.walk(node)
        )


def _without(node: ast.stmt) -> ast.stmt:
    """Return what is left of a statement without its call: a result is what was waited for."""
    if isinstance(node, ast.Expr) or not isinstance(value := node.value, ast.Call):  # type: ignore
        return ast.copy_location(ast.Pass(), node)
    if not isinstance(value.func, ast.Attribute):  # what keeps memory
        return ast.copy_location(ast.Pass(), node)
    changed = copy.copy(node)
    changed.value = value.func.value  # type: ignore
    return changed


def statements(library: Library) -> list[Statement]:
    found = []
    for path in sorted(library.folder.rglob("*.py")):
        planter = Planter(library, str(path.relative_to(library.folder)))
        planter.visit(ast.parse(path.read_bytes()))
        found += planter.statements
    return found


# ---- in a process of its own ----


def plant(
    library: Library, left_out: Statement | None, reached: Callable[[Statement], object]
) -> None:
    """Import ``library`` from now on without one statement. ``reached`` is called with each of its
    statements that a program comes to."""
    builtins.__reached__ = lambda fields: reached(Statement(*fields))  # type: ignore
    folder, get_code = library.folder.resolve(), SourceFileLoader.get_code

    def planted(self: SourceFileLoader, name: str) -> Any:
        path = Path(self.get_filename(name)).resolve()
        if not path.is_relative_to(folder):
            return get_code(self, name)
        planter = Planter(library, str(path.relative_to(folder)), left_out)
        tree = planter.visit(ast.parse(path.read_bytes()))
        return compile(tree, str(path), "exec", dont_inherit=True)

    SourceFileLoader.get_code = planted  # type: ignore


@dataclass
class Outcome:
    """What a program has shown."""

    variant: str
    reached: list[Statement]
    findings: dict[str, str]
    """As text, by what they share with the same one of another run."""
    error: str


def work(library: Library, left_out: Statement | None, variants: list[str]) -> Iterator[Outcome]:
    """Run ``variants`` of the program, until one has a finding that only what was left out can
    explain."""
    reached: set[Statement] = set()
    plant(library, left_out, reached.add)
    from fsdp_overlap.tools.races import describe
    from fsdp_overlap.tools.races.runner import Program, run

    def give_up(*_: object) -> None:
        raise TimeoutError("it does not end")

    signal.signal(signal.SIGPROF, give_up)
    for variant in variants:
        reached.clear()
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        _, result = run(Program(str(HERE / library.program), variant.split()), RANKS)
        findings = {repr(each.key): describe([each]) for each in result.found.findings}
        yield Outcome(variant, sorted(reached), findings, result.error)
        if left_out and findings and variant not in library.known:
            break


# ---- here ----


@dataclass
class Row:
    """What became of a statement: the first variant that has a finding, and the findings."""

    statement: Statement
    is_reached: bool
    variant: str
    findings: list[str]
    errors: list[str]
    reason: str = ""

    @classmethod
    def of(cls, statement: Statement, plain: list[Outcome], planted: list[Outcome]) -> Row:
        before = {each.variant: each.findings for each in plain}
        errors = [f"{each.variant}: {each.error}" for each in planted if each.error]
        for each in planted:
            new = [text for key, text in each.findings.items() if key not in before[each.variant]]
            if new:
                return cls(statement, True, each.variant, new, errors)
        return cls(statement, bool(planted), "", [], errors)

    def __str__(self) -> str:
        file, line, function, text = self.statement
        kinds = sorted({each.partition(":")[0] for each in self.findings})
        missed = "no" if self.is_reached else "not reached"
        found = f"`{self.variant}`: {', '.join(kinds)}" if kinds else f"{missed}: {self.reason}"
        return f"| `{file}:{line}` | `{function}` | `{text}` | {found} |"


def start(name: str, left_out: Statement | None, variants: list[str]) -> list[Outcome]:
    """Run :func:`work` in a process."""
    if not variants:
        return []
    command = [sys.executable, __file__, name, "--work", json.dumps([left_out, variants])]
    done = subprocess.run(command, capture_output=True, text=True)
    marked = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode:
        sys.exit(f"{left_out}: {done.stderr}")
    outcomes = [Outcome(**json.loads(line.removeprefix(MARK))) for line in marked]
    for each in outcomes:
        each.reached = [Statement(*fields) for fields in each.reached]
    return outcomes


MARK = "planted: "


def judge(library: Library, rows: list[Row]) -> list[str]:
    """Give each statement that is not found its reason. Return what is wrong with the reasons."""
    reasons = {(file, function, text): why for file, function, text, why in library.reasons}
    for row in rows:
        if not row.findings:
            row.reason = reasons.pop(row.statement.key, "")
    wrong = [
        f"not found, for no reason: {row.statement} {row.errors[:1]}"
        for row in rows
        if not (row.findings or row.reason)
    ]
    return wrong + [f"a reason that is not needed: {key}" for key in reasons]


def main() -> int:
    told = tomllib.loads((HERE / "planted.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=told)
    parser.add_argument("--only", default="", help="only statements that this pattern is found in")
    parser.add_argument("--variants", nargs="+", help="instead of those of planted.toml")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write all that was found")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    add_cache(parser)
    given = parser.parse_args()
    library = Library(**told[given.library])
    if given.work:
        left_out, variants = given.work
        for outcome in work(library, left_out and Statement(*left_out), variants):
            print(MARK + json.dumps(asdict(outcome)), flush=True)
        return 0

    try:
        library.install(given.cache)
    except NotRun as reason:
        print(f"not run: {reason}")
        print(reason.printed, file=sys.stderr)
        return 1
    wrong = []
    variants = given.variants or library.variants
    with ThreadPoolExecutor(given.jobs) as pool:
        parts = [variants[i :: given.jobs] for i in range(given.jobs)]
        plain = [
            each
            for part in pool.map(lambda part: start(given.library, None, part), parts)
            for each in part
        ]
        plain.sort(key=lambda each: variants.index(each.variant))
        for each in plain:
            print(f"as it is, {each.variant}: {len(each.reached)} reached", file=sys.stderr)
            is_known = each.variant in library.known
            if each.error or bool(each.findings) != is_known:
                found = "\n".join(each.findings.values())
                wrong.append(f"as it is, {each.variant} has: {each.error}\n{found}")

        def leave_out(statement: Statement) -> Row:
            reaching = [each.variant for each in plain if statement in each.reached]
            row = Row.of(statement, plain, start(given.library, statement, reaching))
            print(row, row.errors[:1], file=sys.stderr)
            return row

        rows = list(
            pool.map(leave_out, [s for s in statements(library) if re.search(given.only, str(s))])
        )
    wrong += judge(library, rows)
    if given.json is not None:
        told = {"plain": [asdict(each) for each in plain], "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(table(rows))
    print(*wrong, sep="\n", file=sys.stderr)
    return bool(wrong)


def table(rows: list[Row]) -> str:
    head = "| place | function | left out | found |\n| --- | --- | --- | --- |"
    reached, found = sum(row.is_reached for row in rows), sum(bool(row.findings) for row in rows)
    count = f"{len(rows)} statements, {reached} reached, {found} found"
    return "\n".join([head, *map(str, rows), "", count])


if __name__ == "__main__":
    sys.exit(main())
