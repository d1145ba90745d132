"""Collectives in symmetric memory: memory that all ranks of a group have registered together."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    RangeCollectives,
    Transport,
    gather_into,
    reduce_into,
)
from fsdp_overlap.comm.comm_streams import streams_of
from fsdp_overlap.comm.process_groups import backend_name
from fsdp_overlap.features.staged_collectives import StagedCollectives
from fsdp_overlap.layout import ParamGroupPlan, Plan
from fsdp_overlap.torch_internals import symmetric_memory


class SymmetricBuffer:
    """Symmetric memory that one collective after the other uses, on one comm stream.

    It is taken from the device's pool for the first of them, as large as the largest needs it, and
    registered with each group for the first collective on that group. Registration is collective,
    and ranks come to it at the same points: they issue the same collectives of the same sizes in
    the same order (Note [pairing]), and nothing else decides. In particular, no allocator does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved = 0
        self._memory: torch.Tensor | None = None
        self._groups: set[str] = set()
        """The names of the groups that the memory is registered with."""

    def reserve(self, nbytes: int) -> None:
        """Make the buffer at least so large, if it has no memory yet."""
        self._reserved = max(self._reserved, nbytes)

    def get_buffer(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in the buffer, for a collective of ``group`` on the current stream.
        Later ones overwrite it. Collective over ``group`` if the buffer is not registered
        with it."""
        nbytes = numel * dtype.itemsize
        memory = self._memory
        if memory is None or memory.numel() < nbytes:
            self._groups.clear()
            memory = self._memory = self._allocate(max(nbytes, self._reserved))
        if group.group_name not in self._groups:
            symmetric_memory.rendezvous(memory, group)
            self._groups.add(group.group_name)
        return memory[:nbytes].view(dtype)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        pool = symmetric_memory.get_mem_pool(self._device)
        # The first forward may run in inference mode, and in-place ops refuse tensors made in it.
        with torch.inference_mode(False), streams_of(self._device).use_mem_pool(pool):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class SymmetricMemory:
    """The buffers that the collectives over one mesh use: for full buffers, for reduce inputs, and
    for the results of reductions."""

    def __init__(self, device: torch.device) -> None:
        self.gathered = SymmetricBuffer(device)
        self.unreduced = SymmetricBuffer(device)
        self.reduced = SymmetricBuffer(device)

    def reserve(self, plan: Plan, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        """Make the buffers large enough for a param group of equal shards."""
        self.gathered.reserve(plan.numel * compute_dtype.itemsize)
        if plan.specs[0].requires_grad:  # else they grow if it becomes trainable
            self.unreduced.reserve(plan.numel * reduce_dtype.itemsize)
            self.reduced.reserve(plan.shard_numels[0] * reduce_dtype.itemsize)


class SymmetricCollectives(StagedCollectives):
    """For equal shards on NCCL: collectives in ``memory``, on which NCCL has faster ones. In
    symmetric memory NCCL 2.29 has sums, and no means."""

    has_means = False

    def __init__(self, plan: ParamGroupPlan, memory: SymmetricMemory) -> None:
        super().__init__(plan)
        self._memory = memory

    def for_plan(self, plan: ParamGroupPlan) -> SymmetricCollectives:
        return SymmetricCollectives(plan, self._memory)

    def _gather_output(self, full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return self._memory.gathered.get_buffer(group, self.plan.numel, full.dtype)

    _gather = staticmethod(gather_into)

    def _reduce_buffers(
        self, gradients: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan, dtype = self.plan, gradients.dtype
        source = self._memory.unreduced.get_buffer(group, plan.numel, dtype)
        return source, self._memory.reduced.get_buffer(group, plan.shard_numels[0], dtype)

    _reduce = staticmethod(reduce_into)


class SymmetricTransport(Transport):
    """Gathers and reduces in memory that the param groups of one mesh share."""

    name = "symmetric memory"
    is_capturable = False

    def wrap(self, collectives: RangeCollectives, param_group: Any) -> RangeCollectives:
        mesh_info = param_group.mesh_info
        memory = _memories.setdefault(mesh_info, SymmetricMemory(mesh_info.device))
        plan = param_group.gather_plan
        memory.reserve(plan, param_group.compute_dtype, param_group.reduce_dtype)
        return SymmetricCollectives(plan.packed, memory)


_memories: WeakKeyDictionary[Any, SymmetricMemory] = WeakKeyDictionary()
"""By mesh info."""


def use_symmetric_memory(backend: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Make ``backend`` serve torch's symmetric memory on ``device``, for collectives of ``group``.

    Raises:
        ValueError: it cannot. Nothing was changed.
    """
    if backend != "NCCL":
        raise ValueError(
            f"set_symm_mem_for_comm({backend!r}): collectives are those of NCCL, and so is the "
            "memory; use 'NCCL'"
        )
    name = backend_name(group, device.type)
    if name != "nccl" or not hasattr(streams_of(device), "MemPool"):
        raise ValueError(
            f"{name} has no symmetric memory on {device.type}, as NCCL has on GPUs: leave the call "
            "to set_symm_mem_for_comm() out"
        )
    before = symmetric_memory.get_backend(device)
    try:
        if before != "NCCL":
            symmetric_memory.set_backend("NCCL")
        symmetric_memory.get_mem_pool(device)
    except (AttributeError, RuntimeError) as error:
        if before is not None:
            symmetric_memory.set_backend(before)  # type: ignore[arg-type]
        raise ValueError(
            f"torch {torch.__version__} has no symmetric memory of NCCL on {device}: leave the "
            f"call to set_symm_mem_for_comm() out ({error})"
        ) from error
