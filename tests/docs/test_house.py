"""No import runs in a circle or back up, in the package and its folders. Tests stand alone.

Imports for types and within functions count as all others do.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.pages import ROOT, TESTS, rows_of

PACKAGE = "fsdp_overlap"
DESIGN = (ROOT / "docs" / "design.md").read_text()
SECTION = DESIGN.partition("\n## 3. Layers\n")[2].partition("\n## 4. ")[0]
TOOLS = "tools"
LINES_OF_A_FUNCTION = 80
"""At most, without its signature and its docstring."""

Imports = Mapping[str, set[str]]
"""What each module imports, of all modules that are looked at."""


# ---- what is read ----


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of_package() -> dict[str, Path]:
    """The package's modules by their dotted names. A folder is the module in its `__init__`."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return {name.removesuffix(".__init__"): path for name, path in zip(names, files, strict=True)}


def module_of(name: str, modules: Mapping[str, object]) -> str | None:
    """The module that an imported name is, or stands in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def read_imports(files: Mapping[str, Path]) -> Imports:
    imports: dict[str, set[str]] = {}
    for module, path in files.items():
        found = {module_of(name, files) for name in imported_names(path)}
        imports[module] = {name for name in found if name not in (None, module)}
    return imports


def read_layers(section: str) -> dict[str, int]:
    """The layer of each folder, and of each file that has a row of its own. The package's other
    files have that of the package."""
    rows = [row for row in rows_of(section) if row[1].isdigit()]
    return {re.findall(r"`([\w/]+?)(?:/|\.py)`", row[0])[0]: int(row[1]) for row in rows}


def read_trees(section: str) -> dict[str, list[list[str]]]:
    """The files of each folder that is listed from the bottom up, line by line."""
    trees: dict[str, list[list[str]]] = {}
    for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL):
        for line in block.splitlines():
            if folder := re.fullmatch(r"(\w+)/", line):
                trees[folder[1]] = lines = []
            elif names := re.match(r"  (\w+(?:, \w+)*) ", line):
                lines.append(names[1].split(", "))
    return trees


# ---- what is held ----


def circle_in(imports: Imports) -> list[str]:
    """One circle: each name imports the next, and the last is the first. Empty if there is none."""
    try:
        TopologicalSorter({one: sorted(names) for one, names in imports.items()}).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return []


def folder_in(layers: Mapping[str, int], module: str) -> str:
    """The row of a module: its folder, its own, or that of the package."""
    first, *rest = module.removeprefix(f"{PACKAGE}.").split(".")
    if first == TOOLS and rest:
        return f"{TOOLS}/{rest[0]}"
    return first if first in layers else PACKAGE


def problems_of(imports: Imports, layers: Mapping[str, int]) -> list[str]:
    """What is wrong with these imports: each import that runs up, and circles."""
    folder_of = {module: folder_in(layers, module) for module in imports}
    of_folders: dict[str, set[str]] = {folder: set() for folder in layers}
    problems = []
    for module, names in imports.items():
        here = folder_of[module]
        for name in sorted(names):
            there = folder_of[name]
            if layers[there] > layers[here]:
                problems.append(f"up: {module} (layer {layers[here]}) imports {name}")
            if there != here:
                of_folders[here].add(there)
    circles = [circle_in(graph) for graph in (imports, of_folders)]
    return problems + [f"circle: {' imports '.join(circle)}" for circle in circles if circle]


FILES = files_of_package()
IMPORTS = read_imports(FILES)
LAYERS = read_layers(SECTION)
TREES = read_trees(SECTION)


def test_no_import_runs_in_a_circle_or_back_up() -> None:
    assert not problems_of(IMPORTS, LAYERS)


def test_every_folder_and_every_file_outside_of_one_is_in_the_table_of_layers() -> None:
    modules = [module for module in FILES if module not in (PACKAGE, f"{PACKAGE}.{TOOLS}")]
    assert {folder_in(LAYERS, module) for module in modules} == LAYERS.keys()
    own = {path.stem for path in (ROOT / PACKAGE).glob("*.py")} - {"__init__"}
    [row] = [row[2] for row in rows_of(SECTION) if f"`{PACKAGE}/`" in row[0]]
    assert own - LAYERS.keys() <= set(re.findall(r"`(\w+)`", row))


@pytest.mark.parametrize("folder", ["desync", "schedule", "engine"])
def test_files_that_are_listed_from_the_bottom_up_import_those_above_them_in_the_list(
    folder: str,
) -> None:
    line_of = {name: at for at, names in enumerate(TREES[folder]) for name in names}
    files = {path.stem for path in (ROOT / PACKAGE / folder).glob("*.py")} - {"__init__"}
    assert files == line_of.keys()
    for file in files:
        for name in IMPORTS[f"{PACKAGE}.{folder}.{file}"]:
            other = name.removeprefix(f"{PACKAGE}.{folder}.")
            assert other not in line_of or line_of[other] <= line_of[file], f"{file}: {other}"


def test_the_schedule_and_its_variants_import_the_standard_library_alone() -> None:
    folders = ("schedule", "features.module_lists", "features.negotiation")
    own = tuple(f"{PACKAGE}.{folder}" for folder in folders)
    for module, path in FILES.items():
        if module.startswith(own):
            for name in imported_names(path):
                is_own = name.startswith(own)
                assert is_own or name.split(".")[0] in sys.stdlib_module_names, f"{module}: {name}"


def test_only_the_program_imports_tools() -> None:
    tools = f"{PACKAGE}.{TOOLS}"
    assert {
        module
        for module, names in IMPORTS.items()
        if not module.startswith(tools) and any(name.startswith(tools) for name in names)
    } == {f"{PACKAGE}.__main__"}


def test_threads_are_made_where_they_choose_their_device() -> None:
    files = {
        path.relative_to(ROOT / PACKAGE).as_posix()
        for module, path in files_of_package().items()
        if not module.startswith(f"{PACKAGE}.{TOOLS}.")
        and re.search(r"\b(Thread|Timer|ThreadPoolExecutor|start_new_thread)\(", path.read_text())
    }
    assert files == {"comm/threads.py"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tool", ["emulator", "races"])
def test_the_emulated_device_does_not_load_the_sharder(tool: str) -> None:
    """It runs programs of FSDP2 and of others, too."""
    allowed = {f"{PACKAGE}.torch_internals", f"{PACKAGE}.{TOOLS}.torch_internals"}
    allowed |= {name for name in FILES if name.startswith(f"{PACKAGE}.{TOOLS}.{tool}")}
    if tool == "races":
        allowed |= {name for name in FILES if name.startswith(f"{PACKAGE}.{TOOLS}.emulator")}
    for module in (name for name in FILES if name.startswith(f"{PACKAGE}.{TOOLS}.{tool}")):
        assert IMPORTS[module] <= allowed, module
    code = f"import sys, {PACKAGE}.{TOOLS}.{tool}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {name for name in ran.stdout.split() if name.startswith(f"{PACKAGE}.")}
    assert f"{PACKAGE}.{TOOLS}.{tool}" in loaded
    assert loaded <= allowed | {f"{PACKAGE}.{TOOLS}"}


def lines_of_functions(text: str) -> Iterator[tuple[str, int]]:
    """The name of each function in ``text``, and the number of lines of its body."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            body = node.body[1:] if has_docstring else node.body
            yield node.name, body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    assert dict(lines_of_functions('def f(\n    a\n):\n    """A."""\n    a()\n\n    a()')) == {
        "f": 3
    }
    assert not [
        f"{module}: {name}"
        for module, path in FILES.items()
        for name, count in lines_of_functions(path.read_text())
        if count > LINES_OF_A_FUNCTION
    ]


