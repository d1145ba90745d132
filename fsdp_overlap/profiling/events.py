"""The events of a Chrome trace, one after the other, so that a large one need not fit in memory."""

import gzip
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

Event = dict[str, Any]

# Characters: read at once, and of one event.
_CHUNK = 1 << 20
_LONGEST = 1 << 24
_GZIP = b"\x1f\x8b"
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def read_events(trace: str | os.PathLike[str] | dict[str, Any]) -> Iterator[Event]:
    """The events of a trace file, gzipped or not, or of the loaded JSON object.

    Raises:
        ValueError: it is no Chrome trace, or not a whole one.
    """
    if isinstance(trace, dict):
        if not isinstance(trace.get("traceEvents"), list):
            raise ValueError("not a Chrome trace: it has no list 'traceEvents'")
        yield from trace["traceEvents"]
        return
    path = Path(trace)
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP
    opened: Any = partial(gzip.open, mode="rt") if is_gzip else open
    with opened(path, encoding="utf-8") as text:
        try:
            yield from _events_in(text)
        except (ValueError, EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is not a Chrome trace: {error}") from None


def _events_in(text: IO[str]) -> Iterator[Event]:
    decode = json.JSONDecoder().raw_decode
    held = ""
    while (begin := _EVENTS.search(held)) is None:
        if not (chunk := text.read(_CHUNK)):
            raise ValueError("it has no list 'traceEvents'")
        held += chunk
    at = begin.end()
    while True:
        at = _end_of_gap(held, at)
        if held.startswith("]", at):
            return
        try:
            event, at = decode(held, at)
        except json.JSONDecodeError as error:  # cut by the end of the chunk, if by nothing else
            if len(held) - at > _LONGEST or not (chunk := text.read(_CHUNK)):
                raise ValueError(f"an event of 'traceEvents' does not end: {error}") from None
            held, at = held[at:] + chunk, 0
        else:
            yield event


def _end_of_gap(held: str, at: int) -> int:
    gap = _BETWEEN.match(held, at)
    assert gap is not None  # it may be empty
    return gap.end()
