"""Pickles read as data: nothing that a pickle names is imported, and nothing is called."""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from fsdp_overlap.checkpoint.errors import CheckpointError

_MOST_BYTES = 1 << 30  # of one value; a file with holes could claim any number

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
_MARK = object()


@dataclass(frozen=True)
class Maker:
    """Stands for a class or function that a pickle may name: ``make``, ours, is called for it."""

    make: Callable[..., Any]


@dataclass(eq=False)
class Record:
    """What would have been an object: the class's name, constructor arguments and state."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None


def record(kind: str) -> Maker:
    """A class whose objects become Records of ``kind``."""
    return Maker(lambda *args: Record(kind, args))


def read_pickle(
    file: BinaryIO,
    admitted: Mapping[str, Any],
    where: str,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of the pickle that starts at ``file``'s position.

    Args:
        admitted: by ``module.name``, what stands for the globals that the pickle may name:
            a :class:`Maker`, or the value itself.
        where: names the pickle in errors.
        persistent: from a persistent id to what it stands for.

    Raises:
        CheckpointError: the pickle names another global, uses an opcode that no checkpoint needs,
            or is damaged.
    """
    try:
        return _Machine(admitted, persistent).run(_Bounded(file))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from None


class _Machine:
    """The stack machine that a pickle is a program for, less all that could run code."""

    def __init__(
        self, admitted: Mapping[str, Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        self.admitted = admitted
        self.persistent = persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, file: Any) -> Any:
        stack, memo = self.stack, self.memo
        argument: Any
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name in _VALUES:
                stack.append(argument)
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in _TUPLES:
                count = _TUPLES[name]
                stack[-count:] = [tuple(stack[-count:])]
            elif name == "MARK":
                stack.append(_MARK)
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "STOP":
                value = stack.pop()
                if stack:
                    raise ValueError("values are left on the stack")
                return value
            elif name not in ("PROTO", "FRAME"):
                self._step(name, argument)
        raise ValueError("it does not end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name == "APPEND":
            item = stack.pop()
            self._top(list).append(item)
        elif name == "APPENDS":
            items = self._since_mark()
            self._top(list).extend(items)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._top(dict)[key] = value
        elif name == "SETITEMS":
            items = self._since_mark()
            self._top(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "ADDITEMS":
            items = self._since_mark()
            self._top(set).update(items)
        elif name == "GLOBAL":
            stack.append(self._admit(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._admit(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            args, maker = stack.pop(), stack.pop()
            if not isinstance(maker, Maker) or not isinstance(args, tuple):
                raise ValueError("something that is no class is called")
            stack.append(maker.make(*args))
        elif name == "BUILD":
            state = stack.pop()
            self._top(Record).state = state
        elif name == "BINPERSID" and self.persistent is not None:
            stack.append(self.persistent(stack.pop()))
        else:
            raise CheckpointError(f"opcode {name}, which no checkpoint needs, is refused")

    def _admit(self, name: str) -> Any:
        try:
            return self.admitted[name]
        except KeyError:
            raise CheckpointError(
                f"{name} is refused: a checkpoint needs tensors, numbers, strings and containers "
                "of these, nothing else"
            ) from None

    def _top(self, kind: type[Any]) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"a {kind.__name__} was expected")
        return self.stack[-1]

    def _since_mark(self) -> list[Any]:
        stack = self.stack
        for position in range(len(stack) - 1, -1, -1):
            if stack[position] is _MARK:
                items = stack[position + 1 :]
                del stack[position:]
                return items
        raise ValueError("a mark is missing")


class _Bounded:
    """What pickletools reads from a file, but never more at once than a checkpoint could need."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        if size > _MOST_BYTES:
            raise ValueError(f"one value claims {size:,} bytes")
        return self._file.read(size)

    def readline(self) -> bytes:
        return self._file.readline(1 << 16)
