"""Race reports: as text for a terminal, as JSON, and as a page."""

from __future__ import annotations

import linecache
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fsdp_overlap.tools.emulator import EmulatedDevice, Finding, FoundAccess
from fsdp_overlap.tools.emulator.history import Timeline
from fsdp_overlap.tools.emulator.queues import Waited
from fsdp_overlap.tools.emulator.sites import Line, Site
from fsdp_overlap.tools.races.drawing import draw
from fsdp_overlap.tools.races.rules import RULES, name_of_rule

FORMAT = 1
"""The version of the JSON form."""

HEADINGS = {
    "race": "operations on the same memory that nothing orders",
    "reuse": "memory used again before operations of its last owner",
    "freed": "an operation on memory that was freed",
    "context": "a thread that uses another device",
    "order": "ranks that use communicators in different orders",
    "sync": "the host waits for the device in each step",
}
"""By the kind of finding."""

_WIDEST = 64
"""The greatest width of the column that names operations."""


@dataclass(frozen=True)
class RaceReport:
    """What was found on a device, or on those of several ranks. Can be pickled."""

    findings: list[Finding]
    allowed: list[Finding]
    waits: list[Finding]
    """Those of the host that each step has."""
    operations: int
    steps: int

    @classmethod
    def of(cls, device: EmulatedDevice) -> RaceReport:
        waits, count = device.steady_waits(), device.operations
        return cls(list(device.findings), list(device.allowed), waits, count, device.steps)

    @classmethod
    def merged(cls, reports: Sequence[RaceReport]) -> RaceReport:
        """Return what was found on any of several ranks, and how often on all of them."""
        return cls(
            _merged(report.findings for report in reports),
            _merged(report.allowed for report in reports),
            _merged(report.waits for report in reports),
            sum(report.operations for report in reports),
            max((report.steps for report in reports), default=0),
        )


def _merged(lists: Iterable[Sequence[Finding]]) -> list[Finding]:
    merged: dict[Finding, Finding] = {}
    for finding in chain.from_iterable(lists):
        earlier = merged.get(finding)
        count = finding.count + (0 if earlier is None else earlier.count)
        merged[finding] = replace(earlier or finding, count=count)
    return list(merged.values())


def _report(found: EmulatedDevice | RaceReport) -> RaceReport:
    return found if isinstance(found, RaceReport) else RaceReport.of(found)


@dataclass(frozen=True)
class RaceFault:
    """Findings that one wait would mend, of the same streams and at the same place, or a finding by
    itself. All are of one kind, and break one rule."""

    findings: list[Finding]

    @property
    def heading(self) -> str:
        """What kind of fault it is, and how often it was seen."""
        kind, count = self.findings[0].kind, sum(finding.count for finding in self.findings)
        return f"{kind}: {HEADINGS[kind]}" + (f" ({count} times)" if count > 1 else "")

    @property
    def accesses(self) -> list[FoundAccess]:
        """The earlier operations, and then the later ones."""
        accesses = [each.first for each in self.findings] + [each.second for each in self.findings]
        return [access for access in dict.fromkeys(accesses) if access is not None]

    @property
    def sites(self) -> list[tuple[str, Site]]:
        """Where memory was freed, and where it was taken again."""
        sites = [("freed", each.freed_at) for each in self.findings]
        sites += [("taken again", each.taken_at) for each in self.findings]
        return [(what, site) for what, site in dict.fromkeys(sites) if site is not None]

    @property
    def notes(self) -> list[tuple[str, str]]:
        """What is said of it, and under which name."""
        notes = [("missing", each.missing) for each in self.findings]
        notes += [("waits", each.last_wait) for each in self.findings]
        notes += [("allowed", each.allowed) for each in self.findings]
        return [(name, note) for name, note in dict.fromkeys(notes) if note]


def faults_of(findings: Iterable[Finding]) -> list[RaceFault]:
    """Group ``findings`` by the wait that is missing."""
    faults: dict[Hashable, RaceFault] = {}
    for each in findings:
        key = (each.kind, each.rule, each.missing) if each.missing else each
        faults.setdefault(key, RaceFault([])).findings.append(each)
    return list(faults.values())


def describe(findings: Iterable[Finding]) -> str:
    """Return the findings as text, each with the lines of the program and of its libraries. Those
    that one wait would mend are one fault."""
    return "\n\n".join(map(_describe_fault, faults_of(findings)))


