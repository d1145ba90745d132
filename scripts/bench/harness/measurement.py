"""What a benchmark measured: scripts write it as JSON, the summary and the plots read it.

A *figure* is one system's median and spread of a quantity. A *ratio* compares two systems: it is
the median of the ratios round by round, not the ratio of the medians. Systems take turns within a
round, so that what slows down the machine for a while hits both and leaves their ratio as it is.
Where a quantity was measured only once, median and spread are that value. All targets are upper
limits.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile (nearest rank), which one disturbed round cannot move
    far."""

    median: float
    p10: float
    p90: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered),
            ordered[round(0.1 * last)],
            ordered[round(0.9 * last)],
            len(ordered),
        )


@dataclass(frozen=True)
class Figure:
    """`quantity` of `system` in `unit`; `at`: where on the sweep of its measurement, if it has one;
    `at_most`: its target, in `unit`, if it has one."""

    quantity: str
    system: str
    unit: str
    spread: Spread
    at: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool | None:
        return _is_met(self.spread, self.at_most)


@dataclass(frozen=True)
class Ratio:
    """`quantity` of one system over that of another, both of which are figures at the same `at`;
    `at_most`: its target, if it has one."""

    quantity: str
    of: str
    to: str
    spread: Spread
    at: float | None = None
    at_most: float | None = None

    @classmethod
    def between(
        cls,
        quantity: str,
        of: str,
        to: str,
        samples: Mapping[str, Sequence[float]],
        *,
        at: float | None = None,
        at_most: float | None = None,
    ) -> Ratio:
        """From the samples of each system, the rounds in the same order. Raises ZeroDivisionError
        if one of `to` is zero."""
        pairs = zip(samples[of], samples[to], strict=True)
        return cls(quantity, of, to, Spread.of([a / b for a, b in pairs]), at, at_most)

    @property
    def is_met(self) -> bool | None:
        return _is_met(self.spread, self.at_most)


@dataclass(frozen=True)
class Claim:
    """Something that must be so, whether it is, and what was found."""

    text: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Sweep:
    """What `at` of figures and ratios is, unit included; `log_y`: figures are drawn on a
    logarithmic axis. `at` always is."""

    name: str
    log_y: bool = False


@dataclass(frozen=True)
class Measurement:
    """about: the settings in a line of words. argv: script and arguments that repeat it."""

    about: str
    settings: dict[str, Any]
    argv: list[str]
    figures: list[Figure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    sweep: Sweep | None = None

    def figure(self, quantity: str, system: str, at: float | None = None) -> Figure:
        """Raises KeyError where there is none."""
        for figure in self.figures:
            if (figure.quantity, figure.system, figure.at) == (quantity, system, at):
                return figure
        raise KeyError((quantity, system, at))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_measurement(path: Path) -> Measurement:
    """Raises OSError, or ValueError if the file holds something else."""
    try:
        record = json.loads(path.read_text())
        return Measurement(
            record["about"],
            record["settings"],
            record["argv"],
            [Figure(**{**one, "spread": Spread(**one["spread"])}) for one in record["figures"]],
            [Ratio(**{**one, "spread": Spread(**one["spread"])}) for one in record["ratios"]],
            [Claim(**one) for one in record["claims"]],
            None if record["sweep"] is None else Sweep(**record["sweep"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what a benchmark wrote ({error!r})") from None


def number(value: float) -> str:
    """Never in powers of ten; three decimals below ten, counts as they are."""
    size = abs(value)
    digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 3
    return f"{value:.{digits}f}"


def interval(spread: Spread, show: Callable[[float], str] = number) -> str:
    """Return the 10th to 90th percentile, or "" where they are equal."""
    return "" if spread.p10 == spread.p90 else f"{show(spread.p10)}-{show(spread.p90)}"


def three_decimals(ratio: float) -> str:
    return f"{ratio:.3f}"


def _is_met(spread: Spread, at_most: float | None) -> bool | None:
    return None if at_most is None else spread.median <= at_most
