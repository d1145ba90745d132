"""Reads what :class:`~fsdp_overlap.recording.recorder.Recorder` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_overlap.recording.recorder import FORMAT
from fsdp_overlap.recording.sketch import PROJECTIONS, Sketch

SHARDED_KINDS = ("initial weight", "gradient", "weight", "evaluated weight")
"""What ranks have parts of, or replicas. The other tensors are each rank's own."""


class Key(NamedTuple):
    """Which tensor of a step a record is of. ``call`` counts those of the same name."""

    kind: str
    name: str
    part: int
    call: int


@dataclass(frozen=True)
class TensorRecord:
    """What was recorded of a tensor: on one rank, or of all its shards together."""

    key: Key
    of_class: str
    shape: tuple[int, ...]
    dtype: str
    sketch: Sketch
    chunks: tuple[Any, ...] = ()


@dataclass
class RankStep:
    """What one rank recorded in one step, in the order of execution."""

    random: int
    losses: list[float] = field(default_factory=list)
    tensors: dict[Key, TensorRecord] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Tensors that could not be recorded, such as sparse ones."""


@dataclass(frozen=True)
class Recording:
    """What a run recorded.

    Attributes:
        torch: the version of torch.
        ranks: the steps of each rank.
    """

    torch: str
    ranks: list[list[RankStep]]

    @property
    def steps(self) -> int:
        """The number of steps that each rank recorded."""
        return min(map(len, self.ranks))

    def losses(self, step: int) -> list[float]:
        """Return the losses of a step, a mean over ranks for each backward."""
        of_ranks = [rank[step].losses for rank in self.ranks]
        return [sum(each) / len(of_ranks) for each in zip(*of_ranks, strict=False)]

    def full(self, step: int, key: Key) -> TensorRecord | None:
        """Return the record of all shards of a tensor together, ``None`` if no rank has it."""
        found: dict[Any, tuple[TensorRecord, Sketch]] = {}
        for rank in self.ranks:
            if (record := rank[step].tensors.get(key)) is not None and record.chunks:
                found.setdefault(record.chunks, (record, record.sketch))
        if not found:
            return None
        record = next(iter(found.values()))[0]
        sketch = reduce(add, [sketch for _, sketch in found.values()])
        return TensorRecord(key, record.of_class, record.shape, record.dtype, sketch)

    def unlike_replicas(self, step: int, key: Key) -> list[int]:
        """Return the ranks that have the same shard as an earlier rank, with other bits."""
        first: dict[Any, int] = {}
        unlike = []
        for index, rank in enumerate(self.ranks):
            if (record := rank[step].tensors.get(key)) is not None and record.chunks:
                digest = record.sketch.digest
                if first.setdefault(record.chunks, digest) != digest:
                    unlike.append(index)
        return unlike

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read the files of all ranks.

        Raises:
            ValueError: the folder has no recording, or one of another version, without a step, or
                whose ranks are not all there.
        """
        paths = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem[5:]))
        if not paths:
            raise ValueError(f"{folder}: has no recording (rank-0.jsonl)")
        heads, ranks = [], []
        for path in paths:
            lines = _lines_of(path)
            head = next(lines, {})
            if head.get("format") != FORMAT:
                raise ValueError(f"{path}: not a recording of this version")
            heads.append(head)
            ranks.append(_read_steps(lines))
        expected = heads[0]["ranks"]
        if len(ranks) != expected:
            raise ValueError(f"{folder}: has the files of {len(ranks)} of {expected} ranks")
        recording = cls(heads[0]["torch"], ranks)
        if not recording.steps:
            raise ValueError(f"{folder}: has no complete step")
        return recording


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # a process was killed as it wrote
            yield json.loads(line)


def _read_steps(lines: Iterator[dict[str, Any]]) -> list[RankStep]:
    steps: list[RankStep] = []
    is_complete = True
    for line in lines:
        kind = line["kind"]
        if kind == "random":
            steps.append(RankStep(line["digest"]))
            is_complete = False
        elif kind == "losses":
            steps[-1].losses = line["values"]
        elif kind == "end":
            is_complete = True
            steps[-1].left_out = line["left_out"]
        else:
            record = _record_of(line)
            steps[-1].tensors[record.key] = record
    return steps if is_complete else steps[:-1]


def _record_of(line: dict[str, Any]) -> TensorRecord:
    sketches = [
        Sketch(digest, squares, tuple(projections))
        for digest, squares, projections in zip(
            line["digests"], line["squares"], line["projections"], strict=True
        )
    ]
    empty = Sketch(0, 0.0, (0.0,) * PROJECTIONS)
    return TensorRecord(
        Key(line["kind"], line["name"], line["part"], line["call"]),
        line["of_class"],
        tuple(line["shape"]),
        line["dtype"],
        reduce(add, sketches, empty),
        tuple((tuple(offsets), tuple(sizes)) for offsets, sizes in line["chunks"]),
    )
