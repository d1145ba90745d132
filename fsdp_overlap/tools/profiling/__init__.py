"""Overlap reports from ``torch.profiler`` traces."""

from fsdp_overlap.tools.profiling.diagnosis import Diagnosis, diagnose
from fsdp_overlap.tools.profiling.overlap import Collective, RankReport, Total
from fsdp_overlap.tools.profiling.report import Report, read_report
from fsdp_overlap.tools.profiling.testing import assert_overlapped

__all__ = [
    "Collective",
    "Diagnosis",
    "RankReport",
    "Report",
    "Total",
    "assert_overlapped",
    "diagnose",
    "read_report",
]
