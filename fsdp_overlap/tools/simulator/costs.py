"""Costs of operations on a device, and of collectives over a fabric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import cast

import torch

from fsdp_overlap.tools.emulator import Operation
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.simulator.collective_time import (
    group_of,
    seconds_of_collective,
    seconds_of_list,
)
from fsdp_overlap.tools.simulator.compute_time import flops_of, seconds_of
from fsdp_overlap.tools.simulator.fusion import Fusion, is_fused
from fsdp_overlap.tools.simulator.hardware import Device, Fabric
from fsdp_overlap.tools.simulator.nccl_tuning import Kind
from fsdp_overlap.tools.simulator.profile import Profile

# NCCL gathers and reduces ranges of different sizes as a list of these.
_OF_RAGGED: dict[str, Kind] = {"all_gather": "broadcast", "reduce_scatter": "reduce"}
_BOUND, _STEPS = 9.0, 3600  # beyond 9 standard deviations lie less than 1e-18 of all devices


@dataclass(frozen=True)
class Costs:
    """How many seconds things take that nothing else disturbs, and what memory they take."""

    device: Device
    fabric: Fabric
    matmul_stretch: float = 1.0
    """How many times as long matrix products take as the device's numbers say."""
    other_stretch: float = 1.0
    """The same of all other compute, attention among it."""
    profile: Profile | None = None
    """What operations took on the device. For what it has not, the device's numbers are asked."""
    compiles: bool = False
    """Whether ``torch.compile`` fuses kernels (:class:`Fusion`)."""
    expandable_segments: bool = False
    """Whether the allocator's segments grow, as ``PYTORCH_ALLOC_CONF`` may have it."""

    @property
    def slowdown(self) -> float:
        """How much longer compute takes while a collective is under way: 0.1 for a tenth."""
        return self.device.overlap_slowdown

    def on_host(self, operation: Operation) -> float:
        """Return what the host takes to enqueue an operation."""
        return self.device.operation_seconds

    def compute(self, operation: Operation) -> float:
        """Return what ``operation`` takes as a kernel of its own."""
        call = operation.call
        is_product = bool(self._flops(operation)) and "attention" not in operation.name
        stretch = self.matmul_stretch if is_product else self.other_stretch
        if call is None:
            nbytes = sum(tensor.nbytes for tensor in (*operation.reads, *operation.writes))
            return stretch * (self.device.kernel_seconds + nbytes / self._bandwidth)
        if self.profile is not None:
            measured = self.profile.seconds_of(call.func, call.args, call.kwargs)
            if measured is not None:
                return stretch * measured
        if is_product:
            stretch /= self.device.share_in_training
        return stretch * seconds_of(self.device, call.func, call.args, call.kwargs, call.output)

    def compiled(self, operation: Operation, stream: Queue, fusion: Fusion) -> float:
        """Return what ``operation``, which is fused, adds to the time of the kernels that
        ``fusion`` makes."""
        if not self.compute(operation):  # a view
            return 0.0
        moved, begins = fusion.bytes_of(operation, stream)
        seconds = moved / self._bandwidth + begins * self.device.kernel_seconds
        return self.other_stretch * seconds

    def is_fused(self, operation: Operation) -> bool:
        """Return whether ``operation`` becomes a part of a kernel."""
        return self.compiles and is_fused(operation) and not self._flops(operation)

    def write_inputs(self, operation: Operation, stream: Queue, fusion: Fusion) -> float:
        """Return what kernels take to write what ``operation``, which is not fused, then reads."""
        return self.other_stretch * fusion.end_kernel(operation, stream) / self._bandwidth

    @property
    def _bandwidth(self) -> float:
        return self.device.memory_bandwidth * self.device.memory_efficiency

    def _flops(self, operation: Operation) -> float:
        call = operation.call
        return 0.0 if call is None else flops_of(call.func, call.args, call.kwargs, call.output)

    def collective(self, operation: Operation, ranks: Sequence[int]) -> float:
        group, kind = group_of(self.fabric, ranks), cast(Kind, operation.name)
        sizes = [tensor.nbytes for tensor in full_of(operation)]
        if len(sizes) == 1:
            return seconds_of_collective(self.fabric, group, kind, sizes[0])
        if len(operation.reads) != len(operation.writes):
            kind = _OF_RAGGED.get(kind, kind)
        return seconds_of_list(self.fabric, group, kind, sizes)

    def link(self, ranks: Sequence[int]) -> str:
        """Name what these ranks communicate over. Collectives on one link share it."""
        return "between nodes" if group_of(self.fabric, ranks).nodes > 1 else "within nodes"

    def slowest(self, ranks: int) -> float:
        """Return how many times as long compute takes on the slowest of so many devices."""
        return 1.0 + self.device.variation * expected_maximum(ranks)


def full_of(operation: Operation) -> Sequence[torch.Tensor]:
    """Return what a collective reads or what it writes: the larger of the two."""
    return max(
        operation.reads, operation.writes, key=lambda tensors: sum(t.nbytes for t in tensors)
    )


def expected_maximum(count: int) -> float:
    """Return the mean of the largest of ``count`` draws from the standard normal distribution."""
    # The mean of x is the integral of 1 - F(x) above zero less that of F(x) below, where
    # F = cdf ** count is the distribution of the largest.
    width = _BOUND / _STEPS
    cdf = NormalDist().cdf
    mean = 0.0
    for k in range(_STEPS):
        x = (k + 0.5) * width
        mean += (1.0 - cdf(x) ** count - cdf(-x) ** count) * width
    return mean