def test_tests_do_not_import_each_other_and_all_else_is_in_support() -> None:
    for path in TESTS.rglob("*.py"):
        imported = {name.split(".")[0] for name in imported_names(path)}
        assert not [name for name in imported if name.startswith("test_")], path
        is_test = path.name.startswith("test_") or path.name == "conftest.py"
        assert is_test == (TESTS / "support" not in path.parents), path


# ---- that these tests can fail ----

SMALL_PACKAGE = {"ground": 0, "beside": 1, "upper": 1, PACKAGE: 2}


def names(**imports: str) -> Imports:
    """Modules as `folder_file`, of a package that has these."""
    full = {name: f"{PACKAGE}.{name.replace('_', '.')}" for name in imports}
    return {full[name]: {full[each] for each in text.split()} for name, text in imports.items()}


@pytest.mark.parametrize(
    ("imports", "problems"),
    [
        (names(top="upper_a ground_a", upper_a="ground_a upper_b", upper_b="", ground_a=""), []),
        (
            names(ground_a="ground_b", ground_b="ground_c", ground_c="ground_a"),
            ["circle: .ground.a imports .ground.b imports .ground.c imports .ground.a"],
        ),
        (
            names(ground_a="upper_a", upper_a=""),
            ["up: .ground.a (layer 0) imports .upper.a"],
        ),
        (names(upper_a="top", top=""), ["up: .upper.a (layer 1) imports .top"]),
        (
            names(upper_a="beside_a", beside_a="", beside_b="upper_b", upper_b=""),
            ["circle: beside imports upper imports beside"],
        ),
    ],
    ids=["sound", "circle", "up", "up to the package's files", "circle of folders"],
)
def test_circles_and_imports_that_run_up_are_found(imports: Imports, problems: list[str]) -> None:
    found = [problem.replace(f"{PACKAGE}.", ".") for problem in problems_of(imports, SMALL_PACKAGE)]
    assert found == problems


def test_imports_for_types_and_within_functions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import a.b.c as d\n"
        "if TYPE_CHECKING:\n"
        "    from a import e\n"
        "def f():\n"
        "    from a.g import h\n"
    )
    files = dict.fromkeys(("a", "a.b", "a.b.c", "a.e", "a.g"), path) | {"module": path}
    assert read_imports(files)["module"] == {"a.b.c", "a.e", "a.g"}


# ---- notes ----


def test_code_and_document_have_the_same_notes() -> None:
    """Code that relies on a rule of the schedule names the note in the document that explains
    it."""
    explained = re.findall(r"^#### Note \[([a-z ]+)\]$", DESIGN, re.MULTILINE)
    text = "".join(path.read_text() for path in files_of_package().values())
    named = re.findall(r"Note\s+(?:#\s+)?\[([a-z ]+)\]", text)
    assert len(explained) == len(set(explained))
    assert set(named) == set(explained)
