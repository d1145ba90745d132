"""Large buffers on the host ask for huge pages, others do not. What malloc keeps is bounded."""

import re
import sys
from pathlib import Path

import pytest
import torch

from fsdp_overlap.layout import Flat, ParamSpec, plan_units
from fsdp_overlap.tensor import flat_buffer, host_memory
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tensor.host_memory import MMAP_BYTES, FreedMemory


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
    buffer = buffer_of(2 * MMAP_BYTES)
    for _ in range(2):  # memory is new each time
        buffer.allocate()
        buffer.flat.zero_()
        assert asks_for_huge_pages(buffer.flat.data_ptr() + buffer.nbytes // 2)
        buffer.free()


def test_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their pages may be huge all the same: numpy asks for memory that is used again.
    asked: list[int] = []
    monkeypatch.setattr(flat_buffer, "use_huge_pages", lambda address, nbytes: asked.append(nbytes))
    for nbytes in (1 << 20, MMAP_BYTES):
        buffer_of(nbytes).allocate()
    assert asked == [MMAP_BYTES]


MIB = 1 << 20


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """``[resident bytes, those that the program needs]``. Giving back makes them equal."""
    state = [0, 0]

    def trim(_: int) -> None:
        state[0] = state[1]

    monkeypatch.setattr(host_memory, "_resident", lambda: state[0])
    monkeypatch.setattr(host_memory, "_malloc_trim", lambda: trim)
    return state


def test_what_grows_slowly_is_given_back(process: list[int]) -> None:
    freed = FreedMemory()
    seen = []
    process[:] = 100 * MIB, 100 * MIB
    for _ in range(200):
        freed.look()
        seen.append(process[0])
        process[0] += MIB
    assert max(seen) <= 100 * MIB + freed.KEPT + MIB
    assert seen.count(100 * MIB) > 5


def test_what_grows_fast_is_given_back_less_often(process: list[int]) -> None:
    """Chunks that malloc gives out in turn are all taken again after they were given back."""
    freed = FreedMemory()
    given_back = []
    process[:] = 100 * MIB, 100 * MIB
    for look in range(200):
        freed.look()
        if process[0] == process[1]:
            given_back.append(look)
        process[0] = min(process[0] + 8 * MIB, 200 * MIB)
    assert given_back == [0, 3, 9, 19]
    assert process[0] == 200 * MIB


def test_what_a_step_takes_again_is_not(process: list[int]) -> None:
    """Activations, of which a look sees more or less."""
    freed = FreedMemory()
    given_back = 0
    for step in range(50):
        process[:] = (100 + 80 * (step % 3)) * MIB, 100 * MIB
        before = process[0]
        freed.look()
        given_back += process[0] < before
    assert given_back <= 2


@pytest.mark.skipif(
    sys.platform != "linux" or host_memory._malloc_trim() is None, reason="needs malloc_trim()"
)
def test_memory_does_not_grow_with_every_gather() -> None:
    """Buffers of one size, of which two exist at once, and small tensors that outlive them."""
    torch.empty(MMAP_BYTES - MIB, dtype=torch.uint8)  # so that malloc has the others on its heap
    buffers = [buffer_of(MIB + 2048) for _ in range(8)]
    kept: list[torch.Tensor] = []
    start = host_memory._resident()
    most = 0
    for count in range(800):
        buffer, last = buffers[count % 8], buffers[count % 8 - 1]
        buffer.allocate()
        buffer.flat.zero_()
        kept.append(torch.empty(1 + 3 * (count % 4)))
        del kept[: -300 : 1 + count % 7]
        last.free()
        most = max(most, host_memory._resident() - start)
    assert most < 150 * MIB  # without giving back 250
