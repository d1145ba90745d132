"""Names in profiler traces that cost next to nothing when no profiler runs. See Note [marks]."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from fsdp_overlap.torch_internals import profiler_enabled

_NO_SPAN: AbstractContextManager[Any] = nullcontext()


def span(kind: str, label: str, nbytes: int = 0) -> AbstractContextManager[Any]:
    """Marks what runs inside as ``fsdp_overlap::<kind>(<label>)`` in a running profiler's trace.

    ``profiling/names.py`` reads the names. ``nbytes`` is how many bytes the collective issued
    inside brings to this rank or takes from it. If it is not zero, the name ends in it, as in
    `` 4096 B``.
    """
    if not profiler_enabled():
        return _NO_SPAN
    size = f" {nbytes} B" if nbytes else ""
    return record_function(f"fsdp_overlap::{kind}({label}){size}")
