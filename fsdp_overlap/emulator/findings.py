"""What the model has found, with the lines of the program to look at."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_THREADS = threading.__file__
_POOLS = str(Path(futures.__file__).parent)

_of_thread = threading.local()

# By file name, the part of it that is shown: empty if it is torch's, the model's or of threads.
_short_names: dict[str, str] = {}


@dataclass(frozen=True)
class Finding:
    """A fault. ``kind`` is ``"race"`` (two operations on the same memory that nothing orders),
    ``"reuse"`` (the same, and the memory has another owner since the first), ``"freed"`` (use of
    memory that was freed), ``"context"`` (a thread takes another device for its own) or
    ``"order"`` (ranks whose communicators run in different orders)."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Sync:
    """The host waited for the device in ``operation``, which was called at ``place``."""

    operation: str
    place: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.place}"


def call_site() -> str:
    """Return the innermost line of the program that is neither torch's nor the model's, as
    ``file:line in function``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        short = _short_names.get(name)
        if short is None:
            is_of_program = not name.startswith((_HERE, _TORCH, _THREADS, _POOLS, "<"))
            short = _short_names[name] = "/".join(Path(name).parts[-2:]) if is_of_program else ""
        if short:
            return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return getattr(_of_thread, "place", "the end of the program")


@contextmanager
def attributed_to(where: str) -> Iterator[None]:
    """Attribute what this thread does within to the line ``where`` of another one, unless the
    program has a line here."""
    _of_thread.place = where
    try:
        yield
    finally:
        del _of_thread.place
