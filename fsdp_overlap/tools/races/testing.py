"""Find races of a function, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from fsdp_overlap.tools.emulator.cuda import as_cuda
from fsdp_overlap.tools.emulator.device import EmulatedDevice
from fsdp_overlap.tools.emulator.findings import Finding
from fsdp_overlap.tools.emulator.process_groups import nccl_in_name_only
from fsdp_overlap.tools.races.report import describe

DEVICES = 8
"""The GPUs that a machine is taken to have, at most."""


def environment(rank: int, ranks: int, devices: int, port: int = 29500) -> dict[str, str]:
    """Return the variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % devices),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(devices),
        "GROUP_RANK": str(rank // devices),
        "GROUP_WORLD_SIZE": str(-(-ranks // devices)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


@contextmanager
def one_of(ranks: int | None, rank: int = 0, allow: Sequence[str] = ()) -> Iterator[EmulatedDevice]:
    """Make this process one of so many ``ranks``, of which the others do not exist, with a GPU of
    its own. ``None`` stands for one process that torchrun has not started."""
    devices = min(ranks or 1, DEVICES)
    device = EmulatedDevice(device_type="cuda", index=rank % devices, allow=allow)
    with being_one_of(device, ranks, rank, devices):
        yield device


@contextmanager
def being_one_of(
    device: EmulatedDevice, ranks: int | None, rank: int = 0, devices: int = DEVICES
) -> Iterator[None]:
    """Make this process one of so many ``ranks``, of which the others do not exist, whose GPU is
    ``device``, one of as many ``devices`` of its machine."""
    variables = {} if ranks is None else environment(rank, ranks, devices)
    with (
        patch.dict("os.environ", variables),
        as_cuda(device, devices),
        nccl_in_name_only(rank, ranks or 1),
    ):
        yield


def find_races(function: Callable[[], object], *, ranks: int = 1, rank: int = 0) -> list[Finding]:
    """Call ``function``, which is written for GPUs, as ``rank`` of ``ranks``, on the emulated
    device. Return what it leaves unordered."""
    with one_of(ranks, rank) as device:
        function()
    return list(device.findings)


def assert_no_races(function: Callable[[], object], *, ranks: int = 1, rank: int = 0) -> None:
    """Call ``function`` as :func:`find_races` does.

    Raises:
        AssertionError: it leaves something unordered.
    """
    findings = find_races(function, ranks=ranks, rank=rank)
    if findings:
        raise AssertionError(describe(findings))
