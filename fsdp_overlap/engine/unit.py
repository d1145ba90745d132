"""Units: the modules of one fully_shard() call, the parameters they own, and edits of these while
they are unsharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.comm.comm_streams import CommStream
from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.mesh import Faults, ParamGroupEdits
from fsdp_overlap.engine.options import UnitOptions, UnitSettings
from fsdp_overlap.engine.param import (
    ParamInfo,
    UnownedParameters,
    check_frozen,
    module_class_name,
    modules_outside_units,
    reduce_dtype,
    refuse_replaced,
    tp_local_tensor,
    unwrap,
)
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.saved_tensors import SavedTensors, dynamo_disable
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.schedule.stats import CHECKED_COUNTS
from fsdp_overlap.tensor.flat_buffer import VersionCounters, version_of
from fsdp_overlap.tensor.ragged_dtensor import ShardEdits, ShardedParam
from fsdp_overlap.torch_internals import will_engine_execute_node

if TYPE_CHECKING:
    from types import TracebackType

    from fsdp_overlap.tensor.pytree import CopiedArguments

# ---- Edits of unsharded parameters, which would be lost: only shards last ----

INSTEAD = (
    "Edit the sharded parameter, under torch.no_grad(), before forward or after optimizer.step(); "
    "what forward itself has to change must be a buffer"
)

FREED = (
    "a parameter of unit {!r}, or a view of one, was used after its memory was freed: keep a "
    "clone() of what is used after forward, or read the sharded parameter of the module"
)

PendingComparisons = list[tuple["UnshardedEdits", torch.Tensor]]
"""Param groups whose first forward has run, and for each of their parameters whether it changed."""


def read_comparisons(pending: PendingComparisons) -> str | None:
    """Return what the forwards in ``pending`` edited, in words. ``None`` if they edited nothing.
    The host waits for them. Empty the list."""
    changes = [(edits, changed.tolist()) for edits, changed in pending]
    pending.clear()
    edited = [edits.describe(changed.index(True)) for edits, changed in changes if any(changed)]
    return edited[0] if edited else None


class UnshardedEdits:
    """Finds changes of a param group's unsharded parameters. The shards do not get such changes,
    and another rank may have made different ones.

    Autograd's version counters count edits in place. They do not count all-gathers, which write
    underneath, and they do not count edits through ``.data``. To find the latter, the first forward
    in each mode, training and evaluation, compares the values before and after.

    ``tables`` are the ``_parameters`` of all modules of the unit.
    """

    forwards = 0
    _digest: torch.Tensor | None = None

    def __init__(self, param_group: ParamGroup, tables: Sequence[dict[str, Any]]) -> None:
        self.param_group = param_group
        self._tiles = list(map(tp_local_tensor, param_group.parameters))
        # What is never cast has slow attributes, and shares counters with plain tensors.
        counted: list[torch.Tensor] = [*param_group.parameters]
        if param_group.never_cast:
            counted = [*map(unwrap, counted)]
        if param_group.is_tensor_parallel:
            counted += self._tiles  # a DTensor does not count what is done to its own
        self.counters = param_group.counters = VersionCounters(counted)
        self._tables = tables
        self._registered = self._count()

    def begin_comparison(self) -> None:
        """Take digests of the parameters, which are unsharded, before a forward runs."""
        self._digest = self.param_group.full.digests()
        self.forwards = 0  # so that the end of it looks for everything

    def end_comparison(self, pending: PendingComparisons) -> None:
        """Compare with the digests after the forward. The result goes to ``pending``."""
        if self._digest is not None:
            pending.append((self, self._digest != self.param_group.full.digests()))
            self._digest = None

    def find_in_place_edit(self) -> str | None:
        """Return which parameter was edited in place since this was last asked, in words. ``None``
        if none was."""
        index = self.counters.edited()
        return None if index is None else self.describe(index % len(self._tiles))

    def find_lost_edit(self) -> str | None:
        """Return what :meth:`find_in_place_edit` does, and also find a parameter that was replaced,
        given other memory or registered again. The full buffer must exist."""
        if (edit := self.find_in_place_edit()) is not None:
            return edit
        if (name := self.param_group.module_info.replaced()) is not None:
            return self._was_replaced(name)
        if moved := self.param_group.full.give_back(self._tiles):
            return self._moved(moved[0])
        return None if self._count() == self._registered else self._registered_again()

    def _was_replaced(self, name: str) -> str:
        return (
            f"parameter {name!r} of unit {self.param_group.label!r} was replaced while it was "
            f"unsharded, and the new one would be lost. {INSTEAD}"
        )

    def forbid_old_graphs(self, tables: Collection[int]) -> None:
        """Make autograd refuse to read the parameters for a graph that was made before: those
        registered in ``tables``, which are ids, or all if there are none."""
        self.counters.increment(
            [
                item.parameter
                for item in self.param_group.owned
                if not tables or any(id(table) in tables for table, _ in item.registrations)
            ]
        )

    def describe(self, index: int) -> str:
        """Return an edit of parameter ``index``, in words. Make the next use of the full buffer,
        which has the edit, gather it again."""
        self.param_group.mark_stale()
        return (
            f"{self._name(index)} was edited in place while it was unsharded, by a forward, a "
            "backward or a hook, as nn.Embedding(max_norm=...) does. The edit would be lost, "
            f"because only shards last, and ranks may have made different ones. {INSTEAD}"
        )

    def _moved(self, index: int) -> str:
        return (
            f"{self._name(index)} was given other memory, by an assignment to its .data or by "
            f"flatten_parameters(), which all-gathers do not reach. {INSTEAD}"
        )

    def _registered_again(self) -> str | None:
        known = {(id(table), name) for table, name, _, _ in self.param_group.module_info}
        own = {id(parameter): index for index, parameter in enumerate(self.param_group.parameters)}
        for table in self._tables:
            for name, parameter in table.items():
                if id(parameter) in own and (id(table), name) not in known:
                    return (
                        f"{self._name(own[id(parameter)])} was registered again while it was "
                        f"unsharded, as {name!r}, where its memory will be freed: keep a clone(), "
                        "or register it under both names before fully_shard()"
                    )
        self._registered = self._count()
        return None

    def _count(self) -> int:
        return sum(map(len, self._tables))

    def _name(self, index: int) -> str:
        param_group = self.param_group
        return f"parameter {param_group.plan.specs[index].fqn!r} of unit {param_group.label!r}"


# ---- Moves and casts of what forwards are given, and casts of what they return ----

Arguments = tuple[tuple[Any, ...], dict[str, Any], "CopiedArguments | None"]
"""The arguments of a forward, and what is to be finished after it."""


def cast_of_inputs(
    policy: MixedPrecisionPolicy, device: torch.device | None
) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments] | None:
    """Return what casts the arguments of a forward and moves them to ``device``, if that is given.
    ``None`` if they stay as they are."""
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    if device is None and dtype is None:
        return None
    from fsdp_overlap.tensor.pytree import map_arguments

    return partial(map_arguments, partial(_move_and_cast, device, dtype))


def cast_of_output(policy: MixedPrecisionPolicy) -> Callable[[Any], Any] | None:
    """Return what casts the output of a forward. ``None`` if it stays as it is."""
    if policy.output_dtype is None:
        return None
    from fsdp_overlap.tensor.pytree import map_tensors

    return partial(map_tensors, partial(_move_and_cast, None, policy.output_dtype))


def _move_and_cast(
    device: torch.device | None, dtype: torch.dtype | None, tensor: torch.Tensor
) -> torch.Tensor:
    if not tensor.is_floating_point():
        dtype = None
    # The host does not wait for a copy from pinned memory.
    return tensor.to(device=device, dtype=dtype, non_blocking=True)


class ForwardUnderWay:
    """A forward of a unit that has begun and not ended. It has no constructor, which would be one
    more call in each forward."""

    handled: TracebackType | None = None
    """The traceback of the error that was being handled when it began."""
    copied: CopiedArguments | None = None
    """What was copied of its arguments."""


# ---- Units ----

_grad = attrgetter("grad")


class Context(Protocol):
    """The context that the units of one model share, as far as they know it."""

    toggled: weakref.WeakSet[Unit]
    """Units with parameters whose ``requires_grad`` was set since the last backward began."""
    was_initialized: bool
    """Whether forwards of its units have run."""
    is_initialized: bool
    """Whether a forward may begin at once."""
    pending_comparisons: PendingComparisons
    faults: Faults

    @property
    def capture_query(self) -> Callable[[], bool] | None:
        """What tells whether a graph captures compute, on a device that may have graphs."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_in_capture(self) -> bool:
        """Whether units run in the capture of a graph that is under way."""

    def register(self, unit: Unit) -> int:
        """Take ``unit`` in and return its index."""

    def lazy_init(self) -> None:
        """Complete the context before a forward."""

    def require_lazy_init(self) -> None: ...

    def join_capture(self, unit: Unit) -> None:
        """Make ``unit`` part of the graph whose capture is under way."""

    def finish_reading(self) -> None:
        """Block the host until shards that rest on the host may be edited."""

    @property
    def has_schedule(self) -> bool:
        """Whether a forward or backward may have run."""

    @property
    def schedule(self) -> Schedule: ...


