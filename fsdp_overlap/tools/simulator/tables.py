"""TOML files of hardware, by name or by path, with errors that say what to write."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "hardware"


class HardwareError(ValueError):
    """A device or a fabric is unknown, or its file is wrong. The message says what to write."""


@dataclass(frozen=True)
class Curve:
    """A share of a peak, which depends on a size: straight lines over the logarithm of the size
    between known points, and level outside of them."""

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        for (left, low), (right, high) in zip(self.points, self.points[1:], strict=False):
            if left <= size <= right:
                return low + (high - low) * math.log(size / left) / math.log(right / left)
        return self.points[0][1] if size <= self.points[0][0] else self.points[-1][1]


def shipped(kind: str) -> list[str]:
    """Return the names of the devices, or of the fabrics, that come with the library."""
    return sorted(path.stem for path in (SHIPPED / kind).glob("*.toml"))


class TomlTable:
    """A table of the file, which remembers what was not asked for."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values, self._where = values, where
        self._known: set[str] = set()
        self._tables: list[TomlTable] = []

    def __contains__(self, key: str) -> bool:
        self._known.add(key)
        return key in self._values

    def _get(self, key: str, what: str) -> Any:
        self._known.add(key)
        if key not in self._values:
            raise HardwareError(f"{self._where}: {key} is missing; write {what}")
        return self._values[key]

    def number(self, key: str, lowest: float, highest: float) -> float:
        what = f"{key} = a number from {lowest:g} to {highest:g}"
        value = self._get(key, what)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not lowest <= value <= highest:
            raise HardwareError(
                f"{self._where}: {key} = {value!r} is none; write {what}, in the unit that its "
                "name ends with"
            )
        return float(value)

    def text(self, key: str, of: tuple[str, ...] = ()) -> str:
        what = f'{key} = "..."' + (f", one of {', '.join(of)}" if of else "")
        value = self._get(key, what)
        if not isinstance(value, str) or (of and value not in of):
            raise HardwareError(f"{self._where}: {key} = {value!r} is none; write {what}")
        return value

    def curve(self, key: str, unit: float = 1.0) -> Curve:
        """Return shares by sizes: `{2 = 0.6, 8 = 0.8}` in the file."""
        what = f"{key} = {{2 = 0.6, 8 = 0.8}}: shares by sizes"
        values = self._get(key, what)
        try:
            points = sorted((float(size) * unit, float(share)) for size, share in values.items())
        except (AttributeError, TypeError, ValueError):
            points = []
        if not points or not all(size > 0 and 0 < share <= 1 for size, share in points):
            raise HardwareError(f"{self._where}: {key} = {values!r} is none; write {what}")
        return Curve(tuple(points))

    def table(self, key: str) -> TomlTable:
        value = self._get(key, f"a table [{key}]")
        if not isinstance(value, dict):
            raise HardwareError(f"{self._where}: {key} = {value!r} is none; write a table [{key}]")
        self._tables.append(table := TomlTable(value, f"{self._where}: [{key}]"))
        return table

    def tables(self, of: tuple[str, ...]) -> Iterator[tuple[str, TomlTable]]:
        """Return those of the names ``of`` that there are."""
        return ((key, self.table(key)) for key in of if key in self)

    def refuse_the_rest(self) -> None:
        for key in self._values.keys() - self._known:
            near = difflib.get_close_matches(key, self._known, 1, 0.4)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(self._known)}"
            raise HardwareError(f"{self._where}: {key} is unknown; {hint}")
        for table in self._tables:
            table.refuse_the_rest()


@contextmanager
def reading(kind: str, name_or_path: str | Path) -> Iterator[TomlTable]:
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = SHIPPED / kind / f"{name_or_path}.toml"
        if not path.is_file():
            names = ", ".join(shipped(kind))
            raise HardwareError(
                f"there is no {kind} {name_or_path!r}; there are {names}, or give the path of a "
                f".toml file like those in {SHIPPED / kind}"
            )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HardwareError(f"there is no file {path}") from None
    except ValueError as error:  # also of UTF-8
        raise HardwareError(f"{path}: {error}") from None
    table = TomlTable(values, str(path))
    yield table
    table.refuse_the_rest()
