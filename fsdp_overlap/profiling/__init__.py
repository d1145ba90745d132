"""What a torch.profiler trace says about overlap."""

from fsdp_overlap.profiling.claims import assert_overlapped
from fsdp_overlap.profiling.diagnosis import Finding, diagnose
from fsdp_overlap.profiling.overlap import Collective, RankReport, Total
from fsdp_overlap.profiling.report import Report, read_report

__all__ = [
    "Collective",
    "Finding",
    "RankReport",
    "Report",
    "Total",
    "assert_overlapped",
    "diagnose",
    "read_report",
]
