"""Files that commands write, all of them or none, and the error for what cannot be done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from fsdp_overlap.checkpoint.files import local_path


class BadInput(ValueError):
    """Reported as one line on stderr with exit code 2, before anything is started or written."""


def takes_urls(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the paths that URLs among its paths mean. Raise BadInput for other storage."""

    @wraps(command)
    def with_local_paths(**options: Any) -> None:
        command(**{name: _local(value) for name, value in options.items()})

    return with_local_paths


def _local(value: Any) -> Any:
    if isinstance(value, list):
        return [_local(each) for each in value]
    try:
        return local_path(value) if isinstance(value, Path) else value
    except ValueError as error:
        raise BadInput(str(error)) from None


def check_writable(folder: Path) -> None:
    """Raise BadInput if no file can be written to `folder`, which need not be there. Make
    nothing; call it before long work."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise BadInput(f"{folder} is not a folder to write to: {error.strerror}") from None


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Yield a new folder. When the block ends, what it has written there replaces the files of the
    same names in `folder`. If one cannot be written, these stay as they are, and nothing is left of
    the new ones.

    Raises:
        BadInput: a file cannot be written, or not be moved.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=folder) as new:
            yield Path(new)
            for file in Path(new).rglob("*.*"):
                target = folder / file.relative_to(new)
                target.parent.mkdir(exist_ok=True)
                file.replace(target)
    except OSError as error:
        raise BadInput(f"{folder}: cannot write there: {error.strerror or error}") from None
