"""A process group of any size in one process, whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.tools.emulator.device import EnqueuedCollective
from fsdp_overlap.tools.emulator.dispatch import tensors_in, unseen
from fsdp_overlap.tools.emulator.torch_module import active, is_available
from fsdp_overlap.tools.emulator.works import FinishedWork
from fsdp_overlap.tools.torch_internals import name_of_group

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

    backend = BACKEND
    """The name that it goes by."""

    _coalesced: list[tuple[str, Sequence[torch.Tensor], Sequence[torch.Tensor], bool]] | None = None
    """The calls that are coalesced: their kinds, what they read and write, and whether they are
    asynchronous."""

    def name(self) -> str:
        return self.backend

    def getBackendName(self) -> str:
        return self.backend

    @property
    def group_name(self) -> str:
        return name_of_group(self)

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _issue(self, kind: str, writes: Any, reads: Any = (), opts: object = None) -> dist.Work:
        outputs = tensors_in(writes)
        reads, writes = ([t for t in tensors_in(each) if t.numel()] for each in (reads, writes))
        is_async = getattr(opts, "asyncOp", True)
        if self._coalesced is not None:
            self._coalesced.append((kind, reads, writes, is_async))
            return FinishedWork(outputs)  # as NCCL's: it orders nothing
        return FinishedWork(outputs, self._enqueue(kind, reads, writes, is_async))

    def _enqueue(
        self,
        kind: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        is_async: bool,
    ) -> EnqueuedCollective | None:
        # Of each tensor torch itself would say that it is on the host, within its own collectives.
        if is_available() and any(map(active().is_here, (*reads, *writes))):
            return active().issue(self, kind, reads, writes, is_async)
        return None

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        calls, self._coalesced = self._coalesced or [], None
        kinds = {kind for kind, *_ in calls}
        if len(kinds) == 1 and kinds <= {"broadcast", "reduce"}:  # one launch
            reads = [tensor for _, each, _, _ in calls for tensor in each]
            writes = [tensor for _, _, each, _ in calls for tensor in each]
            calls = [(kinds.pop(), reads, writes, calls[-1][-1])]
        enqueued = None
        for call in calls:
            enqueued = self._enqueue(*call)  # they are on one stream
        return FinishedWork((), enqueued) if not calls or calls[-1][-1] else None

    def _allgather_base(self, output: Any, input: Any, opts: object = None) -> dist.Work:
        _copy_to_all(output, input, self.size())
        return self._issue("all_gather", output, input, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: object = None
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            _copy_to_all(output, input, self.size())
        return self._issue("all_gather", outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: object = None) -> dist.Work:
        _copy_own_part(output, input, self.rank())
        return self._issue("reduce_scatter", output, input, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        _copy(outputs[0], [inputs[0]] * len(outputs[0]))
        return self._issue("all_gather", outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        _copy([outputs[0]], [inputs[0][self.rank()]])
        return self._issue("reduce_scatter", outputs, inputs, opts)

    def allreduce(self, tensors: Any, opts: object = None) -> dist.Work:
        return self._issue("all_reduce", tensors, (), opts)

    def allreduce_coalesced(self, tensors: Any, opts: object = None) -> dist.Work:
        return self._issue("all_reduce", tensors, (), opts)

    def reduce(self, tensors: Any, opts: object = None) -> dist.Work:
        return self._issue("reduce", tensors, (), opts)

    def gather(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        if outputs:
            _copy(outputs[0], [inputs[0]] * len(outputs[0]))
        return self._issue("gather", outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        if inputs:
            _copy(outputs, [inputs[0][self.rank()]])
        return self._issue("scatter", outputs, inputs, opts)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        return self._issue("send", (), tensors)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        _fill_with_zeros(tensors)
        return self._issue("recv", tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self.recv(tensors, -1, tag)

    def alltoall(self, outputs: Any, inputs: Any, opts: object = None) -> dist.Work:
        _copy(outputs, inputs)
        return self._issue("all_to_all", outputs, inputs, opts)

    def broadcast(self, tensors: Any, opts: object = None) -> dist.Work:
        return self._issue("broadcast", tensors, (), opts)

    def alltoall_base(self, output: Any, input: Any, *options: object) -> dist.Work:
        _copy([output], [input])
        return self._issue("all_to_all", output, input, options[-1] if options else None)

    def barrier(self, opts: object = None) -> dist.Work:
        if is_available():
            active().wait_for_current("barrier")
        return FinishedWork()

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: object = None
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            _copy_own_part(output, input, self.rank())
        return self._issue("reduce_scatter", outputs, inputs, opts)

    # What later releases of torch call some of them.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    # The emulated device is to see a collective, and not how it is made up.
    with unseen(), torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            there = target.untyped_storage().nbytes() and source.untyped_storage().nbytes()
            if target.shape == source.shape and there and target.is_meta == source.is_meta:
                target.detach().copy_(source)


def _copy_to_all(output: torch.Tensor, input: torch.Tensor, ranks: int) -> None:
    if input.numel() and output.numel() == ranks * input.numel():
        with unseen():
            parts, source = output.detach().view(ranks, -1), input.detach().reshape(1, -1)
        _copy([parts], [source.expand_as(parts)])


def _copy_own_part(output: torch.Tensor, input: torch.Tensor, rank: int) -> None:
    if output.numel() and input.numel() % output.numel() == 0:
        with unseen():
            parts, target = input.detach().reshape(-1, output.numel()), output.detach().view(-1)
            own = parts[rank % len(parts)]
        _copy([target], [own])


def _fill_with_zeros(tensors: Sequence[torch.Tensor]) -> None:
    with unseen():
        for tensor in tensors:
            tensor.detach().zero_()


dist.Backend.register_backend(
    BACKEND,
    lambda store, rank, world_size, timeout: FakeProcessGroup(rank, world_size),
    devices=["cpu", "emulated"],
)
