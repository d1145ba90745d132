"""Reads pickles as data: nothing that a pickle names is imported or called."""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from fsdp_overlap.checkpoint.errors import CheckpointError

_MOST_ARGUMENTS = 256  # of one call; only a path might need so many, one for each of its parts
_MOST_IN_KEY = 64  # items of a tuple, and bits of a number
_MOST_OF_A_LINE = 1 << 16  # bytes
_MOST_OF_A_NAME = 200  # characters, in errors

# Opcodes whose argument is the value itself.
_VALUES = frozenset(
    """
    BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES
    SHORT_BINBYTES BINBYTES8
    """.split()
)
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Maker:
    """Stands for a class or function that a pickle may name: our ``make`` is called instead.

    ``make`` must be fast and must not multiply its arguments: a pickle may call it with the same
    ones at every few bytes.
    """

    make: Callable[..., Any]


@dataclass(eq=False, repr=False)  # hashing or printing one must not look at its state
class Record:
    """Stands for an object: its kind, its state, and the arguments that it is made of."""

    kind: Any
    state: Any = None
    args: tuple[Any, ...] = ()


def record(kind: str) -> Maker:
    """Stands for a class whose objects become Records of ``kind``, without arguments."""
    return Maker(lambda *_: Record(kind))


def key(value: Any) -> Any:
    """Returns ``value`` if it is sure to hash fast.

    Nested tuples take as long to hash as there are paths through them, and large numbers can be
    chosen to share one hash.

    Raises:
        ValueError: it may hash slowly.
    """
    if isinstance(value, str):  # as nearly all are
        return value
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) > _MOST_IN_KEY or any(
        isinstance(part, (tuple, frozenset))
        or (isinstance(part, int) and part.bit_length() > _MOST_IN_KEY)
        for part in parts
    ):
        raise ValueError("a key is no string, number or short tuple of these")
    return value


def read_pickle(
    file: BinaryIO,
    size: int,
    admitted: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of the pickle in the next ``size`` bytes of ``file``.

    Args:
        admitted: the globals that the pickle may name, by ``module.name``. For each, a
            :class:`Maker`, or the value itself.
        persistent: returns what a persistent id stands for.

    Raises:
        CheckpointError: the pickle names another global or uses an opcode that no checkpoint needs.
        Exception: the pickle is damaged.
    """
    source = _Bounded(file, size)
    value = _Machine(admitted, persistent).run(source)
    if source.left:
        raise ValueError(f"{source.left:,} bytes are left after the end")
    return value


class _Machine:
    """The stack machine that a pickle is a program for, without all that could run code."""

    def __init__(
        self, admitted: Mapping[str, Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        self.admitted = admitted
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []  # the stack's length at each mark
        self.memo: dict[int, Any] = {}

    def run(self, file: _Bounded) -> Any:
        stack, memo = self.stack, self.memo
        argument: Any
        for opcode, argument, _ in pickletools.genops(file):  # type: ignore[arg-type]
            name = opcode.name
            if name in _VALUES:
                stack.append(argument)
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "MEMOIZE":
                memo[len(memo)] = self._top()
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = self._top()
            elif name in _TUPLES:
                count = _TUPLES[name]
                self._top(count)
                stack[-count:] = [tuple(stack[-count:])]
            elif name == "MARK":
                self.marks.append(len(stack))
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "STOP":
                value = self._pop()
                if stack or self.marks:
                    raise ValueError("values are left on the stack")
                return value
            elif name == "FRAME":
                file.claim(argument)
            elif name != "PROTO":
                self._step(name, argument)
        raise ValueError("it does not end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name == "APPEND":
            item = self._pop()
            self._a(list).append(item)
        elif name == "APPENDS":
            items = self._since_mark()
            self._a(list).extend(items)
        elif name == "SETITEM":
            value, at = self._pop(), self._pop()
            self._a(dict)[key(at)] = value
        elif name == "SETITEMS":
            items = self._since_mark()
            self._a(dict).update(zip(map(key, items[::2]), items[1::2], strict=True))
        elif name == "ADDITEMS":
            items = self._since_mark()
            self._a(set).update(map(key, items))
        elif name == "GLOBAL":
            stack.append(self._admit(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(), self._pop()
            stack.append(self._admit(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            args, maker = self._pop(), self._pop()
            if not isinstance(maker, Maker) or not isinstance(args, tuple):
                raise ValueError("something that is no class is called")
            if len(args) > _MOST_ARGUMENTS:
                raise ValueError(f"a call with {len(args):,} arguments")
            stack.append(maker.make(*args))
        elif name == "BUILD":
            state = self._pop()
            self._a(Record).state = state
        elif name == "BINPERSID" and self.persistent is not None:
            stack.append(self.persistent(self._pop()))
        else:
            raise CheckpointError(f"opcode {name}, which no checkpoint needs, is refused")

    def _admit(self, module: Any, attribute: Any) -> Any:
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise ValueError("a name is no string")
        name = f"{module}.{attribute}"
        if name not in self.admitted:
            raise CheckpointError(
                f"{name[:_MOST_OF_A_NAME]!r} is refused: a checkpoint needs tensors, numbers, "
                "strings, other plain values and containers of these, nothing else"
            )
        return self.admitted[name]

    def _top(self, count: int = 1) -> Any:
        """The topmost value. Raises unless there are ``count`` values since the last mark."""
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise ValueError("a value is missing on the stack")
        return self.stack[-1]

    def _pop(self) -> Any:
        self._top()
        return self.stack.pop()

    def _a(self, kind: type[Any]) -> Any:
        if not isinstance(self._top(), kind):
            raise ValueError(f"a {kind.__name__} was expected")
        return self.stack[-1]

    def _since_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("a mark is missing")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


class _Bounded:
    """A file for pickletools that gives out at most ``size`` bytes, and refuses larger claims."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.left = file, size

    def claim(self, count: int) -> None:
        if count > self.left:
            raise ValueError(f"{count:,} bytes are claimed where {self.left:,} are left")

    def read(self, count: int) -> bytes:
        self.claim(count)
        self.left -= count
        return self._file.read(count)

    def readline(self) -> bytes:
        line = self._file.readline(min(self.left, _MOST_OF_A_LINE))
        self.left -= len(line)
        return line
