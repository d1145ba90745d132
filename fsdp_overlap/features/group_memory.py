"""Memory that a backend allocates for its own collectives, as NCCL does for NVLink SHARP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.comm.comm_streams import streams_of
from fsdp_overlap.comm.process_groups import backend_name, backend_of


class GroupMemory:
    """A pool of memory on ``device`` that the backend of ``groups`` allocates. It is registered
    with each group, which must be connected, so that their collectives need no copies of their own.

    Raises:
        ValueError: the backend allocates no memory.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        check_memory(groups[0], device)
        self._device_module = streams_of(device)
        backends: list[Any] = [backend_of(group, device.type) for group in dict.fromkeys(groups)]
        self._pool = self._device_module.MemPool(backends[0].mem_allocator)
        for backend in backends:
            # What the pool takes from the device later is registered then.
            backend.register_mem_pool(self._pool)

    def use(self) -> AbstractContextManager[None]:
        """Take what this thread allocates within from the pool."""
        within: AbstractContextManager[None] = self._device_module.use_mem_pool(self._pool)
        return within


def memory_of(param_group: Any) -> GroupMemory:
    """Return memory that the backend allocates for what travels on the groups of ``param_group``.
    Param groups of the same groups share it."""
    groups, mesh_info = param_group.groups, param_group.mesh_info
    names = groups.gather.group_name, groups.reduce.group_name
    if names not in mesh_info.memories:
        memory = GroupMemory((groups.gather, groups.reduce), mesh_info.device)
        mesh_info.memories[names] = memory
    made: GroupMemory = mesh_info.memories[names]
    return made


def check_memory(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that the backend of ``group`` allocates memory on ``device``.

    Raises:
        ValueError: it does not.
    """
    backend = backend_of(group, device.type)
    if not hasattr(streams_of(device), "MemPool") or not backend.supports_tensor_alloc(device):
        raise ValueError(
            f"{backend_name(group, device.type)} allocates no memory on {device.type} here, as "
            "NCCL does on GPUs with NVLink SHARP: leave the call out"
        )
