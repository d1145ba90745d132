"""The error that says what is wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or holds something that no checkpoint needs."""


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Turns every exception raised inside into a :class:`CheckpointError` about ``where``.

    It is for code that fails only because of what a file holds: nobody can list all the exceptions
    that a damaged file causes in parsers.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error
