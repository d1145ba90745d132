"""What a torch.profiler trace says about overlap, and what the steps of a job that runs take."""

from fsdp_overlap.profiling.claims import assert_overlapped
from fsdp_overlap.profiling.diagnosis import Finding, diagnose
from fsdp_overlap.profiling.overlap import Collective, RankReport, Total
from fsdp_overlap.profiling.report import Report, read_report
from fsdp_overlap.profiling.step_log import SlowRank, StepLog, StepTimes

__all__ = [
    "Collective",
    "Finding",
    "RankReport",
    "Report",
    "SlowRank",
    "StepLog",
    "StepTimes",
    "Total",
    "assert_overlapped",
    "diagnose",
    "read_report",
]
