"""Names in profiler traces that cost nothing when no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

_NO_SPAN: AbstractContextManager[Any] = nullcontext()


def span(kind: str, label: str) -> AbstractContextManager[Any]:
    """Marks what runs inside as ``fsdp_overlap::<kind>(<label>)`` in a running profiler's trace."""
    if not torch._C._autograd._profiler_enabled():
        return _NO_SPAN
    return record_function(f"fsdp_overlap::{kind}({label})")
