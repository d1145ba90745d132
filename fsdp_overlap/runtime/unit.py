"""One unit: a module and the parameters it owns."""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_overlap.comm.collectives import CustomComms
from fsdp_overlap.comm.lanes import Lane, Mark
from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.copies import Reducing
from fsdp_overlap.runtime.gradients import BucketGradients

if TYPE_CHECKING:
    from fsdp_overlap.runtime.context import FsdpContext


class Unit:
    """What :func:`fully_shard` keeps of a module: its buckets and how it is to be treated.

    The module's hooks own the unit; the unit refers to the module weakly, and so does the context
    to the unit. ``gradients`` are those of the buckets that are trainable now.
    """

    def __init__(
        self,
        module: nn.Module,
        context: FsdpContext,
        mesh: DeviceMesh,
        buckets: list[Bucket],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.module = weakref.ref(module)
        self.mesh = mesh
        self.buckets = buckets
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.reduces_last_only = False
        """Whether backwards but the last of a step leave gradients unreduced."""
        self.is_last_backward = True
        self.ignored: frozenset[nn.Parameter] = frozenset()
        self.offload_policy = OffloadPolicy()
        self.is_offloaded = any(bucket.offload is not None for bucket in buckets)
        self.reducing = Reducing()
        self.separates_reductions = True
        """Whether reductions run on a process group of their own."""
        self.comms = CustomComms()
        self.has_unreduced = False
        """Whether reduce inputs hold what backwards without synchronization left, on every rank."""
        self.is_root = False
        self.name = type(module).__name__
        self.gradients: list[BucketGradients] = []
        self._trainability = -1
        self._known_gradients: dict[Bucket, BucketGradients] = {}
        self._watched: set[int] = set()
        self.context = context
        self.index = context.register(self)

    def rename(self, name: str) -> None:
        """Takes the name it has in the root module, by which users know it."""
        self.name = name
        for bucket in self.buckets:
            dtypes = dict.fromkeys((bucket.shard.dtype, bucket.compute_dtype))
            dtype = " as ".join(str(each).removeprefix("torch.") for each in dtypes)
            frozen = "" if bucket.plan.specs[0].requires_grad else ", frozen"
            bucket.label = name if len(self.buckets) == 1 else f"{name} [{dtype}{frozen}]"

    @property
    def module_kind(self) -> str:
        """The name of the module's class as the user wrote it."""
        module = self.module()
        return "" if module is None else type(module).__name__.removeprefix("Fsdp")

    @property
    def is_gathered(self) -> bool:
        return bool(self.buckets) and self.buckets[0].is_gathered

    @property
    def is_whole(self) -> bool:
        """Whether nothing is to be gathered before compute can use the unit."""
        for bucket in self.buckets:  # noqa: SIM110, asked often, and all() makes a generator first
            if not bucket.is_whole:
                return False
        return True

    @property
    def version(self) -> int:
        """Grows with every edit of the unit's sharded parameters."""
        version = 0
        for bucket in self.buckets:
            version += bucket.version
        return version

    @property
    def syncs_gradients(self) -> bool:
        """Whether backward reduces gradients, or leaves them for one that does."""
        return self.requires_gradient_sync and (self.is_last_backward or not self.reduces_last_only)

    @property
    def is_trainable(self) -> bool:
        return bool(self.gradients)

    @property
    def is_waiting(self) -> bool:
        """Whether autograd holds a gradient that no reduce input has yet."""
        for gradients in self.gradients:
            for parameter in gradients.bucket.parameters:
                if parameter.grad is not None:
                    return True
        return False

    def gather(self) -> None:
        """Enqueues the all-gathers of the buckets that are not whole and fresh."""
        for bucket in self.buckets:
            if not bucket.is_whole:
                self.context.gather(bucket)

    def wait(self) -> None:
        """Makes compute wait for the unit's all-gathers."""
        for bucket in self.buckets:
            bucket.wait()

    def free(self, after: Mark) -> None:
        """Frees the full buffers once the compute up to ``after`` is done."""
        for bucket in self.buckets:
            if bucket.is_gathered:
                self.context.free(bucket, after)

    def reset(self, lane: Lane) -> None:
        """Back to rest, from any state."""
        for bucket in self.buckets:
            bucket.reset(lane)
        for gradients in self._known_gradients.values():
            gradients.drop()
        self.has_unreduced = False

    def copy_to(self, other: Unit) -> None:
        """Gives ``other``, which was sharded likewise, the values, gradients and settings."""
        for mine, its in zip(self.buckets, other.buckets, strict=True):
            its.shard.copy_(mine.shard)
            for parameter, duplicate in zip(
                mine.sharded_parameters, its.sharded_parameters, strict=True
            ):
                duplicate.requires_grad_(parameter.requires_grad)
                duplicate.grad = deepcopy(parameter.grad)
        other.reshard_after_backward = self.reshard_after_backward
        other.requires_gradient_sync = self.requires_gradient_sync
        other.reduces_last_only = self.reduces_last_only
        other.is_last_backward = self.is_last_backward
        other.separates_reductions = self.separates_reductions
        other.comms = self.comms
        other.reducing.__dict__.update(vars(self.reducing))

    def use_unsharded(self) -> None:
        for bucket in self.buckets:
            bucket.use_unsharded()

    def use_sharded(self) -> None:
        for bucket in self.buckets:
            bucket.use_sharded()

    def reshards_after_forward(self) -> bool:
        """The user's choice; by default all but the root, which backward needs first, reshard."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return not (self.is_root and torch.is_grad_enabled())

    def follow_trainability(self) -> None:
        """Brings ``requires_grad`` of the unsharded parameters in line with the sharded ones, and
        watches those that became trainable."""
        edits = 0
        for bucket in self.buckets:
            edits += bucket.edits.trainability
        if edits == self._trainability:
            return
        self._trainability = edits
        self.gradients = []
        for bucket in self.buckets:
            for parameter, sharded in zip(
                bucket.parameters, bucket.sharded_parameters, strict=True
            ):
                parameter.requires_grad_(sharded.requires_grad)
            if any(parameter.requires_grad for parameter in bucket.parameters):
                gradients = self._known_gradients.get(bucket)
                if gradients is None:
                    dtype = bucket.shard.dtype
                    if dtype.is_floating_point:
                        dtype = self.mp_policy.reduce_dtype or dtype
                    gradients = self._known_gradients[bucket] = BucketGradients(
                        bucket, dtype, self.reducing
                    )
                self.gradients.append(gradients)
                self._watch(gradients, only_large=True)

    def materialize(self, device: torch.device) -> None:
        """Gives a unit on the meta device memory. Its parameters are new objects."""
        for bucket in self.buckets:
            bucket.materialize(device)
        # What a forward that failed for want of memory may have remembered of the old ones.
        self.gradients = []
        self._trainability = -1
        self._known_gradients = {}
        self._watched = set()

    def watch_gradients(self) -> None:
        """Before the parameters are used outside forward: their gradients are noticed without
        one."""
        for gradients in self.gradients:
            self._watch(gradients, only_large=False)

    def _watch(self, gradients: BucketGradients, only_large: bool) -> None:
        owner, target = weakref.ref(self), weakref.ref(gradients)
        for index, parameter in enumerate(gradients.bucket.parameters):
            is_wanted = parameter.requires_grad and (gradients.is_large[index] or not only_large)
            if not is_wanted or id(parameter) in self._watched:
                continue
            self._watched.add(id(parameter))

            def arrived(_: torch.Tensor, index: int = index) -> None:
                unit, gradients = owner(), target()
                if unit is not None and gradients is not None:
                    unit.context.schedule.gradient_arrived(unit, gradients, index)

            parameter.register_post_accumulate_grad_hook(arrived)
