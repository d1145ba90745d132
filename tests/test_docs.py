"""The examples in the documents run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "sharded_tensors.md"


def python_blocks(page: Path) -> list[str]:
    """The page's Python examples, each padded so that its line numbers are the page's."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def run_blocks(blocks: list[str], name: str) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)


def test_the_examples_on_sharded_tensors_run() -> None:
    blocks = python_blocks(PAGE)
    assert blocks
    assert len(blocks) == PAGE.read_text(encoding="utf-8").count("```python")
    run_ranks(run_blocks, 2, blocks, str(PAGE))
