"""A genuine checkpoint, and copies of it to be tampered with."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from support.tampering import write


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("genuine"))


@pytest.fixture
def space(genuine: Path) -> Path:
    """For one of hundreds of tests: as tmp_path, in less time."""
    return Path(tempfile.mkdtemp(dir=genuine.parent))


@pytest.fixture
def folder(space: Path, genuine: Path) -> Path:
    return Path(shutil.copytree(genuine, space / "checkpoint"))


@pytest.fixture
def canary(space: Path) -> Path:
    """What a payload makes once it runs."""
    return space / "canary"
