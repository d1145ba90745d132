"""A part of a full buffer, kept between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Issued, choose
from fsdp_overlap.comm.group_facts import alive
from fsdp_overlap.layout import RowsPlan
from fsdp_overlap.tensor.flat_buffer import FlatBuffer


class KeptPart:
    """This rank's part of a bucket's full buffer, kept from forward to backward.

    Each of ``size`` neighbours, usually the ranks of one machine, keeps ``1 / size`` of the buffer
    ``full``. Backward gathers it from them alone. ``plan`` is the bucket's plan, merged to ``size``
    ranks (:meth:`BucketPlan.merged`).
    """

    def __init__(
        self, full: FlatBuffer, size: int, group: dist.ProcessGroup, device_type: str
    ) -> None:
        self.plan = plan = full.plan.merged(size)
        # What no gather fills travels, too.
        self._gaps = full.gaps if isinstance(full.plan, RowsPlan) else []
        self._collectives = choose(device_type, group, plan)
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
                torch._foreach_zero_(self._gaps)
            self._values = full.narrow(0, self._start, self._numel).clone()
            self._version = version

        return keep

    def drop(self, _: torch.Tensor | None = None) -> None:
        """Frees the part. The argument, which a lane passes, is not used."""
        self._values = None
