"""Code that one reads before one trusts a training run to this library, beside FSDP2's.

A plain run shards 24 blocks and a root with an embedding and a head over a fake group of 8 ranks,
on a CPU, and takes six steps with torch.optim.AdamW: four first ones, then two steady ones.
Python's profiler tells which functions of the package it enters. Their code lines count in full,
without docstrings, comments and blank lines.

Branches of a function: each condition that `if`, `while`, a conditional expression or the filter of
a comprehension tests (operands of `and` and `or` one by one), and each `for`, `except` and `case`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import multiprocessing
import sys
import threading
import tokenize
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import _fully_shard as fsdp2
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, FSDP2 = "fsdp_overlap", Path(fsdp2.__file__).parent
CORE = ("schedule", "engine", "comm", "tensor", "layout", "desync", "torch_internals.py")
"""What every step runs, in the package."""

FEATURES = "features"
WORDS = (
    "outer_shard",
    "negotiat",
    "offload",
    "opaque",
    "is_list",
    "spmd",
    "captured",
    "quantized",
    "post_forward_shard",
)
"""Words of features, which no file of the core needs."""

PHASES = {
    "plain run": ("fully_shard", "first", "steady", "optimizer"),
    "steady forward and backward": ("steady",),
    "fully_shard": ("fully_shard",),
}
LINES, FILES = "code lines", "files"
CALLS = "Python calls a unit and steady step"
WORDS_IN = "files of the core that name a feature"
AIMS = {
    f"plain run, {LINES}": 2800,
    f"plain run, {FILES}": 22,
    f"steady forward and backward, {LINES}": 1200,
    f"steady forward and backward, {FILES}": 12,
    f"fully_shard, {LINES}": 1000,
    f"fully_shard, {FILES}": 10,
    f"loaded by the import, {LINES}": 8000,
    CALLS: 130,
    "branches of Schedule.after_forward": 12,
    "branches of hooks.after_forward": 12,
    WORDS_IN: 0,
}
WORLD_SIZE, WIDTH, STEPS, FIRST_STEPS = 8, 32, 6, 4


# ---- the model ----


class Block(nn.Module):
    """14 parameters: two norms and six projections, two of them of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.o(torch.tanh(self.q(h)) * torch.sigmoid(self.k(h)) + self.v(h))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard_ours(model: Model, mesh: DeviceMesh) -> None:
    from fsdp_overlap import FsdpContext, fully_shard

    ctx = FsdpContext(mesh)
    for block in model.blocks:
        fully_shard(block, ctx)
    fully_shard(model, ctx)


def shard_fsdp2(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)


# ---- code that runs ----


@dataclass
class Function:
    """A function of the package that a run entered, or a module that it imported."""

    name: str
    line: int
    chain: list[str]
    """The package's frames through which it was first entered, outermost first."""

    lines: int = 0
    """Of code."""


@dataclass
class File:
    lines: int = 0
    """Of code in the functions that were entered."""

    of: int = 0
    """Of code in the file."""

    functions: list[Function] = field(default_factory=list)
    entries: list[Function] = field(default_factory=list)
    """All that was entered: functions, lambdas, bodies of classes and of the module."""


@dataclass
class Reading:
    """What was measured of one package."""

    phases: dict[str, dict[str, File]]
    loaded: dict[str, int]
    """Code lines of each file that the import loads."""

    calls: int
    """Of Python functions, a unit and steady step, beyond the unsharded model's."""

    def figures(self) -> dict[str, int]:
        figures: dict[str, int] = {}
        for phase in PHASES:
            lines = [file.lines for file in self.phases[phase].values() if file.functions]
            figures |= {f"{phase}, {LINES}": sum(lines), f"{phase}, {FILES}": len(lines)}
        loaded = f"loaded by the import, {LINES}", f"loaded by the import, {FILES}"
        figures |= dict(zip(loaded, (sum(self.loaded.values()), len(self.loaded)), strict=True))
        return figures | {CALLS: self.calls}

    def entered_features(self) -> list[str]:
        """Return the code that each phase enters first of each file of features, and through which
        calls."""
        found = []
        for phase, files in self.phases.items():
            for name, file in files.items():
                if name.startswith(f"{FEATURES}/"):
                    first = file.entries[0]
                    calls = [*first.chain, f"{name}:{first.line} {first.name}"]
                    found.append(f"{phase}: {' > '.join(calls)}")
        return found


