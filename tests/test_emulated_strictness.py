"""The emulated device is as strict as CUDA: for each promise that CUDA does not make, a program
that relies on it is found, and a right one is not. `docs/modelled_device.md` has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fsdp_overlap.modelled import ModelledDevice, current_stream, running
from support.modelled import HERE, kinds


@pytest.fixture
def device() -> Iterator[ModelledDevice]:
    with running(ModelledDevice()) as device:
        yield device


# Copies between the host and the device


def synchronize_an_event() -> None:
    current_stream().record_event().synchronize()


def synchronize_the_stream() -> None:
    current_stream().synchronize()


def synchronize_the_device() -> None:
    torch.accelerator.synchronize()


def read_a_later_value() -> None:
    torch.zeros(1, device=HERE).item()


WAITS = (synchronize_an_event, synchronize_the_stream, synchronize_the_device, read_a_later_value)


def by_to(source: torch.Tensor) -> torch.Tensor:
    return source.to("cpu", non_blocking=True)


def by_to_of_another_dtype(source: torch.Tensor) -> torch.Tensor:
    return source.to(torch.device("cpu"), torch.float64, non_blocking=True)


def by_to_like(source: torch.Tensor) -> torch.Tensor:
    return source.to(torch.zeros(1), non_blocking=True)


def by_copy(source: torch.Tensor) -> torch.Tensor:
    return torch.empty(8, pin_memory=True).copy_(source, non_blocking=True)


def by_foreach_copy(source: torch.Tensor) -> torch.Tensor:
    target = torch.empty(8, pin_memory=True)
    torch._foreach_copy_([target], [source], non_blocking=True)
    return target


def into_a_slice(source: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(16, pin_memory=True)
    whole[4:12].copy_(source, non_blocking=True)
    return whole


def into_pageable_memory(source: torch.Tensor) -> torch.Tensor:
    return torch.empty(8).copy_(source, non_blocking=True)


def into_every_second_element(source: torch.Tensor) -> torch.Tensor:
    return torch.empty(16, pin_memory=True)[::2].copy_(source, non_blocking=True)


TO_HOST: dict[Callable[[torch.Tensor], torch.Tensor], bool] = {
    by_to: False,
    by_to_of_another_dtype: False,
    by_to_like: False,
    by_copy: False,
    by_foreach_copy: False,
    into_a_slice: False,
    # CUDA says of pageable memory that the host "might" wait.
    into_pageable_memory: True,
    into_every_second_element: True,
}
"""By the copy that does not promise to wait: whether it may wait."""


def add(copy: torch.Tensor) -> None:
    copy + 1


def to_numbers(copy: torch.Tensor) -> None:
    copy.tolist()


def to_one_number(copy: torch.Tensor) -> None:
    copy[4].item()


def to_numpy(copy: torch.Tensor) -> None:
    copy.numpy()


def overwrite(copy: torch.Tensor) -> None:
    copy.zero_()


@pytest.mark.parametrize("use", [add, to_numbers, to_one_number, to_numpy, overwrite])
@pytest.mark.parametrize("copy", TO_HOST)
def test_what_is_copied_to_the_host_is_not_there_yet(
    device: ModelledDevice,
    copy: Callable[[torch.Tensor], torch.Tensor],
    use: Callable[[torch.Tensor], None],
) -> None:
    arriving = copy(torch.ones(8, device=HERE))
    assert bool(device.syncs) == TO_HOST[copy]
    use(arriving)
    assert set(kinds(device)) == {"race"}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("copy", TO_HOST)
def test_it_is_there_after_a_wait(
    device: ModelledDevice,
    copy: Callable[[torch.Tensor], torch.Tensor],
    wait: Callable[[], None],
) -> None:
    arriving = copy(torch.ones(8, device=HERE))
    wait()
    assert arriving.sum().item() >= 8
    arriving.zero_()
    assert not device.findings


def test_an_event_from_before_a_copy_tells_nothing_of_it(device: ModelledDevice) -> None:
    source = torch.ones(8, device=HERE)
    event = current_stream().record_event()
    copy = source.to("cpu", non_blocking=True)
    event.synchronize()
    copy.sum()
    assert kinds(device) == ["race"]


def test_to_pins_what_it_does_not_wait_for_and_nothing_else(device: ModelledDevice) -> None:
    source = torch.ones(8, device=HERE)
    assert source.to("cpu", non_blocking=True).is_pinned()
    assert not device.syncs
    assert not source.to("cpu").is_pinned()
    assert not source.cpu().is_pinned()
    assert not torch.ones(8).to("cpu", torch.float64, non_blocking=True).is_pinned()
    assert len(device.syncs) == 2
    assert not device.findings


def move(pinned: torch.Tensor) -> torch.Tensor:
    return pinned.to(HERE, non_blocking=True)


def fill(pinned: torch.Tensor) -> torch.Tensor:
    return torch.empty(8, device=HERE).copy_(pinned, non_blocking=True)


@pytest.mark.parametrize("copy", [move, fill])
def test_the_host_writes_what_the_device_still_reads(
    device: ModelledDevice, copy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    pinned = torch.ones(8).pin_memory()
    copy(pinned)
    assert pinned.sum() == 8  # two reads do not disturb each other
    assert not device.findings
    pinned.zero_()
    assert kinds(device) == ["race"]
    assert not device.syncs


@pytest.mark.parametrize("wait", WAITS)
def test_the_host_writes_it_after_a_wait(device: ModelledDevice, wait: Callable[[], None]) -> None:
    pinned = torch.ones(8).pin_memory()
    move(pinned)
    wait()
    pinned.zero_()
    assert not device.findings


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pageable_memory_is_staged_and_that_orders_nothing_else(
    device: ModelledDevice, is_pinned: bool
) -> None:
    other = torch.ones(8, device=HERE).to("cpu", non_blocking=True)
    pageable = torch.ones(16)
    if is_pinned:  # torch makes it contiguous first
        pageable = pageable.pin_memory()
    source = pageable[::2]
    moved = source.to(HERE, non_blocking=True)
    pageable.zero_()
    assert not device.findings
    assert moved.sum().item() == 8
    moved = source.to(HERE, non_blocking=True)
    later = moved.to("cpu", non_blocking=True)
    source.to(HERE, non_blocking=True)  # the host might wait, and might not
    later.sum()
    other.sum()
    assert kinds(device) == ["race"]


def test_a_number_on_the_host_is_read_when_the_operation_is_enqueued(
    device: ModelledDevice,
) -> None:
    number = torch.tensor(2.0)
    torch.ones(8, device=HERE) * number
    number.zero_()
    assert not device.findings
    arriving = torch.ones((), device=HERE).to("cpu", non_blocking=True)
    torch.ones(8, device=HERE) * arriving
    assert kinds(device) == ["race"]
