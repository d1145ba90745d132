"""A sharded module: every method that :func:`fully_shard` gives a module, and two functions that
take such modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed import fsdp as fsdp2

from fsdp_overlap.context import context_of
from fsdp_overlap.engine import hooks
from fsdp_overlap.engine.param import plain_class
from fsdp_overlap.engine.unit import Unit, unit_names, unit_of
from fsdp_overlap.schedule.finalization import GradientReductionHandle
from fsdp_overlap.tensor import load_ops
from fsdp_overlap.torch_internals import AllGather, ReduceScatter

# Features are imported by the methods that use them: a plain training run uses none.


class UnshardHandle(fsdp2.UnshardHandle):
    """The handle that ``unshard(async_op=True)`` returns."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Make compute wait for the all-gathers and register the unsharded parameters. Do nothing
        if they were freed meanwhile, for example by a forward."""
        for unit in self._units:
            if unit.is_gathered:
                context_of(unit).schedule.show_unsharded(unit)
        self._units = ()


class FSDPModule(nn.Module, fsdp2.FSDPModule):
    """A sharded module. :func:`fully_shard` makes the module's class a subclass of this one.

    It has the methods of FSDP2's ``FSDPModule`` and is an instance of that class too, for code
    that looks for one and calls its methods, as ``torch.distributed.pipelining`` does. Methods of
    FSDP2's that are missing here raise.
    """

    _fsdp_unit: Unit

    _is_fsdp_managed_module = True
    """For transformers' ``generate()``, which then runs equally many forwards on all ranks, and for
    ``torch.compile``."""
    _fsdp_use_orig_params = True
    """For ``torch.compile``, which refuses a managed module without it."""

    # Not that of the user's class, which may want arguments, register each subclass, or wrap
    # methods once more.
    __init_subclass__ = object.__init_subclass__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the plain class, because a new module is not a unit. A slice of a
        sharded container comes here."""
        return plain_class(cls)(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard this unit's parameters, with those that it reads of other units and without those
        of inner units, and register them in the module until they are freed: by :meth:`reshard`, or
        by a forward or backward that does not keep them. A backward that synchronizes gradients
        registers the sharded ones in any case, also where it passes the unit's forward by, as with
        a loss that reads ``module.weight``. Collective over the mesh.

        Args:
            async_op: whether to return a handle instead of making compute wait. The parameters may
                be used after its ``wait()``. A forward waits by itself.
        """
        units = (self._fsdp_unit, *self._fsdp_unit.owners, *self._fsdp_unit.implicit)
        for unit in units:
            context = context_of(unit)
            context.lazy_init()
            if unit not in self._fsdp_unit.implicit:
                context.join_capture(unit)
            unit.sync_requires_grad()
            unit.hook_gradients()
            context.schedule.unshard(unit)
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full buffers and register its sharded parameters.

        Raises:
            RuntimeError: a parameter was replaced. Or the unsharded parameters were edited, and the
                edit is lost.
        """
        for unit in (self._fsdp_unit, *self._fsdp_unit.owners, *self._fsdp_unit.implicit):
            _reshard(unit)

    # How parameters are gathered and kept

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether reduce-scatters have a process group of their own, beside all-gathers. They
        do by default, unless the context was made with ``separate_reduce_scatter_group=False``.
        Call it on every rank of the mesh, between iterations."""
        for unit in self._units(recurse):
            unit.settings.separates_reductions = enable
            context_of(unit).require_lazy_init()

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Set the all-gather of this unit: ``comm``, with ``torch.distributed.fsdp``'s interface
        ``AllGather``. Call this on every rank, between iterations.

        ``comm`` gathers into memory that it allocates, so the result is copied, and the unit takes
        twice the memory meanwhile. On a CPU no compute hides ``comm``. With a world size of 1 it is
        not called.

        Raises:
            ValueError: ranks hold shards of different sizes, the unit lies on several meshes, or
                it uses symmetric memory.
        """
        self._set_custom_comm("set_custom_all_gather", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Set the reduce-scatter of this unit: ``comm``, with ``torch.distributed.fsdp``'s
        interface ``ReduceScatter``. It is asked for a mean, or for a sum if a divisor was set.
        Everything else is as in :meth:`set_custom_all_gather`."""
        self._set_custom_comm("set_custom_reduce_scatter", reduce_scatter=comm)

    def _set_custom_comm(self, method: str, **comms: Any) -> None:
        from fsdp_overlap.features.custom_collectives import CustomComms

        units = self._units(recurse=False)
        for unit in units:
            if len({param_group.mesh_info for param_group in unit.param_groups}) > 1:
                raise ValueError(
                    f"{method}() on unit {unit.name!r}, whose parameters lie on several meshes: "
                    "make a unit for each"
                )
            _check_shards_are_equal(unit, method)
            _check_exclusive(unit, method, "symmetric memory")
        for unit in units:
            before = unit.settings.transport
            assert before is None or isinstance(before, CustomComms)
            unit.settings.transport = replace(before or CustomComms(), **comms)
            context_of(unit).require_lazy_init()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether this unit's full buffers and reduce inputs lie in memory that the backend of
        its process groups allocates and registers, so that NCCL works on it without copies of its
        own, on NVSwitch by NVLink SHARP. Gradients are summed, then divided. A buffer that is kept
        moves there when it was freed. Call this on every rank of the mesh, between iterations.

        Raises:
            ValueError: the backend allocates none, or the unit has custom collectives, which work
                on memory of theirs, or uses symmetric memory.
        """
        from fsdp_overlap.features.group_memory import check_memory, memory_of

        units = self._units(recurse=False)
        for unit in units if enable else ():
            method = "set_allocate_memory_from_process_group_for_comm"
            _check_exclusive(unit, method, "custom collectives", "symmetric memory")
            for param_group in unit.param_groups:
                mesh = param_group.mesh_info.mesh
                check_memory(mesh.get_group(mesh.ndim - 1), param_group.mesh_info.device)
        for unit in units:
            unit.settings.memory_of = memory_of if enable else None
            context_of(unit).require_lazy_init()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Use symmetric memory for this unit's all-gathers and reduce-scatters: memory that all
        ranks of a process group have registered together, for which NCCL has faster collectives.
        Call this on every rank of the mesh, between iterations. There is no way back.

        Units on one mesh share this memory: the largest full buffer, the largest reduce input and a
        shard of it, kept while the context lives, with a copy there and back on the comm streams.
        What neighbors keep and collectives among replicas do not use it. Gradients are summed,
        then divided.

        Raises:
            ValueError: there is no symmetric memory for this unit's process group and device,
                ``backend`` is not ``"NCCL"``, ranks hold shards of different sizes, or the unit
                has custom collectives or memory of its process groups. Nothing was changed then.
        """
        from fsdp_overlap.features.symmetric_memory import SymmetricTransport, use_symmetric_memory

        units, method = self._units(recurse=False), "set_symm_mem_for_comm"
        for unit in units:
            _check_exclusive(unit, method, "custom collectives", "memory of its process groups")
            _check_shards_are_equal(unit, method)
            for param_group in unit.param_groups:
                mesh = param_group.mesh_info.mesh
                use_symmetric_memory(
                    backend, mesh.get_group(mesh.ndim - 1), param_group.mesh_info.device
                )
        for unit in units:
            unit.settings.transport = SymmetricTransport()
            context_of(unit).require_lazy_init()

    def set_zero_stage(self, stage: int, *, recurse: bool = True) -> None:
        """Set what is sharded at rest, by the stages of ZeRO (arXiv 1910.02054).

        Stage 3 shards everything, as :func:`fully_shard` does by default. Stage 2 shards gradients
        and optimizer states: full buffers are kept, and are gathered again after the optimizer's
        step, under the next forward. Stage 1 is stage 2 with gradients that stay full until the
        last backward of a step, which alone reduces them. Call :meth:`set_is_last_backward` to say
        which backward that is.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in (1, 2, 3):
            raise ValueError(f"set_zero_stage({stage!r}): use 1, 2 or 3")
        for unit in self._units(recurse):
            _set_reshard_after_forward(unit, None if stage == 3 else False)
            unit.settings.reshard_after_backward = stage == 3
            unit.settings.reduces_last_only = stage == 1

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether forward frees the full buffers, as the argument of :func:`fully_shard` says
        it.

        Raises:
            ValueError: it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward({reshard_after_forward!r}): use True or False"
            )
        for unit in self._units(recurse):
            _set_reshard_after_forward(unit, reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward frees the full buffers. A buffer that is kept is gathered again
        before its next use if the parameters were edited."""
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit is gathered for its backward. An embedding, for example, need not
        be: its backward reads no parameters. A backward that does read them raises a RuntimeError
        that says so. The unit is gathered all the same if other code handles what autograd saves,
        as checkpointing does.

        Raises:
            RuntimeError: the unit has opaque parameters, which backward reads past autograd.
        """
        opaque = [
            param_group for param_group in self._fsdp_unit.param_groups if param_group.never_cast
        ]
        if opaque and not unshard_in_backward:
            kind = type(opaque[0].parameters[0]).__name__
            raise RuntimeError(
                f"set_unshard_in_backward(False) on unit {self._fsdp_unit.name!r}, which has a "
                f"parameter {opaque[0].plan.specs[0].fqn!r} that is a {kind}: its backward reads "
                "what autograd does not know of, so leave it at True"
            )
        self._fsdp_unit.settings.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp2.FSDPModule]) -> None:
        """Set which units are gathered ahead when this one runs in forward. They replace those that
        the order predicts; ``[]`` returns to the prediction. Set the same on every rank.

        All of them are gathered, even if they are more than ``prefetch``. They are kept until they
        are used, or until the pass ends.

        Raises:
            ValueError: a module is no unit, or belongs to another context.
        """
        self._fsdp_unit.forward_prefetch = self._prefetched(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp2.FSDPModule]) -> None:
        """Set which units are gathered ahead when this one runs in backward. See
        :meth:`set_modules_to_forward_prefetch`."""
        self._fsdp_unit.backward_prefetch = self._prefetched(modules)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether full buffers keep their memory while the unit is sharded. Unsharded
        parameters then keep their addresses. Each unit takes the memory of all its parameters from
        its first all-gather on. A whole step that is captured in a CUDA graph neither needs nor
        takes it."""
        for unit in self._units(recurse):
            context_of(unit).comm_context.keep_storage(unit, keep)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the all-gathers of the next pass wait for ``event``, recorded after the optimizer's
        step, and not for all compute that was enqueued before the pass. It holds for one pass.
        Edits of parameters after this call are waited for all the same. On a CPU there is nothing
        to wait for."""
        context = context_of(self._fsdp_unit)
        context.comm_context.all_gather_stream.after_event(event)
        context.schedule.prefetcher.wait_once_for_event(context.units)
        if context.shard_optimizer_over_replicas:
            context.comm_context.all_reduce_stream.after_event(event)

    def reset_iter_state(self) -> None:
        """Reset the state of the iteration, as :meth:`FsdpContext.reset` does. This is its name in
        FSDP2.

        Raises:
            RuntimeError: this unit lies within another; call it on the root.
        """
        self._check_outermost("reset_iter_state")
        context_of(self._fsdp_unit).reset()

    # How gradients are reduced

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients. If not, each rank sums them, unsharded and in the
        reduce dtype, until a backward that does. This is gradient accumulation without
        communication. ``zero_grad()`` does not clear such sums, but ``ctx.reset()`` drops them, and
        a copy of the model has none."""
        for unit in self._units(recurse):
            unit.settings.requires_gradient_sync = requires_gradient_sync
            unit.settings.reduce_options.all_reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients over replicas too, on a mesh ``(replicate,
        shard)``. If not, they are reduced among shards and summed, until a backward that does. This
        is gradient accumulation that communicates inside a node alone. ``.grad`` does not change
        until then. :meth:`set_requires_gradient_sync` sets this too."""
        for unit in self._units(recurse):
            unit.settings.reduce_options.all_reduce_grads = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last before the optimizer's step. At stage 1 of
        :meth:`set_zero_stage` the last backward is the one that reduces gradients."""
        for unit in self._units(recurse=True):
            unit.settings.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what this unit's summed gradients are divided by. The sum is over all ranks of its
        mesh, and the default is their number.

        Experts that are sharded over some of the ranks but get tokens from all ranks need the
        number of all ranks.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): use a positive number")
        for unit in self._units(recurse=False):
            unit.settings.reduce_options.divisor = float(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether this unit's gradients are reduced by sums alone. The division is a step of
        its own then."""
        for unit in self._units(recurse=False):
            unit.settings.reduce_options.sums_only = enable

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.Stream | None = None,
    ) -> None:
        """Set a hook that gets the reduced gradients of each param group before they become
        ``.grad`` or are added to it. If there are replicas, it runs after the all-reduce over them.

        Args:
            hook: gets this rank's range of the gradients, as a flat tensor in the reduce dtype,
                which it may edit in place. It runs on the comm stream of the reduction. On a CPU it
                runs when compute waits for the reduction.
            stream: the stream to run ``hook`` on instead. Not possible with replicas.

        Raises:
            ValueError: ``stream`` is given on a mesh ``(replicate, shard)``.
        """
        unit = self._fsdp_unit
        if stream is not None and unit.has_replicas:
            raise ValueError(
                "set_all_reduce_hook(stream=...) on a mesh (replicate, shard): the hook runs where "
                "the reduction over replicas does; leave stream out"
            )
        for each in self._units(recurse=False):
            options = each.settings.reduce_options
            options.hook, options.hook_stream = hook, stream

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reduce inputs may exist at once: those that travel and the one that is being
        filled. The default is 2, and 1 with ``prefetch=0``. The units of a context share them, and
        the largest number that was set on any of them counts.

        Raises:
            TypeError, ValueError: it is not an integer of at least 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                "set_reduce_scatter_max_input_buffers takes an int, got a "
                f"{type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(
                f"set_reduce_scatter_max_input_buffers({max_input_buffers}): use 1 or more"
            )
        for unit in self._units(recurse):
            unit.settings.max_reduce_inputs = max_input_buffers
            context_of(unit).sync_max_reduce_inputs()

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Do nothing; this is for code that was written for FSDP2. Parameters without a
        gradient on this rank always take part in the reduction, so ranks may use different
        parameters. If no rank has a gradient, ``.grad`` stays as it was."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards leave it to :meth:`finalize_backward` to complete gradients.
        Without that call, gradients are never complete.

        Raises:
            RuntimeError: this unit lies within another, or a backward is not finalized yet.
        """
        self._check_outermost("set_manual_backward_finalization")
        context_of(self._fsdp_unit).schedule.finalizer.set_manual(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Complete the gradients of all backwards since the last call. Collective over the mesh.

        This reduces what backwards without synchronization left on units that synchronize now, and
        frees the full buffers that are not kept after backward. Before the first forward it does
        nothing.

        Args:
            async_op: whether to return a handle. After its ``wait()`` the gradients may be used,
                and the next forward or backward may run.

        Raises:
            RuntimeError: this unit lies within another, finalization is not manual, a backward is
                under way, or the last handle was not waited for.
        """
        self._check_outermost("finalize_backward")
        context = context_of(self._fsdp_unit)
        if not context.has_schedule:
            return GradientReductionHandle(None) if async_op else None
        handle = context.schedule.finalize_backward()
        if async_op:
            return handle
        handle.wait()
        return None

    # How a sharded module is moved, copied, saved and loaded

    def _apply(self, fn: Any, recurse: bool = True) -> FSDPModule:
        """Do the work of ``to_empty()``, ``to()`` and the like. A unit on the meta device gets
        memory. A unit that has not run yet may be cast. A unit that is where it should be stays as
        it is. Opaque parameters always stay as they are.

        Raises:
            RuntimeError: the shards would move to another device, or would be cast after a forward.
                Nothing was changed then.
        """
        from fsdp_overlap.features.moving import check_move, move_unit

        for unit in self._units(recurse):
            unit.update_registrations()
            check_move(unit, fn)
        move_unit(self, self._fsdp_unit, fn, partial(super()._apply, fn, recurse))
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        load_ops()  # of parameters that may be saved before any op has run
        # What a loader has assigned becomes ours before an optimizer is made of it.
        if not context_of(self._fsdp_unit).was_initialized:
            for unit in self._units(recurse=True):
                with suppress(RuntimeError):  # which the first forward raises
                    unit.update_registrations()
        return super().named_parameters(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        load_ops()
        # A unit on the meta device keeps what load_state_dict(assign=True) has registered so far,
        # and waits for the parameters of its other modules.
        for unit in (self._fsdp_unit, *self._fsdp_unit.owners):
            unit.update_registrations()
            if not unit.is_meta and not _is_in_use(unit):
                unit.to_sharded()  # in place of what a load that failed has left
                _reshard(unit)
        super()._load_from_state_dict(*args)

    def _save_to_state_dict(self, *args: Any) -> None:
        from fsdp_overlap.engine.interruption import is_interrupted

        load_ops()
        context = context_of(self._fsdp_unit)
        was_interrupted = is_interrupted(context)
        context.error_monitor.before_save("state_dict()", was_interrupted)
        for unit in (self._fsdp_unit, *self._fsdp_unit.owners):
            if was_interrupted:
                unit.to_sharded()  # and wait for no all-gather, which may never end
            elif not _is_in_use(unit):
                _reshard(unit)  # shards are saved, also after an explicit unshard()
        super()._save_to_state_dict(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Make a copy that is sharded in the same way, with memory and a context of its own.

        A unit is copied as a whole, with all its modules if they are several. The copy does not
        take over what the unit was told to prefetch; it records an order of its own.

        Raises:
            RuntimeError: the unit is a list of modules, and one of them was deleted.
        """
        from fsdp_overlap.features.copying import copy_unit

        copy_unit(self._fsdp_unit, memo)
        return cast(nn.Module, memo[id(self)])

    def _units(self, recurse: bool) -> Collection[Unit]:
        if not recurse:
            return self._fsdp_unit, *self._fsdp_unit.implicit
        units = (unit for unit in map(unit_of, self.modules()) if unit is not None)
        return dict.fromkeys(units)  # the modules of a list share one unit

    def _check_outermost(self, method: str) -> None:
        unit = self._fsdp_unit
        if unit in unit_names(context_of(unit).units):
            raise RuntimeError(
                f"{method}() is for the root, and unit {unit.name!r} lies within another: call "
                "it on the outermost"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: save its state_dict()")

    # Private

    def _get_fsdp_state(self) -> Any:
        """Return what FSDP2's own functions ask of a module first."""
        from fsdp_overlap.features.fsdp2_compat import FSDPState

        return FSDPState(self._fsdp_unit)

    def _prefetched(self, modules: Sequence[fsdp2.FSDPModule]) -> list[ref[Unit]]:
        mine = context_of(self._fsdp_unit)
        units = []
        for module in modules:
            unit = unit_of(module) if isinstance(module, nn.Module) else None
            if unit is None:
                raise ValueError(
                    f"can prefetch units only, got a {type(module).__name__}: call fully_shard on "
                    "it first"
                )
            its = context_of(unit)
            if its is not mine and not (mine.is_implicit or its.is_implicit):
                raise ValueError(
                    f"unit {unit.name!r} has another FsdpContext than the unit "
                    f"{self._fsdp_unit.name!r} that would prefetch it; give both the same"
                )
            units.append(ref(unit))
        return units


FsdpModule = FSDPModule
"""Another name of :class:`FSDPModule`, which has its name in FSDP2."""


def _reshard(unit: Unit) -> None:
    context = context_of(unit)
    unit.check_registrations()
    lost = unit.find_lost_edit() if unit.is_gathered else None
    context.schedule.reshard(unit)
    if unit.rests_on_host:
        context.comm_context.finish_reading()
    if lost is not None:
        raise RuntimeError(lost)


def _is_in_use(unit: Unit) -> bool:
    return context_of(unit).schedule.is_in_use(unit)


def _check_shards_are_equal(unit: Unit, method: str) -> None:
    """Raise ValueError if ranks hold different numbers of elements of ``unit``. ``method`` names
    the caller."""
    for param_group in unit.param_groups:
        if not param_group.plan.is_equal:
            raise ValueError(
                f"{method}() on unit {unit.name!r}, of which ranks hold "
                f"{param_group.plan.shard_numels} elements: use FsdpContext(layout=Flat()), which "
                "makes equal shards"
            )


def _check_exclusive(unit: Unit, method: str, *others: str) -> None:
    """Raise ValueError if ``unit`` uses one of ``others``, which exclude what ``method`` sets."""
    transport, memory_of = unit.settings.transport, unit.settings.memory_of
    used = [transport.name] if transport is not None else []
    used += ["memory of its process groups"] if memory_of is not None else []
    for other in others:
        if other in used:
            allocate = ", or allocate it there" if other == "custom collectives" else ""
            raise ValueError(
                f"{method}() on unit {unit.name!r}, which uses {other} already: use one of the two "
                f"and not both{allocate}"
            )


def _set_reshard_after_forward(unit: Unit, reshard_after_forward: bool | None) -> None:
    """Replace the argument of :func:`fully_shard`. If that was a number of ranks, the context
    chooses groups again."""
    if unit.post_forward_size is not None:
        context_of(unit).require_lazy_init()
    unit.reshard_after_forward = reshard_after_forward


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a unit run on unsharded parameters, as its forward does. Do nothing to a
    module that is not sharded.

    Raises:
        ValueError: the unit has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    from fsdp_overlap.engine.forward_method import ForwardMethod

    setattr(module, method_name, ForwardMethod(module, method, hooks.hooks_for))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Make several roots, such as the chunks of a pipeline stage, share the comm streams of the
    first. Each keeps its own context, and so its own order. Call it before the first forward.

    Raises:
        ValueError: a module is no unit, or is on another kind of device.
        RuntimeError: a unit has run already, on comm streams of its own. Nothing was changed then.
    """
    contexts = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"share_comm_ctx takes units, got a {type(module).__name__}")
        contexts.append(context_of(unit))
    for context in contexts[1:]:
        first = contexts[0]
        if context.device != first.device:
            raise ValueError(
                f"a context on {context.device} cannot use comm streams on {first.device}"
            )
        if (
            context.is_initialized
            and context.comm_context.all_gather_stream is not first.comm_context.all_gather_stream
        ):
            raise RuntimeError(
                "a context that has run has comm streams of its own: call share_comm_ctx() before "
                "the first forward"
            )
    for context in contexts[1:]:
        context.comm_context.share_comm_streams_of(contexts[0].comm_context)