def _describe_fault(fault: RaceFault) -> str:
    rows = [(str(access), access.site) for access in fault.accesses] + fault.sites
    width = min(_WIDEST, max((len(what) for what, _ in rows), default=0))
    lines = [fault.heading]
    if not rows:
        lines.append(f"  {fault.findings[0].text}")
    for what, site in rows:
        shown = _lines_of(site)
        lines.append(f"  {what:{width}}  {shown[0]}")
        lines += [" " * (width + 4) + line for line in shown[1:]]
    lines += [f"  {name}: {note}" for name, note in fault.notes]
    return "\n".join(lines)


def _lines_of(site: Site) -> list[str]:
    shown = [
        f"backward of {line}" if of == "forward" else str(line) for of, line in site.lines.items()
    ]
    return shown or [str(site)]


def to_json(found: EmulatedDevice | RaceReport) -> dict[str, Any]:
    """Return what was found as what JSON can hold."""
    report = _report(found)
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "operations": report.operations,
        "steps": report.steps,
        "faults": [_fault_json(fault, report.findings) for fault in faults_of(report.findings)],
        "findings": [_finding_json(finding) for finding in report.findings],
        "allowed": [_finding_json(finding) for finding in report.allowed],
        "waits": [_finding_json(finding) for finding in report.waits],
        "rules": {
            name: {"text": rule.text, "source": rule.source, "url": rule.url}
            for name, rule in RULES.items()
        },
    }


def _fault_json(fault: RaceFault, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "heading": fault.heading,
        "rule": name_of_rule(fault.findings[0]),
        "missing": fault.findings[0].missing,
        "findings": [findings.index(each) for each in fault.findings],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "rule": name_of_rule(finding),
        "heading": HEADINGS[finding.kind],
        "text": finding.text,
        "count": finding.count,
        "first": _access_json(finding.first),
        "second": _access_json(finding.second),
        "missing": finding.missing,
        "last_wait": finding.last_wait,
        "freed_at": _site_json(finding.freed_at),
        "taken_at": _site_json(finding.taken_at),
        "allowed": finding.allowed,
        "timeline": _timeline_json(finding.timeline),
    }


def _access_json(access: FoundAccess | None) -> dict[str, Any] | None:
    if access is None:
        return None
    return {
        "operation": access.operation,
        "access": access.verb,
        "stream": access.stream,
        "lines": _site_json(access.site),
    }


def _site_json(site: Site | None) -> list[dict[str, Any]] | None:
    return None if site is None else [_line_json(of, line) for of, line in site.lines.items()]


def _line_json(of: str, line: Line) -> dict[str, Any]:
    return {
        "of": of,
        "place": line.place,
        "path": line.file,
        "line": line.number,
        "function": line.function,
        "source": linecache.getline(line.file, line.number).strip(),
    }


def _timeline_json(timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    entries: list[dict[str, Any]] = []
    for entry in timeline.entries:
        made = {
            "number": entry.number,
            "stream": timeline.lanes[entry.queue],
            "at": str(entry.site),
        }
        if isinstance(entry, Waited):
            entries.append({**made, "waits_for": timeline.lanes.get(entry.source, "")})
        else:
            entries.append({**made, "operation": entry.operation})
    return {"first": timeline.first, "second": timeline.second, "entries": entries}


def write_page(found: EmulatedDevice | RaceReport, path: str | os.PathLike[str]) -> None:
    """Write what was found as one HTML page that needs no network. Needs jinja2."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader  # only a page needs it

    report = _report(found)
    folders = ("fsdp_overlap.tools.races", "fsdp_overlap.tools.profiling")
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(folder, ".") for folder in folders]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["site"] = _site_json
    timelines = (finding.timeline for finding in report.findings)
    page = environment.get_template("races.html").render(
        found=to_json(report),
        faults=faults_of(report.findings),
        drawings=[None if each is None else draw(each) for each in timelines],
    )
    Path(path).write_text(page, encoding="utf-8")


def summary(found: EmulatedDevice | RaceReport) -> str:
    """Return in one line what was found."""
    report = _report(found)
    faults, waits = len(faults_of(report.findings)), len(report.waits)
    return (
        f"{faults} {'fault' if faults == 1 else 'faults'}, {len(report.allowed)} allowed, "
        f"{waits} {'wait' if waits == 1 else 'waits'} of the host in each step"
    )
