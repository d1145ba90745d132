"""Counts collectives where they cannot hide: at torch's dispatcher."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """The collectives issued while it is entered, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in func.__name__:
            self.counts[func.__name__.split(".")[0].rstrip("_")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def inside() -> Any:
    """Whether a :class:`Collectives` is entered."""
    return torch.utils._python_dispatch._get_current_dispatch_mode()
