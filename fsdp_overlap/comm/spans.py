"""Names in profiler traces that cost next to nothing when no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

_NO_SPAN: AbstractContextManager[Any] = nullcontext()


def span(kind: str, label: str, nbytes: int = 0) -> AbstractContextManager[Any]:
    """Marks what runs inside as ``fsdp_overlap::<kind>(<label>)`` in a running profiler's trace.

    ``profiling/names.py`` reads the names. ``nbytes``, if not zero, is what the collective issued
    inside brings to this rank, or takes from it: `` 4096 B`` at the end.
    """
    if not torch._C._autograd._profiler_enabled():
        return _NO_SPAN
    size = f" {nbytes} B" if nbytes else ""
    return record_function(f"fsdp_overlap::{kind}({label}){size}")
