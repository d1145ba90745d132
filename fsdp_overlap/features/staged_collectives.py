"""Collectives in memory that is allocated for them alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    AVG,
    SUM,
    Op,
    RangeCollectives,
    divide_early,
    divided,
    own_range,
)
from fsdp_overlap.comm.comm_streams import PendingCollective


class StagedCollectives(RangeCollectives):
    """For equal shards: collectives in memory that is allocated for them alone. Parameters and
    gradients are views of other memory, so what travels is copied there and back."""

    has_means = True
    """Whether :meth:`_reduce` can take a mean."""

    @abstractmethod
    def _gather_output(self, full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return memory for what fills ``full``."""

    @abstractmethod
    def _gather(self, full: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Do as :func:`gather_into`."""

    @abstractmethod
    def _reduce_buffers(
        self, gradients: torch.Tensor, group: dist.ProcessGroup
    ) -> Iterable[torch.Tensor]:
        """Return memory for ``gradients``, and for this rank's range of the result."""

    @abstractmethod
    def _reduce(
        self, own: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, op: Op
    ) -> None:
        """Do as :func:`reduce_into`."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        output = self._gather_output(full, group)
        own = own_range(output, self.plan, group).copy_(shard, non_blocking=True)
        self._gather(output, own, group)
        full.copy_(output)
        return PendingCollective((), lambda: full)

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        if divisor is None and not self.has_means:
            divisor = group.size()
        left = divide_early(gradients, divisor)
        source, own = self._reduce_buffers(gradients, group)
        source.copy_(gradients)
        self._reduce(own, source, group, AVG if divisor is None else SUM)
        mean = divided(own.clone(), left)
        return PendingCollective((), lambda: mean)
