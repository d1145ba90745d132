"""Values in a checkpoint beside tensors and containers, and a function for each name in a pickle
that makes its value of the pickled object's state and arguments."""

from __future__ import annotations

import io
import os
import pathlib
import re
from collections import OrderedDict
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from math import prod
from typing import Any

import torch

from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.checkpoint.unpickler import Global, hashable

_MAX_BITS = 64
_MAX_DIMS = 64

DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}


def size_of(value: Any) -> int:
    """Return the number of bytes or items of ``value``. A tensor's do not count, because a storage
    is read once."""
    if isinstance(value, io.BytesIO):
        return value.getbuffer().nbytes
    if isinstance(value, (bytes, bytearray, set, frozenset)):
        return len(value)
    is_array = hasattr(value, "nbytes") and not isinstance(value, torch.Tensor)
    return int(value.nbytes) if is_array else 0


def count(value: Any) -> int:
    """Return ``value`` if it is a possible number of elements."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        shown = f"{value:,}" if type(value) is int else f"a {type(value).__name__}"
        raise ValueError(f"{shown} is no number of elements")
    return value


def make_size(state: Any, value: Any) -> torch.Size:
    """Return a pickle's ``value`` as a shape."""
    if not isinstance(value, tuple) or len(value) > _MAX_DIMS:
        raise ValueError(f"a {type(value).__name__} is no shape, or none of {_MAX_DIMS} dimensions")
    return torch.Size([count(n) for n in value])


def checked(value: Any, kind: type[Any]) -> Any:
    """Return ``value`` if it is of ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__} was expected, not a {type(value).__name__}")
    return value


def _call(make: Callable[..., Any], *kinds: type[Any]) -> Callable[..., Any]:
    """Return a function that calls ``make`` if all arguments are of ``kinds``."""

    def make_checked(state: Any, *args: Any) -> Any:
        for arg in args:
            if not isinstance(arg, kinds):
                raise ValueError(f"a {make.__name__} made of a {type(arg).__name__}")
            if isinstance(arg, int) and arg.bit_length() > _MAX_BITS:  # these may share one hash
                raise ValueError(f"a {make.__name__} of numbers of more than {_MAX_BITS} bits")
        return make(*args)

    return make_checked


def _make_device(state: Any, kind: str, index: Any = None) -> torch.device:
    if index is not None and not count(index) < 1 << 7:
        raise ValueError(f"device {index:,}")
    return torch.device(checked(kind, str), index)


def _make_bytes(state: Any, text: str = "", encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise ValueError("bytes in an encoding that pickle does not use")
    return text.encode("latin1")


def _make_set(state: Any, items: Any) -> set[Any]:
    return set(map(hashable, checked(items, list)))


def _make_frozenset(state: Any, items: Any) -> frozenset[Any]:
    return frozenset(_make_set(state, items))


def _make_bytes_io(state: Any) -> io.BytesIO:
    content, position, attributes = checked(state, tuple)
    if attributes:
        raise ValueError("a BytesIO with attributes")
    file = io.BytesIO(checked(content, bytes))
    file.seek(checked(position, int))
    return file


def _make_dtype(state: Any, code: str, *_: Any) -> Any:
    byte_order = checked(state, tuple)[1]
    if not re.fullmatch(r"[?biufcSU]\d{0,6}", checked(code, str)) or byte_order not in (
        "<",
        ">",
        "|",
    ):
        raise ValueError(f"dtype {code[:20]!r} of numpy is none of plain numbers or text")
    return _numpy().dtype(code).newbyteorder(byte_order)


def _make_scalar(state: Any, dtype: Any, content: bytes) -> Any:
    (value,) = _numpy().frombuffer(checked(content, bytes), checked(dtype, _numpy().dtype))
    return value


def _make_array(state: Any, *_: Any) -> Any:
    _version, shape, dtype, is_fortran, content = checked(state, tuple)
    itemsize = checked(dtype, _numpy().dtype).itemsize
    if prod(checked(shape, tuple)) * itemsize != len(checked(content, bytes)):
        raise ValueError("an array whose shape does not fit its bytes")
    order = "F" if is_fortran else "C"
    return _numpy().ndarray(shape, dtype, bytearray(content), order=order)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise CheckpointError("it holds values of numpy, which is not installed") from None
    return numpy


def _paths() -> dict[str, type[pathlib.PurePath]]:
    """Return the classes of paths by name: pure ones for those of another operating system."""
    posix, windows = pathlib.PurePosixPath, pathlib.PureWindowsPath
    return {
        "PurePosixPath": posix,
        "PureWindowsPath": windows,
        "PosixPath": posix if os.name == "nt" else pathlib.PosixPath,
        "WindowsPath": pathlib.WindowsPath if os.name == "nt" else windows,
    }


_MAKERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": make_size,
    "torch.device": _make_device,
    # As pickle protocol 2 writes them, which torch.save uses: by Python 2's names.
    "_codecs.encode": _make_bytes,
    "__builtin__.bytes": _make_bytes,
    "__builtin__.bytearray": _call(bytearray, bytes),
    "__builtin__.complex": _call(complex, float),
    "__builtin__.frozenset": _make_frozenset,
    "__builtin__.set": _make_set,
    "__builtin__.slice": _call(slice, int, type(None)),
    "__builtin__.xrange": _call(range, int),
    "_io.BytesIO": _make_bytes_io,
    **{
        f"datetime.{kind.__name__}": _call(kind, int, str, bytes, timedelta, timezone)
        for kind in (date, datetime, time, timedelta, timezone)
    },
    **{
        f"{module}.{name}": _call(kind, str)
        for module in ("pathlib", "pathlib._local")
        for name, kind in _paths().items()
    },
    "numpy.dtype": _make_dtype,
    **{
        f"numpy.{core}.multiarray.{name}": make
        for core in ("core", "_core")
        for name, make in (("scalar", _make_scalar), ("_reconstruct", _make_array))
    },
}

ALLOWED: dict[str, Any] = {
    **DTYPES,
    **{name: Global(make) for name, make in _MAKERS.items()},
    "numpy.ndarray": None,  # an argument of _reconstruct, which makes nothing else
}
"""The names that a pickle may use for these values."""
