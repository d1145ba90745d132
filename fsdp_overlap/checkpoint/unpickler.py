"""Unpickle a checkpoint as data: nothing that its pickles name is imported or called.

torch's weights-only unpickler cannot stand in for this. It reads pickle protocol 2 alone, and DCP
writes its metadata in protocol 4. It also calls what it allows with whatever arguments a pickle
gives, so ``bytearray(1 << 40)`` allocates a terabyte, and it hashes keys that take forever.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_overlap.checkpoint.files import CheckpointError

_MAX_KEY_ITEMS = 64
_MAX_KEY_BITS = 64
_MAX_NAME_LENGTH = 200  # in errors

# All that `pickle` and `torch.save` write for the values of a checkpoint.
_ALLOWED_OPCODES = """
    APPEND APPENDS BINBYTES BINBYTES8 BINFLOAT BINGET BININT BININT1 BININT2 BINPERSID BINPUT
    BINUNICODE BINUNICODE8 BUILD EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME GLOBAL LONG1 LONG_BINGET
    LONG_BINPUT MARK MEMOIZE NEWFALSE NEWOBJ NEWTRUE NONE PROTO REDUCE SETITEM SETITEMS
    SHORT_BINBYTES SHORT_BINUNICODE STACK_GLOBAL STOP TUPLE TUPLE1 TUPLE2 TUPLE3
""".split()
_OPCODES = {opcode.code: opcode.name for opcode in pickletools.opcodes}


@dataclass(frozen=True, eq=False, repr=False)
class Global:
    """An allowed class or function. ``make(state, *args)`` makes its object later."""

    make: Callable[..., Any]


class Record:
    """An object of a pickle: its class, the arguments of its constructor and its state.

    It hashes by identity, because its parts may take forever to hash.
    """

    __slots__ = ("args", "make", "state")

    def __init__(self, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.make, self.args, self.state = make, args, None


def hashable(value: Any) -> Any:
    """Return ``value`` if it surely hashes fast.

    Nested tuples take as long to hash as there are paths through them, and large numbers can be
    chosen to have equal hashes.

    Raises:
        ValueError: it may hash slowly.
    """
    if isinstance(value, str):  # as most are
        return value
    items = value if isinstance(value, tuple) else (value,)
    if len(items) > _MAX_KEY_ITEMS or any(
        isinstance(item, (tuple, frozenset))
        or (isinstance(item, int) and item.bit_length() > _MAX_KEY_BITS)
        for item in items
    ):
        raise ValueError("a key is no string, number or short tuple of these")
    return value


def unpickle(
    data: bytes,
    allowed: Mapping[str, Any],
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value of a pickle, with a :class:`Record` in place of each object.

    Args:
        allowed: by ``module.name``, a :class:`Global` or the value itself. Other names are refused.
        persistent_load: returns the object of a persistent id.

    Raises:
        CheckpointError: the pickle names something else, or has an opcode that no checkpoint needs.
        Exception: the pickle is damaged.
    """
    file = io.BytesIO(data)
    unpickler = _Unpickler(file, allowed, persistent_load)
    try:
        value = unpickler.load()
    except EOFError:
        raise ValueError("the pickle ends early") from None
    except (IndexError, KeyError):
        raise ValueError("the pickle takes a value that is not there") from None
    if unpickler.stack or unpickler.metastack:
        raise ValueError("values are left on the stack")
    if left := len(data) - file.tell():
        raise ValueError(f"{left:,} bytes are left after the end")
    return value


class _Dispatch(dict[int, Callable[..., None]]):
    """The method for each opcode."""

    def __missing__(self, code: int) -> Callable[..., None]:
        name = _OPCODES.get(chr(code), f"{code:#x}")
        raise CheckpointError(f"opcode {name}, which no checkpoint needs, is refused")


class _Unpickler(pickle._Unpickler):
    """The standard library's unpickler with few opcodes: the one in Python, since the one in C
    allocates as many bytes as a pickle claims to have."""

    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        file: io.BytesIO,
        allowed: Mapping[str, Any],
        persistent_load: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(file)
        self._allowed, self._persistent_load = allowed, persistent_load

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in self._allowed:
            raise CheckpointError(
                f"{full_name[:_MAX_NAME_LENGTH]!r} is refused: a checkpoint needs tensors, "
                "numbers, strings, other plain values and containers of these, nothing else"
            )
        return self._allowed[full_name]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise CheckpointError("a persistent id, which no metadata needs, is refused")
        return self._persistent_load(pid)

    def load_call(self) -> None:
        args, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, Global) or not isinstance(args, tuple):
            raise ValueError("something that is no class is called")
        # SETITEMS needs the dict itself.
        is_dict = called.make is OrderedDict and not args
        self.append(OrderedDict() if is_dict else Record(called.make, args))

    def load_build(self) -> None:
        state = self.stack.pop()
        self._top(Record).state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._top(dict)[hashable(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._top(dict).update(zip(map(hashable, items[::2]), items[1::2], strict=True))

    def _top(self, kind: type[Any]) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"a {kind.__name__} was expected")
        return self.stack[-1]

    dispatch = _Dispatch(
        {
            ord(code): pickle._Unpickler.dispatch[ord(code)]
            for code, name in _OPCODES.items()
            if name in _ALLOWED_OPCODES
        }
    )
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_call
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
