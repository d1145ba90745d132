"""What mypy believes of a user's program is so when it runs."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import fsdp_overlap
from support import typed_user_program as program
from support.ranks import run_ranks


@pytest.mark.parametrize(
    "part",
    [
        program.run_readme,
        program.returned,
        program.kept,
        program.checked,
        program.listed,
        program.refused,
    ],
)
def test_a_program_that_mypy_accepts_runs(part: Callable[[], None]) -> None:
    run_ranks(part, 2)


def test_names_come_from_where_type_checkers_find_them() -> None:
    """The package imports its names when they are asked for, and by statements for checkers."""
    tree = ast.parse(Path(fsdp_overlap.__file__).read_text())
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(checked.test) == "TYPE_CHECKING"
    found = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert found == fsdp_overlap._MODULE_OF
    assert {*fsdp_overlap.__all__} == found.keys() - {"FsdpModule"}
    for name, module in found.items():
        assert getattr(fsdp_overlap, name) is getattr(import_module(str(module)), name)
    with pytest.raises(AttributeError, match="has no attribute 'fully_shrad'"):
        fsdp_overlap.fully_shrad  # noqa: B018
