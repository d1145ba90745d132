"""The examples in the documents run."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap import FsdpContext, fully_shard
from support import typed_user_program
from support.pages import ROOT, linked_code_in, named_tests_in, rows_of
from support.program import Program
from support.ranks import run_ranks
from support.zoo import Model

DOCS = ROOT / "docs"
ROOT = DOCS.parent
README = ROOT / "README.md"
PROGRAMS = r"(?<![^\s`])(?:scripts|tests)/"
PAGES = [README, *sorted(DOCS.glob("*.md"))]


def blocks_of(page: Path, language: str) -> list[str]:
    """The page's examples, each padded so that its line numbers are the page's."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]
    assert blocks
    assert len(blocks) == text.count(f"```{language}")
    return blocks


def test_the_program_in_the_readme_is_the_one_that_mypy_checks() -> None:
    page = DOCS.parent / "README.md"
    shown = [ast.unparse(line) for line in ast.parse(blocks_of(page, "python")[0]).body]
    [checked] = ast.parse(inspect.getsource(typed_user_program.readme)).body
    assert isinstance(checked, ast.FunctionDef)
    start = shown.index("ctx = FsdpContext()")
    assert shown[start:] == [ast.unparse(line) for line in checked.body]


def run_blocks(blocks: list[str], name: str) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "page",
    [
        "sharded_tensors.md",
        "checkpoints.md",
        "layouts.md",
        "muon.md",
        "offloading.md",
        "emulated_device.md",
        "scale.md",
        "cost_model.md",
    ],
)
def test_the_python_examples_run(page: str) -> None:
    run_ranks(run_blocks, 2, blocks_of(DOCS / page, "python"), page)


def run_blocks_in(folder: str, blocks: list[str], name: str) -> None:
    with contextlib.chdir(folder):
        run_blocks(blocks, name)


def test_the_examples_on_overlap_run(tmp_path: Path) -> None:
    page = DOCS / "overlap.md"
    run_ranks(run_blocks_in, 2, str(tmp_path), blocks_of(page, "python"), page.name)
    run_commands(page, tmp_path)
    assert (tmp_path / "overlap.html").exists()
    assert (tmp_path / "both" / "overlap.json").exists()


def run_commands(page: Path, folder: Path) -> None:
    """The page's commands, of fsdp-overlap all."""
    for line in "".join(blocks_of(page, "bash")).split("\n"):
        if not line:
            continue
        program, *arguments = shlex.split(line)
        assert program == "fsdp-overlap"
        process = Program(folder, arguments)
        _, err = process.communicate(timeout=150)
        assert process.returncode == 0, err


def write_and_load_what_changed(folder: str) -> None:
    [block] = [text for text in blocks_of(DOCS / "weights.md", "python") if "WeightDeltas" in text]
    model = Model()
    engine_weights = {name: w.bfloat16() for name, w in Model().state_dict().items()}
    ctx = FsdpContext()
    fully_shard(model, ctx)
    scope: dict[str, Any] = {"model": model, "steps": 3, "torch": torch, "version": 0}
    scope["engine_weights"] = engine_weights
    with contextlib.chdir(folder):
        exec(compile(block, "weights.md", "exec"), scope)
    assert scope["version"] == scope["deltas"].version
    for name, parameter in model.named_parameters():
        assert torch.equal(engine_weights[name], parameter.full_tensor().bfloat16())


def test_the_example_on_what_changed_runs(tmp_path: Path) -> None:
    run_ranks(write_and_load_what_changed, 1, str(tmp_path))


@pytest.mark.slow
def test_the_commands_on_checkpoints_run(tmp_path: Path) -> None:
    run_commands(DOCS / "checkpoints.md", tmp_path)
    assert (tmp_path / "small.pt").exists()
    assert (tmp_path / "small.safetensors").exists()


def test_every_fault_names_tests_that_exist() -> None:
    faults, heading, _ = (DOCS / "robustness.md").read_text().partition("## Random programs")
    assert heading
    for row in rows_of(faults):
        assert named_tests_in(row[-1]), row[0]


def test_the_readme_is_short_and_says_what_was_not_measured() -> None:
    text = README.read_text()
    assert len(text.split()) <= 450
    [row] = [line for line in text.splitlines() if "(docs/gpu.md#what-has-run)" in line]
    assert "simulated" in row
    caveats = text.partition("## What was not measured")[2].partition("\n## ")[0]
    assert "**Several GPUs.**" in caveats
    assert "(docs/emulated_device.md)" in caveats


def test_the_readme_changes_the_lines_that_the_page_on_moving_changes() -> None:
    [shown] = blocks_of(README, "diff")
    [ran] = blocks_of(DOCS / "fsdp2.md", "diff")

    def lines(block: str) -> list[str]:
        return [line.partition("  # or ")[0].rstrip() for line in block.strip("\n").splitlines()]

    assert lines(shown) == lines(ran)


