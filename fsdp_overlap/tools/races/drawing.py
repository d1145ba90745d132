"""Layout of a finding's timeline, in pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_overlap.tools.emulator.history import Timeline
from fsdp_overlap.tools.emulator.queues import Enqueued, Waited

LANE = 34
BOX = 22
_STEP = 14
"""The least distance between the starts of boxes, which are in the order of enqueueing."""
_ARROW = 12
"""The least width of an arrow."""
_GAP = 26
"""Where operations in between are not shown."""
_PER_LETTER = 6.7
_LONGEST = 20
"""In letters."""


class TimelineBox(NamedTuple):
    """An operation, or a wait, which is narrow and has no name."""

    x: float
    y: float
    width: float
    name: str
    text: str
    what: str


class TimelineArrow(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float
    text: str
    what: str


@dataclass
class TimelineDrawing:
    """Lanes for streams and the host, from the top down."""

    lanes: list[str]
    boxes: list[TimelineBox] = field(default_factory=list)
    arrows: list[TimelineArrow] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    width: float = 0.0

    @property
    def height(self) -> int:
        return LANE * len(self.lanes)

    @property
    def focus(self) -> float:
        """The middle of the two accesses."""
        xs = [box.x for box in self.boxes if box.what in ("first", "second")]
        return sum(xs) / max(len(xs), 1)


def draw(timeline: Timeline) -> TimelineDrawing:
    """Lay out ``timeline`` from the left to the right, in the order of enqueueing. What waits for
    an operation begins where that ends."""
    shown = {entry.queue for entry in timeline.entries}
    shown |= {entry.source for entry in timeline.entries if isinstance(entry, Waited)}
    lanes = [index for index in sorted(timeline.lanes) if index in shown]
    row = {index: at for at, index in enumerate(lanes)}
    drawing = TimelineDrawing([timeline.lanes[index] for index in lanes])
    ends = dict.fromkeys(lanes, 0.0)
    placed: dict[int, list[tuple[int, TimelineBox]]] = {index: [] for index in lanes}
    marked: dict[int, TimelineBox] = {}
    x, last = -float(_STEP), 0
    for entry in timeline.entries:
        if last and entry.number > last + 1:
            x = max(x, *ends.values()) + _GAP
            drawing.gaps.append(x - _GAP / 2)
        last = entry.number
        x = max(x + _STEP, ends[entry.queue] + 4)
        after: TimelineBox | None = None
        if isinstance(entry, Waited):
            before = [b for tick, b in placed.get(entry.source, ()) if tick <= entry.tick]
            after = before[-1] if before else None
        elif entry.number == timeline.second:
            after = marked.get(timeline.first)
        if after is not None:
            x = max(x, after.x + after.width + _ARROW)
        box = marked[entry.number] = _box(entry, timeline, x, row[entry.queue])
        drawing.boxes.append(box)
        ends[entry.queue] = x + box.width
        if isinstance(entry, Enqueued):
            placed[entry.queue].append((entry.tick, box))
        if after is not None:
            drawing.arrows.append(_arrow(after, box))
    drawing.width = max(ends.values(), default=0.0) + 8
    return drawing


def _arrow(start: TimelineBox, end: TimelineBox) -> TimelineArrow:
    ys = start.y + BOX / 2, end.y + BOX / 2
    is_missing = end.what != "wait"
    return TimelineArrow(
        start.x + start.width,
        ys[0],
        end.x,
        ys[1],
        "the missing wait" if is_missing else end.text,
        "missing" if is_missing else "wait",
    )


def _box(entry: Enqueued | Waited, timeline: Timeline, x: float, row: int) -> TimelineBox:
    stream, y = timeline.lanes[entry.queue], row * LANE + (LANE - BOX) / 2
    if isinstance(entry, Waited):
        text = f"{stream} waits for {timeline.lanes.get(entry.source, '')}\n{entry.site}"
        return TimelineBox(x, y, 6.0, "", text, "wait")
    name = entry.operation
    if len(name) > _LONGEST:
        name = name[: _LONGEST - 1] + "…"
    marks = {timeline.first: "first", timeline.second: "second"}
    what = marks.get(entry.number, "collective" if stream.startswith("NCCL") else "operation")
    text = f"{entry.operation} on {stream}\n{entry.site}"
    return TimelineBox(x, y, _PER_LETTER * len(name) + 10, name, text, what)