class Recorder:
    """Follows which code of a package runs, and counts calls of all Python functions, by phase."""

    def __init__(self, package: Path) -> None:
        self.folder = f"{package}/"
        self.entered: dict[str, dict[CodeType, Function]] = defaultdict(dict)
        self.calls: Counter[str] = Counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        entered = self.entered[phase]

        def on_event(frame: FrameType, event: str, _: object) -> None:
            if event != "call":
                return
            self.calls[phase] += 1
            code = frame.f_code
            if code not in entered and code.co_filename.startswith(self.folder):
                chain = self._chain_to(frame)
                entered[code] = Function(code.co_qualname, code.co_firstlineno, chain)

        threading.setprofile(on_event)
        sys.setprofile(on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _chain_to(self, frame: FrameType) -> list[str]:
        chain = []
        caller = frame.f_back
        while caller is not None:
            if (file := caller.f_code.co_filename).startswith(self.folder):
                name = file.removeprefix(self.folder)
                chain.append(f"{name}:{caller.f_lineno} {caller.f_code.co_qualname}")
            caller = caller.f_back
        return chain[::-1]

    def files(self, *phases: str) -> dict[str, File]:
        """Return the files whose code ran in ``phases``, by their path in the package."""
        entered: dict[CodeType, Function] = {}
        for phase in phases:
            for code, function in self.entered[phase].items():
                entered.setdefault(code, function)
        files: dict[str, File] = defaultdict(File)
        covered: dict[str, set[int]] = defaultdict(set)
        for code, function in entered.items():
            path = Path(code.co_filename)
            file = files[name := code.co_filename.removeprefix(self.folder)]
            file.of = len(code_lines(path))
            file.entries.append(function)
            if last := last_lines(path).get((code.co_name, function.line)):
                lines = code_lines(path) & set(range(function.line, last + 1))
                function.lines = len(lines)
                covered[name] |= lines
                file.functions.append(function)
        for name, file in files.items():
            file.lines = len(covered[name])
        return dict(files)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def code_lines(path: Path) -> frozenset[int]:
    """Return the lines of a file without docstrings, comments and blank lines."""
    code: set[int] = set()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in (tokenize.COMMENT, tokenize.ENDMARKER, *layout):
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            code -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return frozenset(code)


@cache
def last_lines(path: Path) -> dict[tuple[str, int], int]:
    """Return the last line of each function, by its name and first line."""
    lines = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(each.lineno for each in (node, *node.decorator_list))
            lines[node.name, first] = node.end_lineno or 0
    return lines


def train(model: nn.Module, recorder: Recorder, *, prefix: str = "") -> int:
    """Train, and return the calls of the last forward and backward."""
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 32, (4, 5))
    before = 0
    for step in range(STEPS):
        phase = prefix + ("first" if step < FIRST_STEPS else "steady")
        before = recorder.calls[phase]
        with recorder.during(phase):
            model(tokens).sum().backward()
        with recorder.during(f"{prefix}optimizer"):
            optimizer.step()
        with recorder.during(f"{prefix}optimizer"):
            optimizer.zero_grad()
    return recorder.calls[phase] - before


def measure(package: Path, blocks: int) -> Reading:
    """Measure FSDP2 or this library, in a process that has not imported the latter."""
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    folder = f"{package}/"
    recorder = Recorder(package)
    shard: Callable[[Model, DeviceMesh], None] = shard_fsdp2
    if package != FSDP2:
        sys.path.insert(0, str(package.parent))
        with recorder.during("import"):
            from fsdp_overlap import FsdpContext, fully_shard  # noqa: F401
        shard = shard_ours
    files = [str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]]
    loaded = {
        file.removeprefix(folder): len(code_lines(Path(file)))
        for file in files
        if file.startswith(folder) and file.endswith(".py")
    }
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    unsharded = train(Model(blocks), recorder, prefix="unsharded ")
    model = Model(blocks)
    with recorder.during("fully_shard"):
        shard(model, mesh)
    calls = round((train(model, recorder) - unsharded) / (blocks + 1))
    phases = {name: recorder.files(*phases) for name, phases in PHASES.items()}
    return Reading({"import": recorder.files("import")} | phases, loaded, calls)


# ---- code as it is written ----


