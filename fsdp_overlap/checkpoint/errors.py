"""What is wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or asks for what no checkpoint needs."""


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Makes whatever goes wrong inside a :class:`CheckpointError` about ``where``.

    For code in which only what a stranger wrote decides whether it works: nobody can list all that
    a damaged file makes of its parsers.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error
