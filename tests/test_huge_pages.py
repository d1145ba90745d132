"""Large buffers on the host ask for huge pages, others do not."""

import re
import sys
from pathlib import Path

import pytest
import torch

from fsdp_overlap.layout import Flat, ParamSpec, plan_units
from fsdp_overlap.tensor import flat_buffer
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tensor.huge_pages import LARGE_BYTES


def asks_for_huge_pages(address: int) -> bool:
    """Whether the mapping that holds ``address`` has the flag of ``MADV_HUGEPAGE``."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no such mapping")


def buffer_of(nbytes: int) -> FlatBuffer:
    [plan] = plan_units([[ParamSpec("w", (nbytes // 4,), torch.float32)]], 1, Flat())
    return FlatBuffer(plan, torch.float32, torch.device("cpu"))


@pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs huge pages",
)
def test_large_buffers_ask_for_huge_pages() -> None:
    buffer = buffer_of(2 * LARGE_BYTES)
    for _ in range(2):  # memory is new each time
        buffer.allocate()
        buffer.flat.zero_()
        assert asks_for_huge_pages(buffer.flat.data_ptr() + buffer.nbytes // 2)
        buffer.free()


def test_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their pages may be huge all the same: numpy asks for memory that is used again.
    asked: list[int] = []
    monkeypatch.setattr(flat_buffer, "use_huge_pages", lambda address, nbytes: asked.append(nbytes))
    for nbytes in (1 << 20, LARGE_BYTES):
        buffer_of(nbytes).allocate()
    assert asked == [LARGE_BYTES]
