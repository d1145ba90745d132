"""Findings of the emulated device, with the lines of the program to look at."""

from __future__ import annotations

import linecache
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from fsdp_overlap.tools.emulator.history import Timeline
from fsdp_overlap.tools.emulator.sites import Line, Site

_ALLOW = re.compile(r"#\s*races:\s*allow\b[\s:,-]*(.*)")


@dataclass(frozen=True)
class FoundAccess:
    """One of the operations that a finding is about. ``verb`` says what it does to the memory, or,
    with a preposition, what the host does."""

    operation: str
    verb: str
    stream: str
    site: Site

    def __str__(self) -> str:
        if " " in self.verb:
            return f"{self.stream} {self.verb} {self.operation}"
        return f"{self.operation} on {self.stream} {self.verb}"


@dataclass(eq=False)
class Finding:
    """A fault. ``kind`` is ``"race"`` (two operations on the same memory that nothing orders),
    ``"reuse"`` (the same, and the memory has another owner since the first), ``"freed"`` (use of
    memory that was freed), ``"context"`` (a thread takes another device for its own), ``"order"``
    (ranks whose communicators run in different orders) or, of what is no fault, ``"sync"`` (the
    host waits in each step). Two are equal if they are the same fault, also of two ranks."""

    kind: str
    text: str
    rule: str = ""
    """Which rule of ``fsdp_overlap.tools.races`` it breaks, if its kind has more than one."""
    first: FoundAccess | None = None
    """The earlier of two operations."""
    second: FoundAccess | None = None
    missing: str = ""
    """What would have ordered them."""
    last_wait: str = ""
    """What is known of waits that came too early, or elsewhere."""
    freed_at: Site | None = None
    """Where the memory was freed between the two."""
    taken_at: Site | None = None
    """Where it was taken again."""
    count: int = 1
    """How often the same lines did it."""
    allowed: str = ""
    """The line that allows it, with the reason that it states."""
    timeline: Timeline | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f"; missing: {self.missing}" if self.missing else "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Finding) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def sites(self) -> list[Site]:
        return [access.site for access in (self.first, self.second) if access is not None]

    @property
    def key(self) -> Hashable:
        """What two findings share that are the same fault. Memory that was freed too early is one,
        whatever gets it."""
        second = None if self.kind == "reuse" and self.first else self.second
        accesses = [each and (each.operation, each.site) for each in (self.first, second)]
        return (self.kind, self.freed_at, *accesses) if any(accesses) else (self.kind, self.text)


@dataclass(frozen=True)
class Sync:
    """The host waited for the device in ``operation``, after so many steps."""

    operation: str
    site: Site
    step: int = 0

    @property
    def place(self) -> str:
        """The innermost line."""
        return str(self.site.innermost or self.site)

    def __str__(self) -> str:
        return f"{self.operation} at {self.place}"


class Findings:
    """Those of a device, each fault once.

    Args:
        allow: lines, as ``"file.py:12"``, whose faults are expected. So are those of lines of the
            program with a comment ``# races: allow``.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        self.faults: list[Finding] = []
        self.allowed: list[Finding] = []
        self._allow = allow
        self._by_key: dict[Hashable, Finding] = {}

    def repeats(self, key: Hashable) -> bool:
        """Return whether there is a finding like this one, and count it again if so."""
        found = self._by_key.get(key)
        if found is None or not (self.allowed if found.allowed else self.faults):
            return False  # a new one, or the list was cleared since
        found.count += 1
        return True

    def add(self, finding: Finding) -> Finding:
        """Add ``finding``, unless it is there."""
        if not self.repeats(finding.key):
            self._by_key[finding.key] = finding
            finding.allowed = self.allowance(finding.sites)
            (self.allowed if finding.allowed else self.faults).append(finding)
        return finding

    def allowance(self, sites: Iterable[Site]) -> str:
        """Return the line that allows what is done at ``sites``; "" if none does."""
        for site in sites:
            for of, line in site.lines.items():
                if any(_is_line(line, allowed) for allowed in self._allow):
                    return line.place
                written = linecache.getline(line.file, line.number)
                if of != "library" and (comment := _ALLOW.search(written)):
                    return f"{line.place}: {comment[1].strip()}" if comment[1] else line.place
        return ""


def _is_line(line: Line, named: str) -> bool:
    file, _, number = named.rpartition(":")
    is_file = line.file == file or line.file.endswith(f"/{file}")
    return is_file and number == str(line.number)


def steady(syncs: Sequence[Sync], steps: int) -> list[Finding]:
    """Return the waits of the host that recur in each of the last steps of ``steps``. The first
    step, which sets up, counts only if there are no more than two."""
    looked_at = range(max(0, steps - 3) if steps != 3 else 1, steps)
    if len(looked_at) < 2:
        return []
    seen: dict[Hashable, list[Sync]] = {}
    for sync in syncs:
        if sync.step in looked_at:
            seen.setdefault((sync.operation, sync.site), []).append(sync)
    return [
        Finding(
            "sync",
            f"the host waits for the device in each step, in {waits[0]}",
            second=FoundAccess(waits[0].operation, "waits in", "the host", waits[0].site),
            count=len(waits),
        )
        for waits in seen.values()
        if {sync.step for sync in waits} == set(looked_at)
    ]
