"""Read the events of a Chrome trace."""

import gzip
import json
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

Progress = Callable[[int], None]
"""Called with how many bytes of the file have been read."""

_CHUNK = 1 << 20  # characters that are read at once
_NOTHING: dict[str, Any] = {}
_GZIP = b"\x1f\x8b"
_SKIPPED = object()
"""In place of an event that is of no use."""
_IMPOSSIBLE = object()
"""In place of an event whose duration is none."""
# Profilers write what never ended as negative, or as an unsigned number that wrapped around.
_LONGEST = 24 * 3600e6
COLLECTIVE_NAME = "Collective name"
# "args" are most of a trace, so only these of device events and collectives are kept.
_WITH_ARGS = ("kernel", "cuda_runtime", "cuda_driver")
_ARGS = (
    "correlation",
    "device",
    "stream",
    COLLECTIVE_NAME,
    "Process Group Name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Input Dims",
    "Input type",
)


class TraceEvent(NamedTuple):
    """A range of time on a thread or a stream, in microseconds on the trace's clock."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    args: dict[str, Any]


class Trace(NamedTuple):
    """One rank's trace. events: in the order of the file. about: the file's other entries, such as
    `distributedInfo`. left_out: how many events had an impossible duration."""

    events: list[TraceEvent]
    about: dict[str, Any]
    left_out: int


def read_trace(
    source: Any, keep: Callable[[str, str], bool], progress: Progress | None = None
) -> Trace:
    """Return the events of a trace whose category and name `keep` accepts.

    `source`: the path of a file, gzipped or not; the loaded JSON object; or a finished
    `torch.profiler.profile`. This writes the profile's trace, which torch does only once.

    Raises:
        ValueError: it is not a Chrome trace, or not a whole one; or the profile's trace was written
            before.
    """
    if hasattr(source, "export_chrome_trace"):
        with _exported(source) as path:
            return read_trace(path, keep, progress)

    def prune(values: dict[str, Any]) -> Any:
        """Return what is of use of an event, and all of any other JSON object."""
        if "ph" not in values:
            return values
        try:
            is_kept = values["ph"] == "X" and keep(values.get("cat", ""), values["name"])
            return _read_event(values) if is_kept else _SKIPPED
        except (AttributeError, ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise _unreadable(values, repr(error)) from None

    trace = source if isinstance(source, dict) else load_trace(source, prune, progress)
    events, left_out = [], 0
    for value in events_of(trace):
        event = prune(value) if isinstance(value, dict) else value  # a loaded object's is not yet
        if isinstance(event, TraceEvent):
            events.append(event)
        elif event is _IMPOSSIBLE:
            left_out += 1
        elif event is not _SKIPPED:
            raise _unreadable(value, "no 'ph'")
    about = {key: value for key, value in trace.items() if key != "traceEvents"}
    return Trace(events, about, left_out)


def load_trace(
    path: str | os.PathLike[str],
    prune: Callable[[dict[str, Any]], Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the JSON object in a file, gzipped or not. Each object in it is as ``prune`` returns
    it.

    Raises:
        ValueError: the file holds none.
    """
    try:
        with Path(path).open("rb") as file:
            is_gzip = file.read(2) == _GZIP
            file.seek(0)
            unpacked = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_gzip else file
            data = bytearray()
            while chunk := unpacked.read(_CHUNK):
                data += chunk
                if progress is not None:
                    progress(file.tell())
        trace = json.loads(data.decode("utf-8", "replace"), object_hook=prune)
    except (json.JSONDecodeError, EOFError, RecursionError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"not a Chrome trace: {error}") from None
    if not isinstance(trace, dict):
        raise ValueError("not a Chrome trace: it is no JSON object")
    return trace


def events_of(trace: dict[str, Any]) -> list[Any]:
    """Return the events of a loaded trace.

    Raises:
        ValueError: it has none.
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("not a Chrome trace: it has no list 'traceEvents'")
    return events


def has_possible_duration(event: Mapping[str, Any]) -> bool:
    """Return whether an event lasts from no time to a day."""
    return bool(0 <= event.get("dur", 0.0) <= _LONGEST)


def _read_event(values: dict[str, Any]) -> Any:
    name, category, start = values["name"], values.get("cat", ""), values["ts"]
    if not -math.inf < start < math.inf:
        raise ValueError("it starts at no time")
    if not has_possible_duration(values):
        return _IMPOSSIBLE
    args = values.get("args") or _NOTHING
    if category not in _WITH_ARGS and not name.startswith("c10d::") and COLLECTIVE_NAME not in args:
        args = _NOTHING
    return TraceEvent(
        sys.intern(name),
        sys.intern(category),
        values.get("tid"),
        start,
        start + values.get("dur", 0.0),
        {key: args[key] for key in _ARGS if key in args},
    )


def _unreadable(value: Any, why: str) -> ValueError:
    return ValueError(f"not a Chrome trace: cannot read the event {str(value)[:200]} ({why})")


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
