"""Large buffers on the host ask for huge pages, others do not."""

import re
import sys
from pathlib import Path

import pytest
import torch

from fsdp_overlap.layout import Flat, ParamSpec, plan_units
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


@pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs huge pages",
)
@pytest.mark.parametrize(("nbytes", "expected"), [(2 * LARGE_BYTES, True), (1 << 20, False)])
def test_buffers_ask_for_huge_pages_if_they_are_large(nbytes: int, expected: bool) -> None:
    [plan] = plan_units([[ParamSpec("w", (nbytes // 4,), torch.float32)]], 1, Flat())
    buffer = FlatBuffer(plan, torch.float32, torch.device("cpu"))
    for _ in range(2):  # memory is new each time
        buffer.allocate()
        buffer.flat.zero_()
        assert asks_for_huge_pages(buffer.flat.data_ptr() + nbytes // 2) is expected
        buffer.free()
