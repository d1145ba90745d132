"""Finds races in a program that uses CUDA, by running it on the emulated device."""

from fsdp_overlap.races.report import Report, describe, summary, to_json, write_page
from fsdp_overlap.races.rules import RULES, Rule

__all__ = ["RULES", "Report", "Rule", "describe", "summary", "to_json", "write_page"]
