"""The example programs in `docs/examples`, and how a test runs one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TRAINING = EXAMPLES / "training.py"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    program: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def run_training(half: bool, folder: str, *epochs: int, **options: int) -> list[float]:
    training = load(TRAINING)
    return [loss for count in epochs for loss in training.run(Path(folder), count, half, **options)]