def train_by_the_readme() -> None:
    [block] = blocks_of(README, "python")
    torch.manual_seed(0)
    model = Model().float()
    scope: dict[str, Any] = {"model": model, "batch": torch.arange(6).view(2, 3) + dist.get_rank()}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with mock.patch("torch.distributed.init_process_group"):  # the test has ranks
        exec(compile(block, README.name, "exec"), scope)
    after = [parameter.full_tensor() for parameter in model.parameters()]
    assert len([line for line in block.splitlines() if line]) == 12
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert scope["ctx"].stats.all_gathers > 0


def test_the_readmes_twelve_lines_train() -> None:
    run_ranks(train_by_the_readme, 2)


@pytest.mark.slow
def test_the_readmes_commands_run(tmp_path: Path) -> None:
    install, commands = blocks_of(README, "bash")
    assert "pip install ." in install
    train, report, compare, tests = (shlex.split(line) for line in commands.split("\n") if line)
    assert train[0] == "scripts/train.sh"
    assert report[0] == ".venv/bin/fsdp-overlap"
    assert compare[:2] == [".venv/bin/fsdp-overlap", "compare"]
    assert (ROOT / compare[2]).is_file()  # tests/tools/cli/test_cli_compare.py runs it
    assert tests == ["scripts/test.sh"]
    small = "--steps 4 --layers 2 --width 48 --eval-every 4 --save-every 4".split()
    for arguments in (["train", *train[1:], *small], report[1:]):
        process = Program(tmp_path, arguments)
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, err
        assert "of it exposed" in out
        assert (tmp_path / "runs" / "first" / "overlap.html").exists()


def test_the_citation_has_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (DOCS / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


# ---- links and commands ----


def anchors_of(page: Path) -> set[str]:
    """The names that a page's headings have, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def names_in(text: str) -> set[str]:
    """Return the classes, functions and methods of a file, methods as ``Class.method``."""
    kinds = ast.ClassDef, ast.FunctionDef
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, kinds):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, kinds)}
    return found


def test_code_that_pages_link_is_in_the_linked_file() -> None:
    package = ROOT / "fsdp_overlap"
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    names = {file: names_in(path.read_text()) for file, path in files.items()}
    linked = [(page.name, *link) for page in PAGES for link in linked_code_in(page.read_text())]
    assert len(linked) > 40
    wrong = [
        f"{page}: {name} is not in {file}, but in {[f for f in names if name in names[f]]}"
        for page, file, name in linked
        if name not in names.get(file, ())
    ]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


HAND_WRITTEN_WORDS = 27_000
MADE = ("curves.md", "fsdp2_features.md", "results.md")
"""Pages that programs write."""


def test_the_documents_are_short() -> None:
    pages = [*PAGES, *(DOCS / "reference").glob("*.md")]
    words = sum(len(page.read_text().split()) for page in pages if page.name not in MADE)
    assert words <= HAND_WRITTEN_WORDS, f"{words:,} words"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, found = set(), {README}
    while found:
        page = found.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text())
        found |= {(page.parent / link).resolve() for link in links} - reached
    assert set(PAGES) <= reached


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each command on a page that runs a script, a test or a test's program."""
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(rf"(?:^|`)([^`\n]*{PROGRAMS}\w[^`\n]*)", text, re.MULTILINE):
        words = command.split()
        while not re.match(PROGRAMS, words[0]):
            del words[0]
        yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_printed_command_has_its_script_and_options(page: Path) -> None:
    for script, *arguments in commands_of(page):
        path = ROOT / script
        assert path.exists(), script
        if path.is_dir() or script == "scripts/test.sh":  # which takes pytest's
            continue
        source = path.read_text()
        if script == "scripts/train.sh":
            cli = ROOT / "fsdp_overlap" / "tools" / "cli"
            source = (cli / "main.py").read_text() + (cli / "config.py").read_text() + "--help"
        if script == "scripts/gpu_suite.sh":
            source += (ROOT / "scripts" / "bench" / "gpu_suite.py").read_text()
        if common := re.search(r"options\.parser\([^)]*\)", source):
            names = re.findall(r"(\w+)=", common[0])
            source += " ".join("--" + name.replace("_", "-") for name in names)
        if common or "add_output(parser)" in source:
            source += "--json"
        for option in (argument for argument in arguments if argument.startswith("--")):
            name = option.removeprefix("--").replace("-", "_")
            assert option in source or f" {name}: Annotated[" in source, f"{script} {option}"


def test_docstrings_say_what_they_are_about_first() -> None:
    """None begins with "Of". That of a module names what it holds or does, so it does not begin
    with "What", "How" and the like."""
    of_any = re.compile(r'\s*"""Of ')
    of_module = re.compile(r'"""(What|How|Whether|Which|When|Where|Why|Who|Whose)\b')
    wrong = []
    for path in (DOCS.parent / "fsdp_overlap").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if of_any.match(line)]
        if of_module.match(text):
            lines.append(text.partition("\n")[0])
        wrong += [f"{path.relative_to(ROOT)}: {line}" for line in lines]
    assert not wrong
