"""How long compute waits for communication, told to those who measure it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Meter(Protocol):
    """Measures waits. Is told of each, on the thread that waits."""

    def begin(self) -> Any: ...
    def end(self, begun: Any) -> None:
        """``begun`` is what :meth:`begin` returned when this wait began."""
        ...


present: list[Meter] = []
"""Those who measure. Ask whether there are any before you call :func:`begin`: as long as nobody
measures, a wait then costs nothing more."""

Begun = list[tuple[Meter, Any]]


def begin() -> Begun:
    """A wait begins."""
    return [(meter, meter.begin()) for meter in present]


def end(begun: Begun) -> None:
    """The wait ends for which :func:`begin` returned ``begun``."""
    for meter, mark in begun:
        meter.end(mark)


@contextmanager
def waiting() -> Iterator[None]:
    """Tells of a wait inside. For where few calls come by; :func:`begin` is faster."""
    begun = begin()
    yield
    end(begun)
