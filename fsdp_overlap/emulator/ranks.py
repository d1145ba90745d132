"""Ranks in name only: a process group of any size in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.emulator.device import EnqueuedCollective
from fsdp_overlap.emulator.dispatch import tensors_in
from fsdp_overlap.emulator.torch_module import active, is_available
from fsdp_overlap.torch_internals import (
    DisableTorchFunction,
    disable_current_modes,
    name_of_group,
)

BACKEND = "in_name_only"


@contextmanager
def fake_ranks(world_size: int, backend: str = BACKEND) -> Iterator[None]:
    """Make this process the first of ``world_size`` ranks, of which the others do not exist.
    Within another, that one is gone afterwards."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# torch's stubs list more forms of each method than torch calls.
_ProcessGroup: Any = dist.ProcessGroup


class FakeProcessGroup(_ProcessGroup):
    """One of several ranks, of which the others do not exist. Lists are gathered as if the others
    held the same, so that ranks agree; else nothing moves. Good for the order of operations, not
    for values."""

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return name_of_group(self)

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _issue(self, kind: str, writes: Any, reads: Any = (), opts: object = None) -> dist.Work:
        reads, writes = ([t for t in tensors_in(each) if t.numel()] for each in (reads, writes))
        # Of each tensor torch itself would say that it is on the host, within its own collectives.
        if is_available() and any(map(active().is_here, (*reads, *writes))):
            is_async = getattr(opts, "asyncOp", True)
            return FinishedWork(active().issue(self, kind, reads, writes, is_async))
        return FinishedWork()

    def _allgather_base(self, output: Any, input: Any, opts: object = None) -> dist.Work:
        return self._issue("all_gather", output, input, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: object = None
    ) -> dist.Work:
        return self._issue("all_gather", outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: object = None) -> dist.Work:
        return self._issue("reduce_scatter", output, input, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        # The emulated device is to see a collective, and not how it is made up.
        with disable_current_modes(), DisableTorchFunction():
            for output in outputs[0]:
                if output.shape == inputs[0].shape and output.is_meta == inputs[0].is_meta:
                    output.detach().copy_(inputs[0])
        return self._issue("all_gather", outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        return self._issue("reduce_scatter", outputs, inputs, opts)

    def allreduce(self, tensors: Any, opts: object = None) -> dist.Work:
        return self._issue("all_reduce", tensors, (), opts)

    def broadcast(self, tensors: Any, opts: object = None) -> dist.Work:
        return self._issue("broadcast", tensors, (), opts)

    def alltoall_base(self, output: Any, input: Any, *options: object) -> dist.Work:
        return self._issue("all_to_all", output, input, options[-1] if options else None)

    def barrier(self, opts: object = None) -> dist.Work:
        if is_available():
            active().pass_barrier()
        return FinishedWork()

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: object = None
    ) -> dist.Work:
        return self._issue("reduce_scatter", outputs, inputs, opts)

    # What later releases of torch call some of them.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


class FinishedWork(dist.Work):
    """Work of which nothing is left to do for the host. The device may have ``enqueued`` it."""

    def __init__(self, enqueued: EnqueuedCollective | None = None) -> None:
        super().__init__()
        self._enqueued = enqueued

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._enqueued is not None:
            self._enqueued.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True


dist.Backend.register_backend(
    BACKEND,
    lambda store, rank, world_size, timeout: FakeProcessGroup(rank, world_size),
    devices=["cpu", "emulated"],
)
