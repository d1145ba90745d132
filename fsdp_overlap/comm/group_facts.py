"""What is to know of a process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.streams import current_device, has_streams
from fsdp_overlap.torch_internals import unwrapped


def alive(reference: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group that ``reference`` refers to.

    Raises:
        RuntimeError: the user destroyed the group.
    """
    group = reference()
    if group is None:
        raise RuntimeError(
            "the process groups of this model were destroyed by destroy_process_group(): "
            "build and shard the model again after the next init_process_group()"
        )
    return group


def collectives_issued(group: dist.ProcessGroup) -> int | None:
    """How many collectives this rank issued on ``group``; ``None`` if its backend does not
    count."""
    try:
        issued: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:
        return None
    return issued


def registered_backend(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that ``group`` was told to use for tensors on ``device_type``. Empty if it has
    none for them."""
    devices = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return devices.get(device_type, "")


def backend_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """Return the backend that serves ``device_type`` in ``group``. ``None`` if there is none."""
    try:
        return unwrapped(group._get_backend(torch.device(device_type)))
    except RuntimeError:
        return None


one_rank_communicates = False
"""Whether a group of one rank runs collectives as others do. Tests set it, to try a backend on one
device. Otherwise nothing travels there."""


def communicates(group: dist.ProcessGroup) -> bool:
    """Return whether anything travels on ``group``."""
    return group.size() > 1 or one_rank_communicates


def can_split(device_type: str, group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` has a communicator on this device that another group's can be split
    from, as NCCL's. Splitting takes less time and memory than a new connection."""
    is_there = has_streams(torch.device(device_type)) and communicates(group)
    if backend_name(device_type, group) == "fake":  # says so from torch 2.15 on, and connects none
        return False
    return is_there and bool(getattr(backend_of(group, device_type), "supports_splitting", False))


def connect(device_type: str, group: dist.ProcessGroup) -> None:
    """Make the communicator of ``group``, which else comes with its first collective, and wait on
    the host until nothing is under way on it. Only then memory can be registered with it, and
    others can be split from it. Does nothing for backends without communicators to split.
    Collective over ``group``."""
    if can_split(device_type, group):
        device = current_device(device_type)  # a new group would guess another one
        dist.barrier(group=group, device_ids=[device.index])


def is_in_python(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether ``group`` is written in Python and does all itself, without a backend, as that
    of torch's ``MultiThreadedTestCase``."""
    return type(group) is not dist.ProcessGroup and backend_of(group, device_type) is None


def options_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """The backend's options that ``group`` was made with. ``None`` if it does not tell."""
    return getattr(backend_of(group, device_type), "options", None)


def backend_name(device_type: str, group: dist.ProcessGroup) -> str:
    """``"gloo"``, ``"nccl"``, ...: the backend that serves ``device_type`` in ``group``."""
    backend = backend_of(group, device_type)
    name: str = dist.get_backend(group) if backend is None else backend.name()
    return name.lower()


def can_close(device_type: str, group: dist.ProcessGroup) -> bool:
    """Whether the host waits for the collectives of ``group``, and they can be made to end."""
    return device_type == "cpu" and backend_name(device_type, group) == "gloo"


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout of ``group``, or ``None`` where its backend does not tell."""
    return getattr(options_of(group, device_type), "_timeout", None)
