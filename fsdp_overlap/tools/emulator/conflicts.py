"""Explanations of races: the wait that would have ordered two operations."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence

from fsdp_overlap.tools.emulator.findings import Finding, FoundAccess
from fsdp_overlap.tools.emulator.memory import Access, TrackedMemory
from fsdp_overlap.tools.emulator.queues import Queue, Waited
from fsdp_overlap.tools.emulator.sites import Site

# A variable, or an attribute, that a stream is assigned to where it is made.
_ASSIGNED = re.compile(r"^\s*([A-Za-z_][\w.]*)\s*(?::[^=]+)?=\s*[\w.]*Stream\(")


class Conflict:
    """An ``access`` that is enqueued on the last of ``queues`` that nothing orders after an
    ``earlier`` one."""

    def __init__(
        self, earlier: Access, access: Access, queue: Queue, queues: Sequence[Queue]
    ) -> None:
        self.earlier = earlier
        self.access = access
        self.queues = queues
        self.first, self.second = queues[earlier.stamp.queue], queue
        self.is_reuse = earlier.freed_at is not None
        self.kind = "reuse" if self.is_reuse else "race"

    @property
    def key(self) -> tuple[object, ...]:
        """The key of the finding."""
        one, two = ((each.operation, each.site) for each in (self.earlier, self.access))
        return self.kind, self.earlier.freed_at, one, None if self.is_reuse else two

    def finding(self, memory: TrackedMemory) -> Finding:
        first, second = _found(self.earlier, self.first), _found(self.access, self.second)
        of_whom = "memory that was freed since and taken again" if self.is_reuse else "it"
        return Finding(
            self.kind,
            f"{second} memory ({second.site}); nothing orders it after {first.operation} on "
            f"{first.stream}, which {first.verb} {of_whom} ({first.site})",
            self.rule,
            first,
            second,
            self.missing_wait(),
            self.last_wait(),
            self.earlier.freed_at,
            memory.taken_at if self.is_reuse else None,
        )

    @property
    def rule(self) -> str:
        if self.is_reuse:
            return "reuse"
        if self.second.index == 0:
            return "host"
        return "collective" if self.first.group else "streams"

    def missing_wait(self) -> str:
        """Return what would have ordered the two."""
        first, second = self.first, self.second
        one, two = variable(first), _waiting(second)
        place, after = _place(self.access.site), _place(self.earlier.site)
        if self.is_reuse:
            freed = f"before the memory is freed at {_place(self.earlier.freed_at or Site())}"
            if first.group:
                return f"work.wait() on the stream that the tensor was made on, {freed}"
            record = f"tensor.record_stream({one}) " if one else f"record_stream() of {first.name} "
            return f"{record}{freed}, or a wait for {first.name} there"
        needs = f"{second.name} has to wait for "
        if second.index == 0:
            wait = f": {one}.synchronize()" if one else ""
            return (
                f"{needs}{first.name} before {place}{wait}, or synchronize() of an event that is "
                f"recorded after {after}"
            )
        if first.group:
            return f"{needs}the {self.earlier.operation} before {place}: work.wait()"
        if second.group:
            wait = f": torch.cuda.current_stream().wait_stream({one})" if one else ""
            return (
                f"the stream that calls the {self.access.operation} has to wait for {first.name} "
                f"before {place}{wait}"
            )
        wait = f": {two}.wait_stream({one})" if one else ""
        return f"{needs}{first.name} before {place}{wait}"

    def last_wait(self) -> str:
        """Return where the later queue has waited for the earlier one, or another queue has."""
        first, second = self.first, self.second
        if first.is_of_graph or second.is_of_graph:
            return ""
        tick = self.earlier.stamp.tick
        host = self.queues[0]
        waits = [queue.waits[first.index] for queue in (second, host) if first.index in queue.waits]
        own: Waited | None = max(waits, default=None)
        others = [
            (queue, wait)
            for queue in self.queues
            if queue is not second and (wait := queue.waits.get(first.index)) and wait.tick >= tick
        ]
        if own is not None:
            text = (
                f"{self.queues[own.queue].name} last waited for {first.name} at "
                f"{_place(own.site)}, for what was enqueued before {self.earlier.operation} "
                f"({_place(self.earlier.site)})"
            )
        else:
            text = f"{second.name} never waited for {first.name}"
        if others:
            queue, wait = others[-1]
            text += f"; {queue.name} waited for it at {_place(wait.site)}"
        return text


def variable(queue: Queue) -> str:
    """Return what the program calls the stream, as read from the line that made it; "" if that
    does not say."""
    if queue.index == 1:
        return "torch.cuda.default_stream()"
    line = queue.made_at.innermost
    if line is None or queue.group or queue.is_of_graph:
        return ""
    assigned = _ASSIGNED.match(linecache.getline(line.file, line.number))
    return assigned[1] if assigned else ""


def _waiting(queue: Queue) -> str:
    """Return the stream that is to wait, which is the current one where it enqueues."""
    return (queue.index != 1 and variable(queue)) or "torch.cuda.current_stream()"


def _place(site: Site) -> str:
    """Return the line that would be another one: of the library, if it is a library's call."""
    line = site.innermost
    return site.place if line is None else line.place


def _found(access: Access, queue: Queue) -> FoundAccess:
    verb = "writes" if access.writes else "reads"
    return FoundAccess(access.operation, verb, queue.name, access.site)
