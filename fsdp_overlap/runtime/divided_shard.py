"""A shard that the ranks with copies of it divide among each other."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from fsdp_overlap.comm.collectives import Collectives
from fsdp_overlap.comm.groups import LaneGroups
from fsdp_overlap.comm.lanes import Lane, Ticket
from fsdp_overlap.layout import BucketPlan
from fsdp_overlap.tensor.flat_buffer import FlatBuffer


class Source(Protocol):
    """The bucket that a shard belongs to. ``shard`` is this rank's part."""

    label: str
    shard: torch.Tensor
    compute_dtype: torch.dtype
    is_meta: bool
    groups: LaneGroups

    @property
    def version(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class DividedShard:
    """A shard that the ranks with copies of it divide: each keeps, and its optimizer steps, a part.

    Put together, in the dtype of compute, it is kept until a part is edited: what all-gathers among
    shards read. So the ranks with copies exchange it once for each step of the optimizer, however
    often a unit is gathered. ``plan`` is of the shard alone, and has no parameters.
    """

    def __init__(self, bucket: Source, plan: BucketPlan, collectives: Collectives) -> None:
        self.bucket = bucket
        self.plan = plan
        self.collectives = collectives
        self.whole = FlatBuffer(plan, bucket.compute_dtype, bucket.device)
        self._ticket: Ticket | None = None
        self._version = -1

    @property
    def is_fresh(self) -> bool:
        """Whether it is put together, or will be, from the parts as they are now."""
        return self._version == self.bucket.version

    def gather(self, lane: Lane) -> None:
        """Enqueues what puts it together, unless that was done, or there is nothing yet. Collective
        over the copies."""
        if self.is_fresh or self.bucket.is_meta:
            return
        self.wait()
        group = self.bucket.groups.across
        assert group is not None
        # Compute edited the part, and has waited for all all-gathers that read what was put
        # together but those that are in vain now.
        lane.after_compute()
        if not self.whole.allocated:
            lane.allocate(self.bucket.label, self.whole)
        version = self.bucket.version
        issue = partial(
            self.collectives.all_gather, self.whole.flat, self.bucket.shard, self.plan, group
        )
        self._ticket = lane.enqueue(
            "copies_all_gather",
            self.bucket.label,
            issue,
            nbytes=self.whole.nbytes_of_others(group.rank()),
        )
        self._version = version

    def wait(self) -> None:
        """Makes the current lane wait until it is put together."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None

    def reset(self) -> None:
        """Whatever became of it, it is put together anew."""
        with suppress(RuntimeError):  # of a collective that failed
            self.wait()
        self._ticket = None
        self._version = -1
