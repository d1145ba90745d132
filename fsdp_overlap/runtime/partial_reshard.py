"""A part of a full buffer, kept between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Collectives, Issued
from fsdp_overlap.comm.group_facts import alive
from fsdp_overlap.layout import BucketPlan


class KeptPart:
    """This rank's part of a bucket's full buffer, kept from forward to backward.

    Each of ``size`` neighbours, usually the ranks of one machine, keeps ``1 / size`` of the buffer.
    Backward gathers it from them alone. ``plan`` is the bucket's plan, merged to ``size`` ranks
    (:meth:`BucketPlan.merged`). ``gaps`` are the parts of the buffer that no gather fills.
    """

    def __init__(
        self,
        plan: BucketPlan,
        collectives: Collectives,
        group: dist.ProcessGroup,
        gaps: Sequence[torch.Tensor],
    ) -> None:
        self.plan = plan
        self._gaps = list(gaps)
        self._collectives = collectives
        self._group = ref(group)
        rank = group.rank()
        self._start, self._numel = plan.shard_starts[rank], plan.shard_numels[rank]
        self._values: torch.Tensor | None = None
        self._version = -1

    def nbytes_of_others(self, full: torch.Tensor) -> int:
        """The bytes that travel to this rank in :meth:`all_gather`."""
        return (self.plan.numel - self._numel) * full.element_size()

    def holds(self, version: int) -> bool:
        """Whether a part is kept, and was gathered from shards of ``version``."""
        return self._values is not None and self._version == version

    def all_gather(self, full: torch.Tensor) -> Issued:
        """Fills ``full`` from the neighbours' parts. Collective over the neighbours."""
        assert self._values is not None
        return self._collectives.all_gather(full, self._values, self.plan, alive(self._group))

    def keeper(self, version: int) -> Callable[[torch.Tensor], None]:
        """A function that keeps this rank's part of a full buffer. The buffer was gathered from
        shards of ``version``."""

        def keep(full: torch.Tensor) -> None:
            if self._gaps:
                torch._foreach_zero_(self._gaps)  # they travel too
            self._values = full.narrow(0, self._start, self._numel).clone()
            self._version = version

        return keep

    def drop(self, _: torch.Tensor | None = None) -> None:
        """Frees the part. The argument, which a lane passes, is not used."""
        self._values = None
