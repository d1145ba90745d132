"""Pending optimizer steps of sharded parameters on a thread. Whoever reads or edits what they step
waits for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol


class PendingStep(Protocol):
    """A step that was handed to a thread."""

    def wait(self) -> None:
        """Block until the step is done.

        Raises:
            RuntimeError: it failed.
        """
        ...


PENDING: set[PendingStep] = set()
"""Those that are not done, or failed."""
os.register_at_fork(after_in_child=PENDING.clear)  # where their thread does not run


def finish_pending_steps() -> None:
    """Block until all steps are done.

    Raises:
        RuntimeError: one failed.
    """
    for step in list(PENDING):
        step.wait()


before_steps: list[Callable[[], None]] = []
"""Called before a thread edits shards, as torch's hooks are before an optimizer's step."""