def conditions(test: ast.expr) -> int:
    if isinstance(test, ast.BoolOp):
        return sum(conditions(value) for value in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return conditions(test.operand)
    return 1


def branches(function: ast.AST) -> int:
    """Count the branches of a function."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            count += conditions(node.test)
        elif isinstance(node, ast.comprehension):
            count += sum(conditions(test) for test in node.ifs)
        elif isinstance(node, ast.For | ast.ExceptHandler | ast.match_case):
            count += 1
    return count


def function_in(path: Path, name: str) -> ast.AST:
    """Return the function ``name``, or ``Class.name``, of a file."""
    found: ast.AST = tree_of(path)
    for part in name.split("."):
        [found] = [
            each for each in ast.iter_child_nodes(found) if getattr(each, "name", "") == part
        ]
    return found


def count_branches(package: Path) -> dict[str, int]:
    """Count the branches of the two functions in which most features meet."""
    schedule, hooks = package / "schedule" / "scheduler.py", package / "engine" / "hooks.py"
    return {
        "branches of Schedule.after_forward": branches(
            function_in(schedule, "Schedule.after_forward")
        ),
        "branches of hooks.after_forward": branches(function_in(hooks, "after_forward")),
    }


def core_files(package: Path) -> list[Path]:
    paths = [package / name for name in CORE]
    return sorted(
        file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])
    )


def words_of_features(package: Path) -> dict[str, dict[str, int]]:
    """Count the words of features in each file of the core that has any, in any of its text."""
    found = {}
    for path in core_files(package):
        text = path.read_text().lower()
        if counts := {word: text.count(word) for word in WORDS if word in text}:
            found[path.relative_to(package).as_posix()] = counts
    return found


def imports_of_features(package: Path) -> list[str]:
    """Return the lines of the core that import a feature, within functions too, or name the module
    of one in a string."""
    features = f"{package.name}.{FEATURES}"
    found = []
    for path in core_files(package):
        for node in ast.walk(tree_of(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = node.value.split()
            if any(f"{name}.".startswith(f"{features}.") for name in names):
                found.append(f"{path.relative_to(package)}:{getattr(node, 'lineno', 0)}")
    return found


# ---- what is shown ----


def all_figures(package: Path, reading: Reading) -> dict[str, int]:
    if package == FSDP2:
        return reading.figures()
    words = {WORDS_IN: len(words_of_features(package))}
    return reading.figures() | count_branches(package) | words


def table_of(columns: dict[str, dict[str, int]]) -> Table:
    table = Table("", box=None)
    table.columns[0].no_wrap = True
    for name in columns:
        table.add_column(name, justify="right")
    names = dict.fromkeys(name for figures in columns.values() for name in figures)
    for name in names:
        values = (figures.get(name) for figures in columns.values())
        table.add_row(name, *("" if value is None else f"{value:,}" for value in values))
    return table


def print_files(console: Console, reading: Reading) -> None:
    """Print the functions that each phase enters, and how those of features are reached."""
    for phase in PHASES:
        console.print(f"\n[bold]{phase}[/]")
        files = reading.phases[phase].items()
        for name, file in sorted(files, key=lambda item: -item[1].lines):
            if file.functions:
                functions = sorted(file.functions, key=lambda function: function.line)
                listed = ", ".join(f"{each.name}:{each.line} {each.lines}" for each in functions)
                lines = f"{file.lines:5} of {file.of:4}"
                console.print(f"{lines}  [bold]{name}[/]  {listed}", highlight=False)
    console.print("\n[bold]features that are entered[/]")
    for line in reading.entered_features():
        console.print(line)
    console.print("\n[bold]words of features in the core[/]")
    for name, counts in words_of_features(ROOT / PACKAGE).items():
        console.print(f"{name}: {', '.join(f'{word} {count}' for word, count in counts.items())}")


def as_json(package: Path, reading: Reading) -> dict[str, Any]:
    return {
        "figures": all_figures(package, reading),
        "functions": {
            phase: {name: [each.name for each in file.functions] for name, file in files.items()}
            for phase, files in reading.phases.items()
        },
        "features": reading.entered_features(),
        "imports": imports_of_features(package),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="list files and functions too")
    parser.add_argument(
        "--beside", type=Path, action="append", default=[], help="another checkout, in a column"
    )
    parser.add_argument("--blocks", type=int, default=24, help="of the model")
    parser.add_argument("--json", type=Path, help="write this in place of a table, without FSDP2")
    args = parser.parse_args()
    packages = [root.resolve() / PACKAGE for root in (ROOT, *args.beside)]
    if args.json is None:
        packages.append(FSDP2)
    # Each is imported in a process of its own. Forked ones do not import torch again.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        readings = pool.starmap(measure, [(each, args.blocks) for each in packages], chunksize=1)
    if args.json is not None:
        written = list(map(as_json, packages, readings))
        args.json.write_text(json.dumps(written))
        return
    console = Console()
    names = ["ours", *map(str, args.beside), "FSDP2"]
    columns = dict(zip(names, map(all_figures, packages, readings), strict=True))
    console.print(table_of(columns | {"aim": AIMS}))
    if args.files:
        print_files(console, readings[0])


if __name__ == "__main__":
    main()
