"""A hash of sources, by which results are known to be of them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def digest(*paths: Path) -> str:
    """Hash files, and all Python and CUDA sources in folders."""
    found = hashlib.sha1()
    for path in paths:
        within = sorted(p for p in path.rglob("*") if p.suffix in (".py", ".cu"))
        for file in within if path.is_dir() else [path]:
            found.update(file.read_bytes())
    return found.hexdigest()[:12]
