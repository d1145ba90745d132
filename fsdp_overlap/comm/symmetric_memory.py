"""Collectives in symmetric memory: memory that all ranks of a group have registered together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    PendingCollective,
    TensorCollectives,
    divide_early,
    divided,
    own_range,
    reduce_into,
)
from fsdp_overlap.comm.process_groups import backend_name
from fsdp_overlap.comm.streams import streams_of
from fsdp_overlap.layout import ParamGroupPlan, Plan
from fsdp_overlap.torch_internals import symmetric_memory


class SymmetricPiece:
    """A piece of symmetric memory, which one collective after the other uses, on one comm stream.

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
        """Make the piece at least so large, if it has no memory yet."""
        self._reserved = max(self._reserved, nbytes)

    def take(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in the piece, for a collective of ``group`` on the current stream.
        Later ones overwrite it. Collective over ``group`` if the piece is not registered with
        it."""
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
    """The pieces that the collectives over one mesh use: for full buffers, for reduce inputs, and
    for the results of reductions."""

    def __init__(self, device: torch.device) -> None:
        self.gathered = SymmetricPiece(device)
        self.unreduced = SymmetricPiece(device)
        self.reduced = SymmetricPiece(device)

    def reserve(self, plan: Plan, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        """Make pieces large enough for a param group of equal shards."""
        self.gathered.reserve(plan.numel * compute_dtype.itemsize)
        if plan.specs[0].requires_grad:  # else they grow if it becomes trainable
            self.unreduced.reserve(plan.numel * reduce_dtype.itemsize)
            self.reduced.reserve(plan.shard_numels[0] * reduce_dtype.itemsize)


class SymmetricCollectives:
    """For equal shards on NCCL: collectives in ``memory``, on which NCCL has faster ones. What
    travels is copied there and back."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory = memory
        self._collectives = TensorCollectives()

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
    ) -> PendingCollective:
        gathered = self._memory.gathered.take(group, plan.numel, full.dtype)
        own = own_range(gathered, plan, group).copy_(shard, non_blocking=True)
        self._collectives.all_gather(gathered, own, plan, group)
        full.copy_(gathered)
        return PendingCollective((), lambda: full)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        # In symmetric memory NCCL 2.29 has sums, and no means.
        left = divide_early(gradients, group.size() if divisor is None else divisor)
        source = self._memory.unreduced.take(group, plan.numel, gradients.dtype)
        own = self._memory.reduced.take(group, plan.shard_numels[0], gradients.dtype)
        source.copy_(gradients)
        reduce_into(own, source, group, dist.ReduceOp.SUM)
        mean = divided(own.clone(), left)
        return PendingCollective((), lambda: mean)


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
    name = backend_name(device.type, group)
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
