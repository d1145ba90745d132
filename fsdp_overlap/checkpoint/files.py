"""Find the folder of a checkpoint, and open its files. Refuse those that are not regular or have
large holes."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from urllib.parse import unquote

from torch.distributed.checkpoint.filesystem import FileSystem

# Bytes. A shorter range cannot exhaust memory, and may have a hole because zeros were copied
# sparsely.
_MAX_HOLE_BYTES = 1 << 20
_BUFFER_BYTES = 4096  # for the headers around a tensor's elements

# Also as pathlib leaves them, without one of the slashes.
_FILE_URL = re.compile(r"(?i:file):(?://(?:localhost)?/|/(?!/)(?:localhost/)?)(.*)", re.DOTALL)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path that ``path`` means, which may be a URL of the scheme ``file``.

    Raises:
        ValueError: it is a URL of another scheme, or of another machine.
    """
    text = os.fspath(path)
    if (url := _FILE_URL.fullmatch(text)) is not None:
        return Path("/" + unquote(url[1]))
    if _URL.match(text) is not None:
        raise ValueError(
            f"{text}: not a folder on this machine; give one, such as /mnt/step-1 or "
            "file:///mnt/step-1. "
            "For other storage, mount it, or use torch's FsspecReader and FsspecWriter"
        )
    return Path(path)


class LocalFileSystem(FileSystem):
    """The file system of readers and writers, whose paths may be URLs of the scheme ``file``."""

    def init_path(self, path: str | os.PathLike[str]) -> Path:
        return local_path(path)


class CheckpointError(ValueError):
    """A checkpoint is damaged or incomplete, or contains something that no checkpoint needs."""


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Raise every exception as a :class:`CheckpointError` about ``where``.

    For code that fails only because of the content of a file: a damaged file can cause any
    exception in parsers.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error


def file_size(path: Path) -> int:
    """Return the size in bytes of the regular file at ``path``.

    Raises:
        CheckpointError: there is no file, or it is not a regular one.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; a complete checkpoint has it") from None
    if not stat.S_ISREG(status.st_mode):
        way_out = ""
        if stat.S_ISLNK(status.st_mode):
            way_out = (
                ", but a link, as in a cache of the Hugging Face Hub; if you trust what it leads "
                "to, load a copy that has the files themselves: cp -rL "
                f"{shlex.quote(str(path.parent))} FOLDER"
            )
        raise CheckpointError(
            f"{path} is not a regular file, as those of a checkpoint are{way_out}"
        )
    return status.st_size


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open the regular file at ``path`` for reading.

    Raises:
        CheckpointError: it cannot be opened, or is not a regular file.
    """
    file_size(path)
    try:
        file: BufferedReader = BufferedReader(FileIO(str(path)), _BUFFER_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    with file:
        yield file


def refuse_holes(file: BufferedReader, start: int, length: int) -> None:
    """Refuse a long range with a hole, before it is read into memory: a file with holes may claim
    any number of bytes.

    Raises:
        ValueError: some of the bytes ``[start, start + length)`` were never written.
    """
    if length < _MAX_HOLE_BYTES or not hasattr(os, "SEEK_HOLE"):
        return
    try:
        position = os.lseek(file.fileno(), 0, os.SEEK_CUR)  # as ``file`` assumes
        hole = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        os.lseek(file.fileno(), position, os.SEEK_SET)
    except OSError:  # the file system cannot tell
        return
    if hole < start + length:
        raise ValueError(f"it claims {length:,} bytes, and from {hole - start:,} on is a hole")
