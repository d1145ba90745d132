"""Race detection for programs written for GPUs, on a machine without one."""

from fsdp_overlap.tools.races.report import RaceReport, describe, summary, to_json, write_page
from fsdp_overlap.tools.races.rules import RULES, Rule
from fsdp_overlap.tools.races.testing import assert_no_races, find_races

__all__ = [
    "RULES",
    "RaceReport",
    "Rule",
    "assert_no_races",
    "describe",
    "find_races",
    "summary",
    "to_json",
    "write_page",
]
