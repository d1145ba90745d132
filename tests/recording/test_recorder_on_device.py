"""Recording on the emulated device: what is read is ready, and stays until it was read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_overlap.debug import record
from fsdp_overlap.recording import sketch
from fsdp_overlap.recording.recording import Recording
from fsdp_overlap.tools.emulator import EmulatedDevice, Stream, fake_ranks, running, stream
from support.emulated import Program, Seconds

KINDS = {"input", "initial weight", "parameter", "output", "local gradient", "gradient", "weight"}
sums_of = sketch._sums_of_columns


def on_another_stream(*args: Any) -> Any:
    """As ``_sums_of_columns()``, on a stream that waits for nothing."""
    with stream(Stream()):
        return sums_of(*args)


def recorded(folder: Path, defect: AbstractContextManager[Any] | None = None) -> EmulatedDevice:
    timing = Seconds({"mm": 1.0, "addmm": 1.0, "all_gather": 5.0, "reduce_scatter": 5.0})
    with (
        running(EmulatedDevice(timing=timing)) as device,
        fake_ranks(4),
        record(folder),
        defect or nullcontext(),
    ):
        Program("layers", (4,)).train(3)
    return device


def test_a_recording_reads_what_is_ready(tmp_path: Path) -> None:
    assert not recorded(tmp_path).findings
    with pytest.raises(ValueError, match="1 of 4 ranks"):
        Recording.read(tmp_path)  # the others are fake
    kinds = {line.split('"')[3] for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()}
    assert kinds >= KINDS


def test_a_sketch_beside_the_stream_is_found(tmp_path: Path) -> None:
    assert recorded(tmp_path, patch.object(sketch, "_sums_of_columns", on_another_stream)).findings
