"""Makes docs/fsdp2_features.md from the rows that tests/docs/test_fsdp2_table.py checks.

python scripts/site/fsdp2_features.py
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "docs" / "fsdp2_features.toml"
PAGE = ROOT / "docs" / "fsdp2_features.md"
COMMAND = f"python {Path(__file__).relative_to(ROOT)}"

SECTIONS = {
    "refused": "An error says what to do instead.",
    "different": "It works, on purpose not as in FSDP2.",
    "better": "As in FSDP2, and also correct or faster where FSDP2 is not.",
    "same": "As in FSDP2.",
}
INTRODUCTION = """\
# Features of FSDP2

What FSDP2 of torch 2.13 and 2.15 does, and what programs do with it, in {total} rows:
{counts}.

Each row names the tests that show it, in `tests/`. Tests after "GPU" need
[one](gpu.md#what-has-run). [From FSDP2](fsdp2.md) says how to move.

Made by `{command}` from `{data}`.
"""


@dataclass(frozen=True)
class Feature:
    """One row. Tests are written as ``file::function``, or as ``file`` for all that it has."""

    feature: str
    how: str = ""
    tests: list[str] = field(default_factory=list)
    gpu_tests: list[str] = field(default_factory=list)

    @property
    def row(self) -> str:
        """The feature's line in the table of its section."""
        tests = ", ".join(f"`{name}`" for name in self.tests)
        on_gpu = ", ".join(f"`{name}`" for name in self.gpu_tests)
        where = "; GPU: ".join((tests, on_gpu)).removeprefix("; ").removesuffix("; GPU: ")
        return f"| {self.feature} | {self.how} | {where} |"


Features = dict[str, list[Feature]]
"""The features of each section, by the section's name."""


def read() -> Features:
    """Return what the file has."""
    tables = tomllib.loads(DATA.read_text(encoding="utf-8"))
    if unknown := tables.keys() - SECTIONS.keys():
        raise ValueError(f"{DATA.name} has {unknown}: sections are {', '.join(SECTIONS)}")
    return {name: [Feature(**row) for row in tables[name]] for name in SECTIONS}


def page_of(features: Features) -> str:
    """Return the page's text."""
    counts = [f"[{len(rows)} {name}](#{name})" for name, rows in features.items()]
    parts = [
        INTRODUCTION.format(
            total=sum(map(len, features.values())),
            counts=f"{', '.join(counts[:-1])} and {counts[-1]}",
            command=COMMAND,
            data=DATA.relative_to(ROOT),
        )
    ]
    for name, meaning in SECTIONS.items():
        head = f"## {name.capitalize()}\n\n{meaning}\n\n| feature | | tests |\n|---|---|---|\n"
        parts.append(head + "".join(f"{feature.row}\n" for feature in features[name]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page_of(read()), encoding="utf-8")
