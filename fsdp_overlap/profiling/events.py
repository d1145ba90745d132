"""Reads the events of a Chrome trace one by one, so that a large trace need not fit in memory."""

import gzip
import io
import json
import math
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

# Characters that are read at once, the most that one event may have, and the most that there may be
# before and behind all events.
_CHUNK = 1 << 20
_LONGEST = 1 << 22
_MOST_BESIDE = 1 << 24
_KEY = 100  # characters that "traceEvents" and the gaps behind it have
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


class TraceError(ValueError):
    """Something is no Chrome trace, or not a whole one. The message says what, and where."""


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
        TraceError: it is not a Chrome trace, or not a whole one.
        ValueError: the profile's trace was written before.
    """
    if hasattr(source, "export_chrome_trace"):
        with _exported(source) as path:
            return read_trace(path, keep, progress)
    trace = Trace()
    events = raw_events(source, trace.about, progress)
    for event in events:
        try:
            if event["ph"] == "X" and keep(event.get("cat", ""), event["name"]):
                trace.events.append(_read_event(event))
        except (AttributeError, ArithmeticError, KeyError, TypeError, ValueError) as error:
            said = f"cannot read the event {str(event)[:200]} ({error!r})"
            raise TraceError(f"{events.place}: not a Chrome trace: {said}") from None
    return trace


def _read_event(event: dict[str, Any]) -> Event:
    name, category, start = event["name"], event.get("cat", ""), event["ts"]
    end = start + event.get("dur", 0.0)
    if not -math.inf < start <= end < math.inf:
        raise ValueError("its times are none")
    has_args = category in _WITH_ARGS or name.startswith("c10d::")
    return Event(
        sys.intern(name),
        sys.intern(category),
        event.get("tid"),
        start,
        end,
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


def raw_events(
    source: dict[str, Any] | str | os.PathLike[str],
    about: dict[str, Any],
    progress: Progress | None = None,
) -> "_EventsInObject | _EventsInFile":
    """The events of a trace as its JSON has them, one by one. The other entries come to ``about``.

    Raises:
        TraceError: while they are read, if the source is not a Chrome trace, or not a whole one.
    """
    if isinstance(source, dict):
        return _EventsInObject(source, about)
    return _EventsInFile(Path(source), about, progress or (lambda _: None))


class _EventsInObject:
    place = "the loaded trace"

    def __init__(self, trace: dict[str, Any], about: dict[str, Any]) -> None:
        self._trace, self._about = trace, about

    def __iter__(self) -> Iterator[dict[str, Any]]:
        events = self._trace.get("traceEvents")
        if not isinstance(events, list):
            raise TraceError(f"{self.place}: not a Chrome trace: it has no list 'traceEvents'")
        self._about.update({key: v for key, v in self._trace.items() if key != "traceEvents"})
        yield from events


class _EventsInFile:
    def __init__(self, path: Path, about: dict[str, Any], progress: Progress) -> None:
        self._path, self._about, self._progress = path, about, progress
        self._held, self._at = "", 0
        """The text that was read last, and where the next event in it begins."""
        self._lines = 0
        """Ends of lines before the text that is held."""

    @property
    def place(self) -> str:
        """Where the event that came last stands."""
        return f"{self._path}, line {self._lines + self._held.count(chr(10), 0, self._at) + 1}"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP
            file.seek(0)
            unpacked = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_gzip else file
            text = io.TextIOWrapper(unpacked, encoding="utf-8", errors="replace")

            def read(least: int = 0) -> str:
                chunk = text.read(max(_CHUNK, least))
                self._progress(file.tell())
                return chunk

            try:
                yield from self._parse(read)
            except (ValueError, EOFError, RecursionError, gzip.BadGzipFile, zlib.error) as error:
                raise TraceError(f"{self.place}: not a Chrome trace: {error}") from None

    def _parse(self, read: Callable[..., str]) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        self._find_events(read)
        while True:
            self._at = _end_of_gap(self._held, self._at)
            if self._held.startswith("]", self._at):
                break
            try:
                event, end = decode(self._held, self._at)
            except json.JSONDecodeError as error:  # most likely cut by the end of the chunk
                length = len(self._held) - self._at
                # Twice as much each time: a long event is parsed in time that grows with it.
                if length > _LONGEST or not (chunk := read(length)):
                    self._at = error.pos
                    raise ValueError(
                        f"an event of 'traceEvents' does not end, or is wrong: {error.msg}"
                    ) from None
                self._hold(self._held[self._at :] + chunk)
            else:
                yield event
                self._at = end
        rest = self._held[self._at + 1 :]
        while chunk := read():
            rest += chunk
            if len(rest) > _MOST_BESIDE:
                raise ValueError(f"it has more than {_MOST_BESIDE >> 20} MiB behind 'traceEvents'")
        self._about.update(json.loads("{" + rest.lstrip(" \t\r\n,")))

    def _find_events(self, read: Callable[..., str]) -> None:
        while (begin := _EVENTS.search(self._held, self._at)) is None:
            # What may be a part of the key is looked at again.
            self._at = max(0, len(self._held) - _KEY)
            if len(self._held) > _MOST_BESIDE:
                raise ValueError(f"its first {_MOST_BESIDE >> 20} MiB have no list 'traceEvents'")
            if not (chunk := read()):
                raise ValueError("it has no list 'traceEvents'")
            self._held += chunk
            if not self._held.lstrip().startswith("{"):
                raise ValueError("it is no JSON object")
        self._about.update(json.loads(self._held[: begin.start()] + '"traceEvents": []}'))
        self._at = begin.end()

    def _hold(self, text: str) -> None:
        """Forgets what was read, and holds ``text`` instead, which begins at the next event."""
        self._lines += self._held.count("\n", 0, self._at)
        self._held, self._at = text, 0


def _end_of_gap(held: str, at: int) -> int:
    gap = _BETWEEN.match(held, at)
    assert gap is not None  # it may be empty
    return gap.end()