@dataclass(frozen=True, eq=False)
class Tie:
    """A parameter that modules of one unit have registered, and that another unit owns."""

    owner: Unit
    item: ParamInfo
    """What the owner knows of the parameter."""
    registrations: Sequence[tuple[dict[str, Any], str]]
    """Where modules of the unit that reads it have it registered."""


class Unit:
    """What :func:`fully_shard` makes of modules: their param groups, and what the user asked for
    them.

    It is the :class:`~fsdp_overlap.schedule.interface.ScheduledUnit` of the schedule, which says
    what those of its members are that have no docstring here.

    The modules' hooks own the unit. The unit refers to the modules weakly, and the context refers
    to the unit weakly. ``gradients`` has one entry for each param group that is trainable now.
    ``adopt`` takes over what was registered in place of the unit's parameters.
    """

    is_gathered = False
    keeps_parts = False
    forwards = 0
    """How many forwards with gradients have begun, without those that run again in backward."""
    schedule_class = Schedule
    """The class of schedules that know units such as this. Of two, one derives from the other."""
    make_unit: Callable[..., Unit] | None = None
    """What has made it, and makes copies."""
    forward_prefetch: Sequence[weakref.ref[Unit]] = ()
    backward_prefetch: Sequence[weakref.ref[Unit]] = ()
    """The units that the user wants gathered when this one runs, instead of those predicted."""
    ties: Sequence[Tie] = ()
    owners: Sequence[Unit] = ()
    """The other units whose parameters its modules have registered too: Note [tied parameters]."""
    implicit: Sequence[Unit] = ()
    """The units within it that the library made of itself: Note [implicit units]."""
    is_implicit = False
    """Whether it is one of these, of another unit."""
    single_all_gather: Sequence[tuple[str, list[ParamGroup]]] = ()
    """The name of its all-gather, and the param group. Empty if it has several, or no name yet."""
    is_root = False
    _is_uneven = False
    _trainability = -1

    def __init__(
        self,
        modules: Sequence[nn.Module],
        context: Context,
        options: UnitOptions,
        param_groups: list[ParamGroup],
        adopt: Callable[[Unit], None],
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self.options = options
        self.mesh, self.mp_policy = options.mesh, options.mp_policy
        self.reshard_after_forward = options.reshard_after_forward
        self.has_several_modules = len(modules) > 1
        """It is unsharded from the first of its modules that runs to the last."""
        self.param_groups = param_groups
        self.has_parameters = bool(param_groups)
        self.is_conditional = options.conditional
        self.settings = UnitSettings()
        self.under_way: list[ForwardUnderWay] = []
        self.unowned = UnownedParameters(modules, options.ignored)
        self._adopt = adopt
        self.rests_on_host = any(param_group.storage.is_on_host for param_group in param_groups)
        self.may_end_reading = self.rests_on_host or not param_groups
        """Whether shards on the host may be edited after it: its own, or those within it."""
        # Tensor parallelism may take a collective before a reduction, at a point of its own.
        self.is_in_pieces = any(group.plan.specs[0].piece for group in param_groups) and not any(
            group.is_tensor_parallel for group in param_groups
        )
        self.has_replicas = any(group.mesh_info.num_replicas > 1 for group in param_groups)
        self.cast_inputs = cast_of_inputs(self.mp_policy, None)
        self.cast_output = cast_of_output(self.mp_policy)
        self.name = module_class_name(modules)
        self._look_for_edits()
        self.gradients: list[ParamGroupGradients] = []
        self._were_trainable: set[tuple[bool, ...]] = set()
        self._known_gradients: dict[ParamGroup, ParamGroupGradients] = {}
        self._hooked: set[int] = set()
        self.context = context
        self.index = context.register(self)

    @cached_property
    def saved_tensors(self) -> SavedTensors:
        """What autograd saves in its forwards."""
        return SavedTensors()

    def set_root(self, is_root: bool) -> None:
        """Set whether it encloses all others of its context. Forwards of the root move what they
        are given to its device."""
        self.is_root = is_root
        device = self.context.device
        moves = is_root and device.type != "cpu"
        self.cast_inputs = cast_of_inputs(self.mp_policy, device if moves else None)

    def rename(self, name: str) -> None:
        """Name the unit and its param groups by the name in the root module, by which users know
        it."""
        self.name = name
        self.single_all_gather = [(name, self.param_groups)] if len(self.param_groups) == 1 else []
        for param_group in self.param_groups:
            is_alone = len(self.param_groups) == 1
            param_group.label = name if is_alone else f"{name} [{param_group.contents}]"
            param_group.full.when_freed = FREED.format(param_group.label)

    def connect(self) -> None:
        """Choose the groups, collectives and memory of its param groups. Collective over their
        meshes at the first call."""
        self.keeps_parts = self.post_forward_size is not None
        for param_group in self.param_groups:
            reduced_in = reduce_dtype(param_group.grad_dtype, self.mp_policy)
            param_group.connect(self.post_forward_size, self.settings, reduced_in)
            if param_group.make_unsharded():
                self.forget_parameters()
        for gradients in self._known_gradients.values():
            gradients.reduce_scatter_input.memory = gradients.param_group.full.memory

    @property
    def is_complete(self) -> bool:
        """Whether all of its modules still exist."""
        return len(self.modules) == len(self._modules)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that still exist, in the order in which :func:`fully_shard` got them."""
        return [module for module in (ref() for ref in self._modules) if module is not None]

    @property
    def sharded_parameters(self) -> list[ShardedParam]:
        return [p for param_group in self.param_groups for p in param_group.sharded_parameters]

    @property
    def module_ids(self) -> Iterable[int]:
        return map(id, self.modules)

    @property
    def module_class_name(self) -> str:
        return module_class_name(self.modules)

    @property
    def post_forward_size(self) -> int | None:
        """How many neighbors keep a part each of the full buffer between forward and backward.
        ``None`` if it is freed then, or kept whole."""
        size = self.reshard_after_forward
        return size if type(size) is int and not self._is_uneven else None

    def set_uneven(self, is_uneven: bool) -> None:
        """Set whether only some ranks may run the unit. Then neighbors keep no parts of it."""
        self._is_uneven = is_uneven
        if type(self.reshard_after_forward) is int:
            self.connect()

    def find_state(self) -> None:
        """Set :attr:`is_gathered`, after a gather that raised or a reset."""
        self.is_gathered = any(param_group.is_gathered for param_group in self.param_groups)

    @property
    def is_meta(self) -> bool:
        """Whether it is on the meta device and has yet to get memory."""
        return any(param_group.is_meta for param_group in self.param_groups)

    @property
    def is_up_to_date(self) -> bool:
        # as ParamGroup.version, without a call for each: asked often
        for group in self.param_groups:
            if group.gathered_version != group.edits.values + group.shard._version:
                return False
        return True

    @property
    def version(self) -> int:  # see Note [stale]
        version = 0
        for param_group in self.param_groups:
            # as is_up_to_date
            version += param_group.edits.values + param_group.shard._version
        return version

    @property
    def syncs_gradients(self) -> bool:
        asked = self.settings
        return asked.requires_gradient_sync and (
            asked.is_last_backward or not asked.reduces_last_only
        )

    @property
    def completes_gradients(self) -> bool:
        return self.syncs_gradients and (
            self.settings.reduce_options.all_reduce_grads or not self.has_replicas
        )

    @property
    def holds_gradients(self) -> bool:
        for gradients in self.gradients:
            if not all(map(is_, map(_grad, gradients.param_group.parameters), repeat(None))):
                return True
        return False

    @property
    def has_hooks(self) -> bool:
        return any(param_group.edits.has_hooks for param_group in self.param_groups)

    @property
    def accumulates(self) -> bool:
        return any(
            parameter.requires_grad and is_to_accumulate(parameter)
            for gradients in self.gradients
            for parameter in gradients.param_group.parameters
        )

    def _look_for_edits(self) -> None:
        tables = [module._parameters for _, module in modules_outside_units(self.modules)]
        self.unsharded_edits = [UnshardedEdits(group, tables) for group in self.param_groups]
        self.compared_modes: set[tuple[int, bool]] = set()
        """The first forwards that are over: the module's id, and whether it was training."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in a full buffer."""
        storage = tensor.untyped_storage()._cdata
        for param_group in self.param_groups:  # noqa: SIM110, as in is_up_to_date
            if storage in param_group.full.storage_ids:
                return True
        return False

    def find_in_place_edit(self) -> str | None:
        for edits in self.unsharded_edits:
            if (edit := edits.find_in_place_edit()) is not None:
                return edit
        return None

    def find_lost_edit(self) -> str | None:
        """Return what :meth:`find_in_place_edit` does, and also find what was done otherwise, such
        as an assignment of other memory. The full buffers must exist."""
        for edits in self.unsharded_edits:
            # Only the last two are checked in each forward. What others find lasts, so some
            # forwards of a mode are enough.
            edits.forwards += 1
            counters, info = edits.counters, edits.param_group.module_info
            if (
                edits.forwards in CHECKED_COUNTS
                or tuple(map(version_of, counters.counted)) != counters.versions
                or not all(map(is_, map(dict.get, *info.places), info.unsharded))
            ) and (change := edits.find_lost_edit()) is not None:
                return change
        return None

    def mark_stale(self) -> None:
        """Note that no full buffer holds what the shards hold. Its next use gathers it again."""
        for param_group in self.param_groups:
            param_group.mark_stale()
            param_group.gatherer.mark_stale()

    def wait(self) -> None:
        for param_group in self.param_groups:
            param_group.wait()

    def free_parts(self) -> None:
        for param_group in self.param_groups:
            param_group.gatherer.drop_parts()

    def reset(self, comm_stream: CommStream) -> None:
        """Bring the unit to rest from any state."""
        for param_group in self.param_groups:
            param_group.reset(comm_stream)
        self.find_state()
        for gradients in self._known_gradients.values():
            gradients.drop()
        self.under_way.clear()
        self.saved_tensors.reset()

    def to_unsharded(self) -> None:
        for param_group in self.param_groups:
            for table, name, parameter, sharded in param_group.module_info.registrations:
                current = table.get(name)
                if current is not sharded and current is not parameter:
                    refuse_replaced(name, param_group.label, current, sharded)
                table[name] = parameter

    @property
    def has_replaced_parameters(self) -> bool:
        """Whether something else is registered in place of a parameter."""
        return any(group.module_info.replaced() is not None for group in self.param_groups)

    def update_registrations(self) -> None:
        """Take over what was registered in place of parameters, if anything was."""
        if self.has_replaced_parameters:
            self._adopt(self)

    def check_registrations(self) -> None:
        """Do :meth:`update_registrations`. Raise RuntimeError if something else is still registered
        in place of a parameter."""
        self.update_registrations()
        for param_group in self.param_groups:
            param_group.module_info.check(param_group.label)

    def to_sharded(self) -> None:
        for param_group in self.param_groups:
            for table, name, _, sharded in param_group.module_info.registrations:
                table[name] = sharded

    def reshards_after_forward(self) -> bool:
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward is not False
        return not (self.is_root and self.settings.unshard_in_backward and torch.is_grad_enabled())

    @property
    def is_kept_for_backward(self) -> bool:
        return self.reshard_after_forward is None and self.settings.unshard_in_backward

    def copy_requires_grad(self, sharded: torch.Tensor) -> None:
        """Give an unsharded parameter the ``requires_grad`` of its sharded one. At once, because
        the graph of an earlier forward may accumulate into it before anything else happens."""
        for param_group in self.param_groups:
            index = param_group.module_info.index_of(sharded)
            if index is not None and not param_group.never_cast:
                param_group.parameters[index].requires_grad_(sharded.requires_grad)
        self.context.toggled.add(self)

    def sync_requires_grad(self) -> None:
        """Give the unsharded parameters the ``requires_grad`` of the sharded ones, hooks those
        that became trainable, and find the param groups that get gradients."""
        edits = 0
        for param_group in self.param_groups:
            edits += param_group.edits.trainability
        if edits != self._trainability:
            self._find_gradients(edits)

    def _find_gradients(self, edits: int) -> None:
        """Do :meth:`sync_requires_grad`. ``edits``: the number of edits of trainability so far."""
        if any(param_group.never_cast for param_group in self.param_groups):
            self._check_frozen()
        self._trainability = edits
        trainable = tuple(parameter.requires_grad for parameter in self.sharded_parameters)
        if trainable not in self._were_trainable:
            self._were_trainable.add(trainable)
            self.saved_tensors.look_again()
        self.gradients = []
        for param_group in self.param_groups:
            for parameter, sharded in zip(
                param_group.parameters, param_group.sharded_parameters, strict=True
            ):
                parameter.requires_grad_(sharded.requires_grad)
            gradients = self._known_gradients.get(param_group)
            if any(parameter.requires_grad for parameter in param_group.parameters):
                if gradients is None:
                    dtype = reduce_dtype(param_group.grad_dtype, self.mp_policy)
                    make = param_group.make_gradients or ParamGroupGradients
                    gradients = make(param_group, dtype, self.settings.reduce_options)
                    self._known_gradients[param_group] = gradients
                self.gradients.append(gradients)
                self._hook(gradients, only_large=not self.is_in_pieces)
            elif gradients is not None:
                self._keep_unreduced(gradients)

    def _keep_unreduced(self, gradients: ParamGroupGradients) -> None:
        """Keep the gradients of a param group that is frozen, if they have sums that a backward has
        yet to reduce. The next forward looks again."""
        if self.context.schedule.has_unreduced(self):
            self.gradients.append(gradients)
            self._trainability = -1

    def _check_frozen(self) -> None:
        for param_group in self.param_groups:
            if param_group.never_cast:
                check_frozen(
                    param_group.label, param_group.parameters, param_group.sharded_parameters
                )

    def forget_parameters(self) -> None:
        """Forget what it knew of the old parameters, after they were replaced by new objects."""
        self.gradients = []
        self._trainability = -1
        self._known_gradients = {}
        self._hooked = set()
        self._look_for_edits()

    def hook_gradients(self) -> None:
        for gradients in self.gradients:
            self._hook(gradients, only_large=False)

    def _hook(self, gradients: ParamGroupGradients, only_large: bool) -> None:
        for index, parameter in enumerate(gradients.param_group.parameters):
            is_wanted = parameter.requires_grad and (gradients.is_large[index] or not only_large)
            if is_wanted and id(parameter) not in self._hooked:
                self._hook_parameter(parameter, gradients, index)

    def _hook_parameter(
        self, parameter: torch.Tensor, gradients: ParamGroupGradients, index: int
    ) -> None:
        owner, target = weakref.ref(self), weakref.ref(gradients)
        self._hooked.add(id(parameter))

        @dynamo_disable
        def arrived(_: torch.Tensor) -> None:
            unit, gradients = owner(), target()
            if unit is not None and gradients is not None:
                unit.context.schedule.gradient_arrived(unit, gradients, index)

        parameter.register_post_accumulate_grad_hook(arrived)


def is_to_accumulate(parameter: torch.Tensor) -> bool:
    """Return whether the backward under way will accumulate into ``parameter``, which requires
    grad."""
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter)
    accumulation = view.grad_fn.next_functions[0][0]
    with suppress(RuntimeError):  # autograd.grad() was asked about this very parameter
        return will_engine_execute_node(accumulation)
    return False


