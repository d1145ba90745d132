"""A emulated device that notes what a step uses: memory, links, and the host's time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_overlap.emulator import EmulatedDevice, Operation, Timing
from fsdp_overlap.simulator.clock import full_of
from fsdp_overlap.simulator.memory import Ledger
from fsdp_overlap.simulator.nccl_tuning import Kind


class Stretch(NamedTuple):
    """Operations of compute in a row, each of which waited for the host to enqueue it. In seconds
    of the device's time; compute did nothing for ``waited`` of them."""

    start: float
    end: float
    waited: float


class Collective(NamedTuple):
    """A collective among ``ranks``, of ``nbytes`` in the full buffer."""

    kind: Kind
    ranks: Sequence[int]
    nbytes: int


class ObservedDevice(EmulatedDevice):
    """Tensors have no values. ``stretches`` and ``collectives`` may be cleared at any time."""

    def __init__(self, timing: Timing) -> None:
        super().__init__(timing=timing, values=False)
        self.allocator: Ledger = Ledger(self)
        self.stretches: list[Stretch] = []
        self.collectives: list[Collective] = []
        self._is_late = False
        """Whether compute waited for the host before its last operation."""

    def run(self, operation: Operation, on_host: bool = False) -> None:
        stream, ready = self.current, self.current.ends
        super().run(operation, on_host)
        if on_host:
            return
        self.allocator.note(operation, stream)
        if operation.group is not None:
            nbytes = sum(tensor.nbytes for tensor in full_of(operation))
            ranks = dist.get_process_group_ranks(operation.group)
            self.collectives.append(Collective(cast(Kind, operation.name), ranks, nbytes))
        if stream is self.default:
            self._note_wait(ready, self.host.ends)

    def _note_wait(self, ready: float, enqueued: float) -> None:
        was_late, self._is_late = self._is_late, enqueued > ready
        if not self._is_late:
            return
        waited = enqueued - ready
        if was_late and self.stretches:
            last = self.stretches[-1]
            self.stretches[-1] = Stretch(last.start, enqueued, last.waited + waited)
        else:
            self.stretches.append(Stretch(ready, enqueued, waited))

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Within, what the steps of optimizers take is known to be theirs."""

        def begin(*_: Any) -> None:
            self.allocator.phase = "optimizing"

        def end(*_: Any) -> None:
            self.allocator.phase = "training"

        hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
