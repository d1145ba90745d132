"""Tables on the documents' pages, and the tests that they name."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of all tables on the page, row by row, without the heads."""
    lines = page.splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line, below in itertools.pairwise([*lines, ""])
        if line.startswith("| ") and not below.startswith("|---")
    ]


def named_tests_in(cell: str) -> list[tuple[str, str]]:
    """Return the tests that a cell names, each as its file and its name, or "" for all of a file.

    Cells have `file::name`, or `file`. Asserts that they exist.
    """
    named = re.findall(r"`(test_\w+)(?:::(test_\w+))?`", cell)
    for file, test in named:
        [path] = TESTS.rglob(f"{file}.py")
        source = path.read_text()
        assert f"def {test}(" in source if test else source
    return named


def linked_code_in(page: str) -> list[tuple[str, str]]:
    """Return the functions, methods and classes that a page links, each as its file in the package
    and its name."""
    found = re.findall(r"\[`([\w.]+)`\]\(\.\./fsdp_overlap/([\w/]+\.py)\)", page)
    return [(file, name) for name, file in found]
