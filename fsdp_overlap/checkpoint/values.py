"""Values that are neither tensors nor containers: which ones an entry may hold, and how each is
made of what its pickle says.

While a pickle is read, a :class:`Record` stands for such a value. It is made afterwards, so that
what is made altogether can be bounded.
"""

from __future__ import annotations

import io
import os
import pathlib
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from math import prod
from typing import Any

from fsdp_overlap.checkpoint.errors import CheckpointError
from fsdp_overlap.checkpoint.pickles import Maker, Record

_MOST_BITS = 64  # of a number in a range; larger ones could be chosen to share one hash


def nbytes_of(value: Any) -> int:
    """Return how many bytes ``value``, one that is made here, holds, apart from a constant."""
    if isinstance(value, io.BytesIO):
        return value.getbuffer().nbytes
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    nbytes = getattr(value, "nbytes", 0)  # of an array
    return nbytes if isinstance(nbytes, int) else 0


def _encoded(state: None, text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError("bytes in an encoding that pickle does not use")
    return text.encode("latin1")


def _no_bytes(state: None) -> bytes:
    return b""


def _bytearray(state: None, content: bytes = b"") -> bytearray:
    return bytearray(_a(bytes, content))


def _bytes_io(state: Any) -> io.BytesIO:
    content, position, attributes = _a(tuple, state)
    if attributes:
        raise ValueError("a BytesIO with attributes")
    file = io.BytesIO(_a(bytes, content))
    file.seek(_a(int, position))
    return file


def _range(state: None, *numbers: int) -> range:
    if any(_a(int, number).bit_length() > _MOST_BITS for number in numbers):
        raise ValueError(f"a range of numbers of more than {_MOST_BITS} bits")
    return range(*numbers)


def _slice(state: None, *parts: Any) -> slice:
    return slice(*parts)


def _temporal(kind: Callable[..., Any]) -> Callable[..., Any]:
    def make(state: None, *parts: Any) -> Any:
        for part in parts:
            if not isinstance(part, (int, str, bytes, timedelta, timezone)):
                raise ValueError("a time made of what tells no time")
        return kind(*parts)

    return make


def _path(kind: type[pathlib.PurePath]) -> Callable[..., pathlib.PurePath]:
    def make(state: None, *parts: str) -> pathlib.PurePath:
        return kind(*(_a(str, part) for part in parts))

    return make


def _dtype(state: Any, code: str, *_: Any) -> Any:
    byte_order = _a(tuple, state)[1]
    if not re.fullmatch(r"[?biufcSU]\d{0,6}", _a(str, code)) or byte_order not in ("<", ">", "|"):
        raise ValueError(f"dtype {code[:20]!r} of numpy is none of plain numbers or text")
    return _numpy().dtype(code).newbyteorder(byte_order)


def _scalar(state: None, dtype: Any, content: bytes) -> Any:
    (value,) = _numpy().frombuffer(_a(bytes, content), _a(_numpy().dtype, dtype))
    return value


def _array(state: Any, *_: Any) -> Any:
    _version, shape, dtype, is_fortran, content = _a(tuple, state)
    if prod(_a(tuple, shape)) * _a(_numpy().dtype, dtype).itemsize != len(_a(bytes, content)):
        raise ValueError("an array whose shape does not fit its bytes")
    order = "F" if is_fortran else "C"
    return _numpy().ndarray(shape, dtype, bytearray(content), order=order)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise CheckpointError("it holds values of numpy, which is not installed") from None
    return numpy


def _a(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__} was expected, not a {type(value).__name__}")
    return value


def _paths() -> dict[str, type[pathlib.PurePath]]:
    """Return the classes of paths by name. What another kind of machine has is a pure path here."""
    posix, windows = pathlib.PurePosixPath, pathlib.PureWindowsPath
    return {
        "PurePosixPath": posix,
        "PureWindowsPath": windows,
        "PosixPath": posix if os.name == "nt" else pathlib.PosixPath,
        "WindowsPath": pathlib.WindowsPath if os.name == "nt" else windows,
    }


_MAKERS: dict[str, Callable[..., Any]] = {
    # As pickle protocol 2 writes them, which torch.save uses: by Python 2's names.
    "_codecs.encode": _encoded,
    "__builtin__.bytes": _no_bytes,
    "__builtin__.bytearray": _bytearray,
    "__builtin__.xrange": _range,
    "__builtin__.slice": _slice,
    "_io.BytesIO": _bytes_io,
    **{f"datetime.{kind.__name__}": _temporal(kind) for kind in (date, datetime, time)},
    **{f"datetime.{kind.__name__}": _temporal(kind) for kind in (timedelta, timezone)},
    **{
        f"{module}.{name}": _path(kind)
        for module in ("pathlib", "pathlib._local")
        for name, kind in _paths().items()
    },
    "numpy.dtype": _dtype,
    **{
        f"numpy.{core}.multiarray.{name}": make
        for core in ("core", "_core")
        for name, make in (("scalar", _scalar), ("_reconstruct", _array))
    },
}


def _standing_for(make: Callable[..., Any]) -> Maker:
    return Maker(lambda *args: Record(make, args=args))


ADMITTED: dict[str, Any] = {
    "numpy.ndarray": None,  # an argument of _reconstruct, which makes nothing else
    **{name: _standing_for(make) for name, make in _MAKERS.items()},
}
"""What a pickle may name for these values. To make one, call the record's ``kind`` with its state
and its arguments."""
