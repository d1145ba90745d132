"""What mypy believes of a user's program is so when it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
