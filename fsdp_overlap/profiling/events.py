"""Reads the events of a Chrome trace one by one, so that a large trace need not fit in memory."""

import gzip
import io
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

Progress = Callable[[int], None]
"""Called with how many bytes of the file have been read."""

# Characters that are read at once, and the most that one event may have.
_CHUNK = 1 << 20
_LONGEST = 1 << 24
_NOTHING: dict[str, Any] = {}
_GZIP = b"\x1f\x8b"
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
# "args" are most of a trace, so only these of device events and c10d ops are kept.
_WITH_ARGS = ("kernel", "cuda_runtime", "cuda_driver")
_ARGS = (
    "correlation",
    "stream",
    "Collective name",
    "Process Group Name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Input Dims",
    "Input type",
)


class Event(NamedTuple):
    """A range of time on a thread or a stream, in microseconds on the trace's clock."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    args: dict[str, Any]


@dataclass
class Trace:
    """One rank's trace. events: in the order of the file. about: the file's other entries, such as
    `distributedInfo`."""

    events: list[Event] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


def read_trace(
    source: Any, keep: Callable[[str, str], bool], progress: Progress | None = None
) -> Trace:
    """The events of a trace whose category and name `keep` accepts.

    `source`: the path of a file, gzipped or not; the loaded JSON object; or a finished
    `torch.profiler.profile`. This writes the profile's trace, which torch does only once.

    Raises:
        ValueError: it is not a Chrome trace, or not a whole one; or the profile's trace was written
            before.
    """
    if hasattr(source, "export_chrome_trace"):
        with _exported(source) as path:
            return read_trace(path, keep, progress)
    trace = Trace()
    events = (
        _events_in_object(source, trace.about)
        if isinstance(source, dict)
        else _events_in_file(source, trace.about, progress or (lambda _: None))
    )
    for event in events:
        try:
            if event.get("ph") == "X" and keep(event.get("cat", ""), event["name"]):
                trace.events.append(_read_event(event))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"not a Chrome trace: cannot read the event {str(event)[:200]} ({error!r})"
            ) from None
    return trace


def _read_event(event: dict[str, Any]) -> Event:
    name, category, start = event["name"], event.get("cat", ""), event["ts"]
    has_args = category in _WITH_ARGS or name.startswith("c10d::")
    return Event(
        sys.intern(name),
        sys.intern(category),
        event.get("tid"),
        start,
        start + event.get("dur", 0.0),
        _of_use(event.get("args", _NOTHING)) if has_args else _NOTHING,
    )


def _of_use(args: dict[str, Any]) -> dict[str, Any]:
    return {key: args[key] for key in _ARGS if key in args}


@contextmanager
def _exported(profile: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fsdp_overlap_") as folder:
        path = Path(folder) / "trace.json"
        try:
            profile.export_chrome_trace(str(path))
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            raise ValueError(
                "the profile's trace has been written, which torch does only once: pass the path "
                "of the file that export_chrome_trace() wrote"
            ) from None
        except (AttributeError, AssertionError):
            raise ValueError("the profile has no trace yet: leave its `with` block first") from None
        yield path


def _events_in_object(trace: dict[str, Any], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not isinstance(trace.get("traceEvents"), list):
        raise ValueError("not a Chrome trace: it has no list 'traceEvents'")
    about.update({key: value for key, value in trace.items() if key != "traceEvents"})
    yield from trace["traceEvents"]


def _events_in_file(
    source: str | os.PathLike[str], about: dict[str, Any], progress: Progress
) -> Iterator[dict[str, Any]]:
    path = Path(source)
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP
        file.seek(0)
        unpacked = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_gzip else file
        text = io.TextIOWrapper(unpacked, encoding="utf-8", errors="replace")

        def read() -> str:
            chunk = text.read(_CHUNK)
            progress(file.tell())
            return chunk

        try:
            yield from _events_in_text(read, about)
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a Chrome trace: {error}") from None


def _events_in_text(read: Callable[[], str], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder().raw_decode
    held = ""
    while (begin := _EVENTS.search(held)) is None:
        if not (chunk := read()):
            raise ValueError("it has no list 'traceEvents'")
        held += chunk
    about.update(json.loads(held[: begin.start()] + '"traceEvents": []}'))
    at = begin.end()
    while True:
        at = _end_of_gap(held, at)
        if held.startswith("]", at):
            break
        try:
            event, at = decode(held, at)
        except json.JSONDecodeError as error:  # most likely cut by the end of the chunk
            if len(held) - at > _LONGEST or not (chunk := read()):
                raise ValueError(f"an event of 'traceEvents' does not end: {error}") from None
            held, at = held[at:] + chunk, 0
        else:
            yield event
    rest = held[at + 1 :]
    while chunk := read():
        rest += chunk
    about.update(json.loads("{" + rest.lstrip(" \t\r\n,")))


def _end_of_gap(held: str, at: int) -> int:
    gap = _BETWEEN.match(held, at)
    assert gap is not None  # it may be empty
    return gap.end()
