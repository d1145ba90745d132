"""One unit: a module, or a list of modules, and the parameters they own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import deepcopy
from itertools import repeat
from operator import attrgetter, is_
from types import TracebackType
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_overlap.comm.lanes import Lane
from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.engine import is_to_accumulate
from fsdp_overlap.runtime.gradients import BucketGradients
from fsdp_overlap.runtime.ownership import kind_of, modules_outside_units
from fsdp_overlap.runtime.settings import Settings
from fsdp_overlap.runtime.unsharded_edits import FREED, UnshardedEdits
from fsdp_overlap.runtime.untraced import untraced

_grad = attrgetter("grad")


class Context(Protocol):
    """What units of one model share, as far as they know it."""

    def register(self, unit: Unit) -> int:
        """Takes ``unit`` in and returns its index."""
        ...

    def gradient_arrived(self, unit: Unit, gradients: BucketGradients, index: int) -> None:
        """Is told what autograd accumulated."""
        ...


class Unit:
    """What :func:`fully_shard` keeps of its modules: their buckets and how they are to be treated.

    The modules' hooks own the unit; the unit refers to the modules weakly, and so does the context
    to the unit. ``gradients`` are those of the buckets that are trainable now.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        context: Context,
        mesh: DeviceMesh,
        buckets: list[Bucket],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self.mesh = mesh
        self.is_list = len(modules) > 1
        """Whether it is of several modules: whole from the first that runs to the last."""
        self.to_run: set[int] = set()
        """The modules of a list that have yet to run before the unit is released."""
        self.buckets = buckets
        self.has_parameters = bool(buckets)
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.settings = Settings()
        self.handled: list[TracebackType | None] = []
        """For each forward under way, the traceback of the error that was handled when it began."""
        self.saved_hooks: list[saved_tensors_hooks] = []
        """A hook for each forward under way whose backward should read no parameters."""
        self.forward_prefetch: Sequence[weakref.ref[Unit]] = ()
        self.backward_prefetch: Sequence[weakref.ref[Unit]] = ()
        """What the user wants gathered when this unit runs, instead of what is predicted."""
        self.ignored: frozenset[nn.Parameter] = frozenset()
        self.offload_policy = OffloadPolicy()
        self.is_offloaded = any(bucket.offload is not None for bucket in buckets)
        self.has_copies = any(bucket.domain.copies > 1 for bucket in buckets)
        self.has_unreduced = False
        """Whether backwards left gradients that are not reduced, or not across copies, on every
        rank."""
        self.seen_version = -1
        """The :attr:`version` that the lane of all-gathers comes after."""
        self.is_root = False
        self.name = kind_of(modules)
        self._look_for_edits()
        self.gradients: list[BucketGradients] = []
        self._trainability = -1
        self._known_gradients: dict[Bucket, BucketGradients] = {}
        self._hooked: set[int] = set()
        self.context = context
        self.index = context.register(self)

    def rename(self, name: str) -> None:
        """Takes the name it has in the root module, by which users know it."""
        self.name = name
        for bucket in self.buckets:
            bucket.label = name if len(self.buckets) == 1 else f"{name} [{bucket.dtypes}]"
            bucket.full.when_freed = FREED.format(bucket.label)

    @property
    def is_complete(self) -> bool:
        """Whether all of its modules still exist."""
        return len(self.modules) == len(self._modules)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that still exist, in the order of the list that :func:`fully_shard` was given."""
        return [module for module in (ref() for ref in self._modules) if module is not None]

    @property
    def module_kind(self) -> str:
        return kind_of(self.modules)

    @property
    def part_size(self) -> int | None:
        """Among how many neighbours the unsharded parameters are kept between forward and backward,
        if not on all ranks or on each."""
        size = self.reshard_after_forward
        return size if type(size) is int else None

    @property
    def keeps_part(self) -> bool:
        """Whether a part of the full buffer is kept between forward and backward."""
        return self.part_size is not None

    @property
    def is_gathered(self) -> bool:
        return bool(self.buckets) and self.buckets[0].is_gathered

    @property
    def is_meta(self) -> bool:
        """Whether it has yet to be given memory."""
        return any(bucket.is_meta for bucket in self.buckets)

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
            version += bucket.edits.values + bucket.shard._version  # Bucket.version, asked often
        return version

    @property
    def syncs_gradients(self) -> bool:
        """Whether backward reduces gradients, or leaves them for one that does."""
        asked = self.settings
        return asked.requires_gradient_sync and (
            asked.is_last_backward or not asked.reduces_last_only
        )

    @property
    def completes_gradients(self) -> bool:
        """Whether backward reduces gradients across copies too, where there are any."""
        return self.syncs_gradients and (
            self.settings.reduce_options.across_copies or not self.has_copies
        )

    @property
    def is_trainable(self) -> bool:
        return bool(self.gradients)

    @property
    def is_waiting(self) -> bool:
        """Whether autograd holds a gradient that no reduce input has yet."""
        for gradients in self.gradients:
            if not all(map(is_, map(_grad, gradients.bucket.parameters), repeat(None))):
                return True
        return False

    @property
    def accumulates(self) -> bool:
        """Whether the backward under way will accumulate into some of its parameters."""
        return any(
            parameter.requires_grad and is_to_accumulate(parameter)
            for gradients in self.gradients
            for parameter in gradients.bucket.parameters
        )

    def module_ran(self, module: nn.Module) -> None:
        """One module of the list has run."""
        if not self.to_run:
            self.to_run.update(map(id, self.modules))
        self.to_run.discard(id(module))

    def _look_for_edits(self) -> None:
        tables = [module._parameters for _, module in modules_outside_units(self.modules)]
        self.edits = [UnshardedEdits(bucket, tables) for bucket in self.buckets]
        self.compared: set[tuple[int, bool]] = set()
        """Whose first forward is over: the module, and whether it was training."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in a full buffer."""
        for bucket in self.buckets:  # noqa: SIM110, as below
            if bucket.full.holds(tensor):
                return True
        return False

    def edited(self) -> str | None:
        """What was done to the unsharded parameters in place, and would be lost."""
        for edits in self.edits:
            if (found := edits.edited()) is not None:
                return found
        return None

    def changed(self) -> str | None:
        """The same, also if it was done otherwise. The full buffers must exist."""
        for edits in self.edits:
            if (found := edits.changed()) is not None:
                return found
        return None

    def wait(self) -> None:
        """Makes compute wait for the unit's all-gathers."""
        for bucket in self.buckets:
            bucket.wait()

    def reset(self, lane: Lane) -> None:
        """Back to rest, from any state."""
        for bucket in self.buckets:
            bucket.reset(lane)
        for gradients in self._known_gradients.values():
            gradients.drop()
        self.has_unreduced = False
        self.to_run.clear()
        self.handled.clear()

    def copy_to(self, other: Unit) -> None:
        """Gives ``other``, which was sharded likewise, the values, gradients and settings."""
        for mine, its in zip(self.buckets, other.buckets, strict=True):
            its.shard.copy_(mine.shard)
            its.full.keeps_storage = mine.full.keeps_storage
            for parameter, duplicate in zip(
                mine.sharded_parameters, its.sharded_parameters, strict=True
            ):
                duplicate.requires_grad_(parameter.requires_grad)
                duplicate.grad = deepcopy(parameter.grad)
        self.settings.copy_to(other.settings)

    def use_unsharded(self) -> None:
        for bucket in self.buckets:
            bucket.places.use_unsharded(bucket.label)

    def use_sharded(self) -> None:
        for bucket in self.buckets:
            bucket.places.use_sharded()

    def reshards_after_forward(self) -> bool:
        """The user's choice; by default all but the root, which backward needs first, reshard."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward is not False
        return not (self.is_root and self.settings.unshard_in_backward and torch.is_grad_enabled())

    @property
    def is_kept_for_backward(self) -> bool:
        """Whether the user left it to us to keep it where it ran last."""
        return self.reshard_after_forward is None and self.settings.unshard_in_backward

    def follow_trainability(self) -> None:
        """Brings ``requires_grad`` of the unsharded parameters in line with the sharded ones, and
        hooks those that became trainable."""
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
            gradients = self._known_gradients.get(bucket)
            if any(parameter.requires_grad for parameter in bucket.parameters):
                if gradients is None:
                    dtype = reduce_dtype(bucket.shard.dtype, self.mp_policy)
                    gradients = BucketGradients(bucket, dtype, self.settings.reduce_options)
                    self._known_gradients[bucket] = gradients
                self.gradients.append(gradients)
                self._hook(gradients, only_large=True)
            elif gradients is not None and self.has_unreduced:
                # Frozen, with sums that a backward has yet to reduce: the next forward looks again.
                self.gradients.append(gradients)
                self._trainability = -1

    def forget_parameters(self) -> None:
        """The parameters are new objects: forgets what it knew of the old ones."""
        self.gradients = []
        self._trainability = -1
        self._known_gradients = {}
        self._hooked = set()
        self._look_for_edits()

    def hook_gradients(self) -> None:
        """Before the parameters are used outside forward: their gradients are noticed without
        one."""
        for gradients in self.gradients:
            self._hook(gradients, only_large=False)

    def _hook(self, gradients: BucketGradients, only_large: bool) -> None:
        owner, target = weakref.ref(self), weakref.ref(gradients)
        for index, parameter in enumerate(gradients.bucket.parameters):
            is_wanted = parameter.requires_grad and (gradients.is_large[index] or not only_large)
            if not is_wanted or id(parameter) in self._hooked:
                continue
            self._hooked.add(id(parameter))

            @untraced
            def arrived(_: torch.Tensor, index: int = index) -> None:
                unit, gradients = owner(), target()
                if unit is not None and gradients is not None:
                    unit.context.gradient_arrived(unit, gradients, index)

            parameter.register_post_accumulate_grad_hook(arrived)


def reduce_dtype(dtype: torch.dtype, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    """What gradients of parameters of ``dtype`` are reduced in. Complex ones keep theirs."""
    return (mp_policy.reduce_dtype or dtype) if dtype.is_floating_point else dtype


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that :func:`fully_shard` made of ``module``, or of a list with it, if it did."""
    return module.__dict__.get("_fsdp_unit")
