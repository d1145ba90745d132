"""A shard that the ranks with copies of it divide among each other."""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from fsdp_overlap.comm.collectives import choose
from fsdp_overlap.comm.groups import LaneGroups
from fsdp_overlap.comm.lanes import Lane, Ticket
from fsdp_overlap.engine.domain import Domain
from fsdp_overlap.layout import BucketPlan, Plan
from fsdp_overlap.tensor.flat_buffer import FlatBuffer


class Source(Protocol):
    """The bucket that a shard belongs to. ``shard`` is this rank's part."""

    label: str
    plan: Plan
    shard: torch.Tensor
    compute_dtype: torch.dtype
    is_meta: bool
    groups: LaneGroups

    @property
    def version(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class DividedShard:
    """A shard that the ranks with copies of it divide: each rank keeps a part, which its optimizer
    steps.

    ``whole`` is the shard put together, in the dtype of compute. All-gathers among shards read it,
    and it is kept until a part is edited. So the ranks with copies exchange parts once for each
    step of the optimizer, however often a unit is gathered. ``plan`` is about the shard alone, and
    has no parameters.
    """

    def __init__(self, bucket: Source, domain: Domain) -> None:
        self.bucket: Source = weakref.proxy(bucket)  # which owns this object
        group = bucket.groups.across
        assert group is not None
        first = domain.shard_rank * domain.copies
        numels = bucket.plan.shard_numels[first : first + domain.copies]
        self.plan = plan = BucketPlan((), (), numels)
        self.collectives = choose(domain.device_type, group, plan)
        self.whole = FlatBuffer(plan, bucket.compute_dtype, bucket.device)
        self._ticket: Ticket | None = None
        self._version = -1

    @property
    def is_fresh(self) -> bool:
        """Whether ``whole`` is put together, or will be, from the parts as they are now."""
        return self._version == self.bucket.version

    def gather(self, lane: Lane) -> None:
        """Enqueues the all-gather that puts the shard together, unless it is fresh or on the meta
        device. Collective over the copies."""
        if self.is_fresh or self.bucket.is_meta:
            return
        self.wait()
        group = self.bucket.groups.across
        assert group is not None
        # Compute edited the part. It also has waited for all all-gathers that read ``whole``, but
        # for those whose result nobody needs now.
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
        """Makes the current lane wait until the shard is put together."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None

    def reset(self) -> None:
        """Makes the next :meth:`gather` put the shard together anew, even if the last failed."""
        with suppress(RuntimeError):  # a collective failed
            self.wait()
        self._ticket = None
        self._version = -1
