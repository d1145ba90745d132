"""What a torch.profiler trace says about overlap. Needs no process group and no torch."""

from fsdp_overlap.profiling.overlap import (
    Collective,
    OverlapSummary,
    Total,
    render_overlap,
    summarize_overlap,
)

__all__ = ["Collective", "OverlapSummary", "Total", "render_overlap", "summarize_overlap"]
