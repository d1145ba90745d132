"""How many Python functions a step calls: what the host does, without the noise of its times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def count_calls(step: Callable[[], object], counts: Callable[[str], bool]) -> int:
    """The calls in a `step` of functions whose file `counts`."""
    answers: dict[CodeType, bool] = {}
    found = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        if event != "call":
            return
        code = frame.f_code
        if code not in answers:
            answers[code] = counts(code.co_filename.replace("\\", "/"))
        found += answers[code]

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found