def existing_units(refs: Sequence[weakref.ref[Unit]]) -> list[Unit]:
    """Return the units of ``refs`` that are not gone."""
    return [unit for ref in refs if (unit := ref()) is not None]


def sync_requires_grad(toggled: weakref.WeakSet[Unit]) -> None:
    """Find the param groups of ``toggled`` units that get gradients, before a backward begins."""
    for unit in toggled:
        unit.sync_requires_grad()
    toggled.clear()


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that :func:`fully_shard` made of ``module``, or of a list with it, if it
    did."""
    return module.__dict__.get("_fsdp_unit")


# ---- Units of edits ----


def unit_of_edits(edits: ShardEdits | None) -> Unit | None:
    """Return the unit whose edits these are. ``None`` if there is none, or it was freed."""
    return edits.unit() if isinstance(edits, ParamGroupEdits) and edits.unit is not None else None


# ---- Names of units: those of their modules in the outermost unit ----


def unit_names(units: Sequence[Unit]) -> dict[Unit, str]:
    """Return the name of each unit that lies within another, relative to the outermost unit around
    it. A unit of several modules is named by all of their names."""
    names: dict[Unit, str] = {}
    for outer in units:
        if outer in names:
            continue
        names_within: dict[Unit, list[str]] = {}
        for module in outer.modules:
            for name, child in module.named_modules():
                unit = unit_of(child)
                if unit is not None and unit is not outer:
                    names_within.setdefault(unit, []).append(name)
        names.update((unit, ", ".join(names_within[unit])) for unit in names_within)
    return names


def name_units(units: Sequence[Unit]) -> list[Unit]:
    """Find the root among ``units``, all units of a context, and name them as users know them.
    Return them in the order in which modules register them."""
    names = unit_names(units)
    tops = [unit for unit in units if unit not in names]
    for unit in units:
        kind = unit.module_class_name
        unit.set_root(tops == [unit] and not unit.has_several_modules)
        unit.rename(names.get(unit) or (kind if unit.is_root else f"{kind}[{unit.index}]"))
    return [*tops, *names]
