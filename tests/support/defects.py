"""Lines of the library that are left out, so that a test can miss them."""

from __future__ import annotations

import inspect
import textwrap
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch


class Defect(NamedTuple):
    """`method` with `new` in place of `old`, and a mode that shows the difference."""

    owner: Any
    """A class or a module."""
    method: str
    old: str
    mode: str
    new: str = "pass"

    def plant(self) -> AbstractContextManager[Any]:
        function = vars(self.owner)[self.method]
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.old!r} is in {self.method} no more"
        source = source.replace(self.old, self.new)
        planted: dict[str, Any] = {}
        code = compile(f"from __future__ import annotations\n{source}", "<planted>", "exec")
        exec(code, inspect.unwrap(function).__globals__, planted)
        return patch.object(self.owner, self.method, planted[self.method])
