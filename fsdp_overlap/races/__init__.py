"""Finds what a program written for GPUs leaves unordered, on a machine without one."""

from fsdp_overlap.races.testing import assert_no_races, find_races

__all__ = ["assert_no_races", "find_races"]
