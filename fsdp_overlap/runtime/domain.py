"""The ranks that parameters are spread over, and what they share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from operator import or_
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.comm.collectives import CustomCollectives, CustomComms, choose
from fsdp_overlap.comm.groups import GroupCache, LaneGroups
from fsdp_overlap.comm.lanes import Lane, Ticket
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.runtime.order_check import OrderCheck
from fsdp_overlap.runtime.plans import UnitPlans
from fsdp_overlap.tensor.placement import RangeShard

if TYPE_CHECKING:
    from fsdp_overlap.runtime.bucket import Bucket


class Domain:
    """One mesh that buckets of a context are spread over.

    Its ranks have process groups, plan alike, check the order of their collectives, and tell each
    other which parameters have a gradient on some of them. ``mesh`` has one dimension, along which
    parameters are sharded, or two, ``(replicate, shard)``: along the first lie copies.

    Raises:
        ValueError: the mesh has more dimensions.
    """

    def __init__(
        self, mesh: DeviceMesh, device: torch.device, layout: LayoutRule, groups: GroupCache
    ) -> None:
        check_mesh(mesh)
        self.mesh = mesh
        self.device = device
        self.plans = UnitPlans(self.shard_size, layout)
        self.has_reduced = False
        """Whether a reduce-scatter was issued since the last :meth:`agree`."""
        self.reading: Ticket | None = None
        """The last all-gather that reads a shard on the host, beside a device that computes."""
        self._group_cache = groups
        self._buckets: list[weakref.ref[Bucket]] = []
        self._flags = 0
        self._has_gradient = bytearray()

    @property
    def shard_size(self) -> int:
        """The number of ranks that parameters are sharded among."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def copies(self) -> int:
        """The number of ranks that hold each shard."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @cached_property
    def groups(self) -> LaneGroups:
        return self._group_cache.get(self.mesh)

    @cached_property
    def order_check(self) -> OrderCheck:
        return OrderCheck(self.device, self._describe)

    @cached_property
    def knows_gradients(self) -> bool:
        """Whether it is known at the end of backward, without waiting for a GPU, which parameters
        have a gradient on some rank."""
        return self.device.type != "cuda" or self.mesh.size() == 1

    def placements(self, placement: RangeShard) -> tuple[Placement, ...]:
        """How a tensor lies over the mesh whose ranges are as ``placement`` says."""
        return (placement,) if self.mesh.ndim == 1 else (Replicate(), placement)

    def register(self, bucket: Bucket) -> None:
        """Takes ``bucket`` in, in the same order on every rank of the mesh."""
        bucket.domain = self
        bucket.index = len(self._buckets)
        bucket.first_flag = self._flags
        self._buckets.append(weakref.ref(bucket))
        self._flags += len(bucket.parameters)
        self.forget_gradients()

    def connect(self, bucket: Bucket, separate: bool, comms: CustomComms) -> None:
        """Gives ``bucket`` what it is gathered and reduced by. Collective over the mesh at the
        first call."""
        groups = self.groups if separate else self._group_cache.get(self.mesh, separate=False)
        collectives = choose(self.mesh.device_type, groups.gather, bucket.plan)
        if comms != CustomComms() and self.shard_size > 1:
            collectives = CustomCollectives(comms, collectives)
        bucket.connect(collectives, groups)

    def note_gather(self, bucket: Bucket) -> None:
        """This rank issues the all-gather of ``bucket``."""
        self.order_check.note(bucket.index * 2)

    def note_reduction(self, bucket: Bucket) -> None:
        """This rank issues the reduce-scatter of ``bucket``."""
        self.has_reduced = True
        self.order_check.note(bucket.index * 2 + 1)

    def note_gradients(self, bucket: Bucket, filled: Sequence[bool]) -> None:
        """This rank reduces gradients of the parameters of ``bucket`` that are ``filled``."""
        flags = slice(bucket.first_flag, bucket.first_flag + len(filled))
        self._has_gradient[flags] = bytes(map(or_, self._has_gradient[flags], filled))

    def agree(self, lane: Lane) -> bytes | bytearray:
        """At the end of a backward that reduced: compares what the ranks issued, and returns which
        parameters have a gradient, on some rank as far as this one knows. Collective over the mesh.

        Raises:
            RuntimeError: the ranks' collectives differ, in this backward or, on a GPU, in the last.
        """
        flags = self._has_gradient
        self.forget_gradients()
        self.has_reduced = False
        groups = self.groups.of_all
        if not groups:
            return flags
        if not self.knows_gradients:
            self.order_check.read(groups)  # of the last backward
        self.order_check.send(lane, groups, flags)
        if not self.knows_gradients:
            return flags
        agreed = self.order_check.read(groups)
        assert agreed is not None
        return agreed

    def finish_reading(self) -> None:
        """Before offloaded shards may be edited, on the host: blocks it until they were copied to
        the device."""
        if self.reading is not None:
            self.reading.wait_on_host()
            self.reading = None

    def forget_gradients(self) -> None:
        self._has_gradient = bytearray(self._flags)

    def reset(self) -> None:
        """Forgets what was issued, on every rank."""
        self.order_check.drop()
        self.forget_gradients()
        self.has_reduced = False
        self.reading = None

    def _describe(self, code: int) -> str:
        bucket = self._buckets[code // 2]()
        kind = "reduce_scatter" if code % 2 else "all_gather"
        return f"{kind} of unit {bucket.label!r}" if bucket is not None else kind


def check_mesh(mesh: DeviceMesh) -> None:
    """Before a :class:`Domain` is made of it.

    Raises:
        ValueError: parameters cannot be sharded over it.
    """
    if mesh.ndim > 2:
        raise ValueError(
            f"parameters are sharded over a mesh of one dimension, or of two, (replicate, shard); "
            f"got {mesh.ndim}, {mesh.mesh_dim_names or tuple(mesh.shape)}: pass the data-parallel "
            "ones, as mesh['replicate', 'shard']"
        )
