"""The files of a checkpoint: regular ones, with bytes where they say so."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from fsdp_overlap.checkpoint.errors import CheckpointError

_HOLES_FROM = 1 << 20  # bytes; less is no bomb, and a sparse copy of zeros is no lie


def file_size(path: Path) -> int:
    """Bytes of the regular file at ``path``.

    Raises:
        CheckpointError: there is none.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; a complete checkpoint has it") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file, as those of a checkpoint are")
    return status.st_size


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """The file at ``path``, for reading.

    Raises:
        CheckpointError: it cannot be opened.
    """
    file_size(path)
    try:
        file = FileIO(str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    with file:
        yield file


def refuse_holes(file: FileIO, start: int, length: int) -> None:
    """For what is about to be held in memory: a file with holes may claim any number of bytes.

    Raises:
        ValueError: bytes ``[start, start + length)`` were never written.
    """
    if length < _HOLES_FROM or not hasattr(os, "SEEK_HOLE"):
        return
    try:
        hole = os.lseek(file.fileno(), start, os.SEEK_HOLE)
    except OSError:  # the file system knows of none
        return
    if hole < start + length:
        raise ValueError(f"it claims {length:,} bytes, and from {hole - start:,} on is a hole")
