"""The site of the documents: what is on it, and how texts are rewritten for it.

Its pages are built, and all their links followed, by scripts/site.sh.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import fsdp_overlap
from rewriting import rewrite_page, roles_to_markdown, soften_tables, summary_of
from support.pages import ROOT

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
CONFIG = (ROOT / "scripts" / "site" / "mkdocs.yml").read_text()


def public_packages() -> list[ModuleType]:
    names = [item.name for item in pkgutil.iter_modules(fsdp_overlap.__path__) if item.ispkg]
    packages = [importlib.import_module(f"fsdp_overlap.{name}") for name in names]
    return [fsdp_overlap, *(package for package in packages if hasattr(package, "__all__"))]


PACKAGES = public_packages()
packages = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)


def page_of(package: ModuleType) -> str:
    return (REFERENCE / f"{package.__name__.rpartition('.')[2]}.md").read_text()


# ---- what is on it ----


@packages
def test_every_public_name_is_on_the_page_of_its_package(package: ModuleType) -> None:
    page = page_of(package)
    described = {path.rpartition(".")[2]: path for path in re.findall(r"^::: (\S+)$", page, re.M)}
    for name in package.__all__:
        assert name in described or f"`{name}`" in page, name
    for name, path in described.items():
        assert name in package.__all__, path
        assert pkgutil.resolve_name(path) is getattr(package, name), path


def documented_assignments() -> set[str]:
    """The names that modules of the package assign, with a docstring behind."""
    found = set()
    for path in (ROOT / "fsdp_overlap").rglob("*.py"):
        body = ast.parse(path.read_text()).body
        for line, text in pairwise(body):
            if (
                isinstance(line, ast.Assign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found |= {target.id for target in line.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.sampled(5)
@packages
def test_every_public_name_has_a_docstring(package: ModuleType) -> None:
    assigned = documented_assignments()
    for name in package.__all__:
        value = getattr(package, name)
        if not inspect.isclass(value) and not inspect.isfunction(value):
            assert name in assigned, name
        elif not value.__module__.startswith("torch."):
            doc = vars(value)["__doc__"] if inspect.isclass(value) else value.__doc__
            assert doc, name
            assert not doc.startswith(f"{name}("), f"{name}: what dataclass() says of it"


def test_every_name_on_a_page_is_there() -> None:
    for page in REFERENCE.glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
            pkgutil.resolve_name(path)


def test_members_that_pages_choose_are_there() -> None:
    chosen = [
        (path, member)
        for page in REFERENCE.glob("*.md")
        for path, names in re.findall(
            r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", page.read_text(), re.M
        )
        for member in names.split(", ")
    ]
    assert chosen
    for path, member in chosen:
        cls = pkgutil.resolve_name(path)
        is_assigned = re.search(rf"self\.{member}\b.* = ", inspect.getsource(cls))
        assert hasattr(cls, member) or is_assigned, (path, member)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_every_page_is_in_the_menu(page: Path) -> None:
    assert re.search(rf"- (.+: )?{page.relative_to(DOCS)}\n", CONFIG)


# ---- how texts are rewritten ----


def rewritten(text: str, source: str, page: str, repository: str | None = None) -> str:
    return rewrite_page(text, source, page, repository)


@pytest.mark.parametrize(
    ("source", "page", "link", "expected"),
    [
        ("README.md", "index.md", "docs/muon.md#teams", "muon.md#teams"),
        ("README.md", "index.md", "docs/overlap.png", "overlap.png"),
        ("README.md", "index.md", "docs/examples/training.py", "examples/training.md"),
        ("docs/muon.md", "muon.md", "examples/slurm.sh", "examples/slurm.md"),
        ("docs/muon.md", "muon.md", "../README.md#use", "index.md#use"),
        ("docs/reference/optim.md", "reference/optim.md", "../muon.md", "../muon.md"),
        ("docs/muon.md", "muon.md", "#teams", "#teams"),
        ("docs/muon.md", "muon.md", "https://host/page.md", "https://host/page.md"),
    ],
)
def test_links_are_right_on_the_site(source: str, page: str, link: str, expected: str) -> None:
    assert rewritten(f"See [`a[0]` there]({link}).", source, page) == (
        f"See [`a[0]` there]({expected})."
    )


def test_a_file_that_is_not_on_the_site_is_named_or_found_in_the_repository() -> None:
    text = "See [the check](../tests/docs/test_site.py#L1)."
    named = rewritten(text, "docs/muon.md", "muon.md")
    assert named == "See the check (`tests/docs/test_site.py` in the repository)."
    found = rewritten(text, "docs/muon.md", "muon.md", "https://host/blob/main")
    assert found == "See [the check](https://host/blob/main/tests/docs/test_site.py#L1)."


def test_code_on_a_page_stays_as_it_is() -> None:
    code = "```python\na[0](b)  # Note [pairing]\n```"
    assert rewritten(code, "docs/muon.md", "muon.md") == code


def test_notes_are_links_but_for_their_own_headings() -> None:
    heading = "#### Note [order check]\n"
    text = rewritten(f"{heading}See Note [no gradient].", "docs/design.md", "design.md")
    assert text == rf"{heading}See [Note \[no gradient\]](design.md#note-no-gradient)."


def test_roles_become_links_where_the_name_is_known_and_code_elsewhere() -> None:
    paths = {"step": "package.Muon.step", "package.Muon": "package.Muon"}
    text = "Call :meth:`step` of :class:`~package.Muon`, not :func:`other`."
    assert roles_to_markdown(text, paths.get) == (
        'Call <autoref identifier="package.Muon.step" optional>`step()`</autoref> of '
        '<autoref identifier="package.Muon" optional>`Muon`</autoref>, not `other()`.'
    )


def test_long_code_in_tables_may_be_broken_and_other_code_not() -> None:
    assert soften_tables("<td><code>test_a.py</code> b_c</td><code>d_e</code>") == (
        "<td><code>test_a.<wbr>py</code> b_c</td><code>d_e</code>"
    )
    assert soften_tables("<td><code>(a_b(0.5))</code></td>") == (
        "<td><code>(a_<wbr>b(<wbr>0.5))</code></td>"
    )


@pytest.mark.parametrize(
    ("code", "summary"),
    [
        ('"""A loop with all: run it by\n\n    python x.py\n"""', "A loop with all."),
        ('"""Two stages,\nsharded. And more."""', "Two stages, sharded."),
        ("#!/bin/bash\n#SBATCH --nodes=2\n\n# Trains it. Long.\n#\nset -e\n", "Trains it."),
    ],
)
def test_an_example_is_summed_up_by_its_first_sentence(code: str, summary: str) -> None:
    assert summary_of(code) == summary
