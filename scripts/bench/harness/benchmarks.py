"""All benchmarks, as benchmarks.toml lists them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

_LIST = Path(__file__).parents[1] / "benchmarks.toml"


@dataclass(frozen=True)
class Benchmark:
    """A script of `scripts/bench` and its arguments, in a full and in a quick run.

    topic: the heading under which its results stand. measures: what, in words.
    """

    name: str
    script: str
    arguments: str
    quick: str
    topic: str = ""
    measures: str = ""

    def command(self, quick: bool) -> list[str]:
        """From the repository, without the interpreter."""
        arguments = self.quick if quick else self.arguments
        return [f"scripts/bench/{self.script}", *arguments.split()]


BENCHMARKS = tuple(
    Benchmark(name, **{"script": f"{name}.py", "arguments": "", "topic": topic, **keys})
    for topic, benchmarks in tomllib.loads(_LIST.read_text()).items()
    for name, keys in benchmarks.items()
)
"""In the order in which they run."""
