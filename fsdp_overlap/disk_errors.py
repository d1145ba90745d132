"""Errors of writing that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what the disk says as an error about ``path``.

    Errors of writing do not name the file, and libraries raise others on top of them: the zip
    writer of ``torch.save`` says "unexpected pos" where a disk is full.

    Raises:
        OSError: with ``path`` as its ``filename``.
    """
    try:
        yield
    except Exception as error:
        cause = _disk_error(error)
        if cause is None or cause.filename is not None:
            raise
        raise OSError(cause.errno, cause.strerror, os.fspath(path)) from error


def _disk_error(error: BaseException | None) -> OSError | None:
    """Return the error of the operating system that led to ``error``."""
    while error is not None and not (isinstance(error, OSError) and error.errno is not None):
        error = error.__cause__ or error.__context__
    return error
