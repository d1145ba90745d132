"""The lines of a program and of its libraries that call an operation.

Looked up for each operation, so a site is a small tuple that is formatted only where it is shown.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_PACKAGE = Path(__file__).parents[2]
_TORCH = Path(torch.__file__).parent
_STDLIB = Path(os.__file__).parent

# What of this package runs programs, and is no part of them.
_OWN = (
    str(_PACKAGE / "__main__.py"),
    *(
        str(_PACKAGE / "tools" / name)
        for name in ("cli", "emulator", "races", "torch_internals.py")
    ),
)

# What of torch decides by itself what to enqueue and where. The rest of torch does what it is told.
_LIBRARIES_OF_TORCH = tuple(
    str(_TORCH / name)
    for name in (
        "amp/grad_scaler.py",
        "distributed/_composable",
        "distributed/algorithms",
        "distributed/checkpoint",
        "distributed/fsdp",
        "distributed/optim",
        "distributed/pipelining",
        "distributed/tensor/parallel",
        "nn/parallel",
        "nn/utils",
        "optim",
        "utils/checkpoint.py",
    )
)

_SKIPPED, _LIBRARY, _PROGRAM = range(3)

# By file name: which of the three it is.
_kinds: dict[str, int] = {}


class Line(NamedTuple):
    """A line of a file, and the function that it is in."""

    file: str
    number: int
    function: str

    @property
    def short(self) -> str:
        """The name of the file without its folders, and the line."""
        return f"{Path(self.file).name}:{self.number}"

    @property
    def place(self) -> str:
        """The file as it is best found, and the line."""
        return f"{_shown(self.file)}:{self.number}"

    def __str__(self) -> str:
        return f"{self.place} in {self.function}"


class Site(NamedTuple):
    """Where an operation is called: the innermost line of the program, the innermost line of a
    library that the program called there, and, for what a node of autograd's graph does, the site
    of its forward."""

    program: Line | None = None
    library: Line | None = None
    forward: Site | None = None

    @property
    def lines(self) -> dict[str, Line]:
        """The lines that are known, by what they are of."""
        forward = None if self.forward is None else self.forward.innermost
        lines = {"program": self.program, "library": self.library, "forward": forward}
        return {of: line for of, line in lines.items() if line is not None}

    @property
    def innermost(self) -> Line | None:
        return self.library or self.program

    @property
    def place(self) -> str:
        """The line to look at first."""
        line = self.program or self.library
        return "the end of the program" if line is None else line.place

    def __str__(self) -> str:
        if self.innermost is None:
            return "the end of the program"
        text = str(self.innermost)
        if self.library is not None and self.program is not None:
            text += f", from {self.program}"
        if "forward" in self.lines:
            text += f", backward of {self.lines['forward']}"
        return text


class _ThreadSites(threading.local):
    """Where the calls of a thread come from, as far as its own stack does not say."""

    def __init__(self) -> None:
        self.caller = Site()
        self.forward: Site | None = None


_of_thread = _ThreadSites()


def call_site() -> Site:
    """Return where the program and its libraries make the call that is under way."""
    library = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        kind = _kinds.get(file)
        if kind is None:
            kind = _kinds[file] = _kind_of(file)
        if kind == _PROGRAM:
            line = Line(file, frame.f_lineno, code.co_name)
            return Site(line, library, _of_thread.forward)
        if kind == _LIBRARY and library is None:
            library = Line(file, frame.f_lineno, code.co_name)
        frame = frame.f_back
    caller = _of_thread.caller
    return Site(caller.program, library or caller.library, _of_thread.forward)


def line_of(error: BaseException) -> Line | None:
    """Return the innermost line of the program that ``error`` passed."""
    found = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _kind_of(code.co_filename) == _PROGRAM:
            found = Line(code.co_filename, number, code.co_name)
    return found


@contextmanager
def attributed_to(caller: Site) -> Iterator[None]:
    """Attribute what this thread does within to a site of another one, unless the program has a
    line here."""
    before = _of_thread.caller, _of_thread.forward
    _of_thread.caller = caller
    try:
        yield
    finally:
        _of_thread.caller, _of_thread.forward = before


def enter_node_of(forward: Site | None) -> Site | None:
    """Let this thread do what a node does whose forward was called at ``forward``; ``None`` if
    none is under way. Return what it was before."""
    before, _of_thread.forward = _of_thread.forward, forward
    return before


def _kind_of(file: str) -> int:
    packages = _packages_of(file)
    if file.startswith(("<", *_OWN)):
        return _SKIPPED
    if packages is not None and file.startswith(str(packages / "triton") + os.sep):
        return _SKIPPED
    if file.startswith(str(_TORCH) + os.sep):
        return _LIBRARY if file.startswith(_LIBRARIES_OF_TORCH) else _SKIPPED
    if file.startswith(str(_PACKAGE) + os.sep) or packages is not None:
        return _LIBRARY
    return _SKIPPED if file.startswith(str(_STDLIB) + os.sep) else _PROGRAM


def _packages_of(file: str) -> Path | None:
    """Return the folder of installed packages that ``file`` is in."""
    for folder in Path(file).parents:
        if folder.name in ("site-packages", "dist-packages"):
            return folder
    return None


def _shown(file: str) -> str:
    path = Path(file)
    for folder in (_packages_of(file), _TORCH.parent, _PACKAGE.parent, Path.cwd()):
        if folder is not None and path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return "/".join(path.parts[-2:])
