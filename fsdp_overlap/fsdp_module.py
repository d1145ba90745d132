"""A sharded module: every method that :func:`fully_shard` gives a module, and two functions that
take such modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fsdp_overlap.comm.comm_streams import CommStream
from fsdp_overlap.engine import hooks
from fsdp_overlap.engine.adoption import check_registrations, update_registrations
from fsdp_overlap.engine.context import context_of
from fsdp_overlap.engine.hooks import ForwardMethod
from fsdp_overlap.engine.meta_init import (
    cast_param_group,
    materialize,
    register_unsharded_once,
    validate_cast,
)
from fsdp_overlap.engine.param import (
    modules_outside_units,
    move_buffers,
    parameter_like,
    parameters_outside_units,
    tp_local_tensor,
)
from fsdp_overlap.engine.param_group import ParamGroup, sync_grad_dtypes
from fsdp_overlap.engine.tied_parameters import copy_owners, ties_set_aside
from fsdp_overlap.engine.unit import Unit, unit_names, unit_of
from fsdp_overlap.schedule.finalization import GradientReductionHandle
from fsdp_overlap.tensor.ragged_dtensor import attributes_of
from fsdp_overlap.torch_internals import AllGather, ReduceScatter
from fsdp_overlap.unit_init import make_unit


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

    def __init_subclass__(cls) -> None:
        """Do not call that of the user's class, which may want arguments, register each subclass,
        or wrap methods once more."""

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
        units = (self._fsdp_unit, *self._fsdp_unit.owners)
        for unit in units:
            context = context_of(unit)
            context.lazy_init()
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
        for unit in (self._fsdp_unit, *self._fsdp_unit.owners):
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

        unit = self._fsdp_unit
        if len({param_group.mesh_info for param_group in unit.param_groups}) > 1:
            raise ValueError(
                f"{method}() on unit {unit.name!r}, whose parameters lie on several meshes: make a "
                "unit for each"
            )
        _check_shards_are_equal(unit, method)
        _check_exclusive(unit, method, "symmetric memory")
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

        unit = self._fsdp_unit
        if enable:
            method = "set_allocate_memory_from_process_group_for_comm"
            _check_exclusive(unit, method, "custom collectives", "symmetric memory")
            for param_group in unit.param_groups:
                mesh = param_group.mesh_info.mesh
                check_memory(mesh.get_group(mesh.ndim - 1), param_group.mesh_info.device)
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

        unit, method = self._fsdp_unit, "set_symm_mem_for_comm"
        _check_exclusive(unit, method, "custom collectives", "memory of its process groups")
        _check_shards_are_equal(unit, method)
        for param_group in unit.param_groups:
            mesh = param_group.mesh_info.mesh
            use_symmetric_memory(
                backend, mesh.get_group(mesh.ndim - 1), param_group.mesh_info.device
            )
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
            param_group for param_group in self._fsdp_unit.param_groups if param_group.is_opaque
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
        self._fsdp_unit.settings.reduce_options.divisor = float(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether this unit's gradients are reduced by sums alone. The division is a step of
        its own then."""
        self._fsdp_unit.settings.reduce_options.sums_only = enable

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
        unit.settings.reduce_options.hook, unit.settings.reduce_options.hook_stream = hook, stream

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
        handle = context.schedule.finalizer.finalize()
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
        for unit in self._units(recurse):
            update_registrations(unit)
            _check_apply(unit, fn)
        shards = self._shards()
        with torch.no_grad():
            applied = [fn(shard) for _, shard in shards]
        for param_group in self._fsdp_unit.param_groups:
            param_group.module_info.to_none()
        try:
            with ties_set_aside(self._fsdp_unit):
                super()._apply(fn, recurse)
        finally:
            self._fsdp_unit.to_sharded()
        if self._fsdp_unit.is_offloaded:  # shards stay on the host, buffers do not
            move_buffers([self], context_of(self._fsdp_unit).device)
        if any(
            param_group.is_meta and not result.is_meta
            for (param_group, _), result in zip(shards, applied, strict=True)
        ):
            materialize(self._fsdp_unit)
        else:
            for (param_group, shard), result in zip(shards, applied, strict=True):
                if result.dtype != shard.dtype:
                    cast_param_group(self._fsdp_unit, param_group, result)
                elif result is not shard:
                    shard.copy_(result)
        register_unsharded_once(self._fsdp_unit)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        # What a loader has assigned becomes ours before an optimizer is made of it.
        if not context_of(self._fsdp_unit).was_initialized:
            for unit in self._units(recurse=True):
                with suppress(RuntimeError):  # which the first forward raises
                    update_registrations(unit)
        return super().named_parameters(*args, **kwargs)

    def _shards(self) -> list[tuple[ParamGroup, torch.Tensor]]:
        """Return the tensors that :meth:`_apply` works on: the shards of the unit, without what is
        opaque. If the unit has several modules, each of them is called, and works on the ranges of
        its own parameters. So it does if they are of a class of their own."""
        unit = self._fsdp_unit
        param_groups = [
            param_group for param_group in unit.param_groups if not param_group.is_opaque
        ]
        mine = {id(module._parameters) for _, module in modules_outside_units([self])}
        flat = [group for group in param_groups if not (unit.is_list or group.is_extension)]
        return [(param_group, param_group.shard) for param_group in flat] + [
            (param_group, sharded._local_tensor)
            for param_group in param_groups
            if param_group not in flat
            for item, sharded in zip(param_group.owned, param_group.sharded_parameters, strict=True)
            if any(id(registered) in mine for registered, _ in item.registrations)
        ]

    def _load_from_state_dict(self, *args: Any) -> None:
        # A unit on the meta device keeps what load_state_dict(assign=True) has registered so far,
        # and waits for the parameters of its other modules.
        for unit in (self._fsdp_unit, *self._fsdp_unit.owners):
            update_registrations(unit)
            if not unit.is_meta and not _is_in_use(unit):
                unit.to_sharded()  # in place of what a load that failed has left
                _reshard(unit)
        super()._load_from_state_dict(*args)

    def _save_to_state_dict(self, *args: Any) -> None:
        context = context_of(self._fsdp_unit)
        is_interrupted = hooks.is_interrupted(context)
        context.error_monitor.before_save("state_dict()", is_interrupted)
        for unit in (self._fsdp_unit, *self._fsdp_unit.owners):
            if is_interrupted:
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
        unit = self._fsdp_unit
        for each in (unit, *unit.owners):
            if not each.is_complete:
                raise RuntimeError(
                    f"unit {each.name!r} is of several modules, of which one was deleted, or owns "
                    "a parameter of another, and cannot be copied without it: keep, and copy, the "
                    "module that holds all of them"
                )
        copy_owners(unit, memo)
        sync_grad_dtypes(unit.param_groups)
        kept = _copy_parameters(unit, memo)
        if any(
            param_group.shares_shard or not item.registrations
            for param_group in unit.param_groups
            for item in param_group.owned
        ):
            raise RuntimeError(
                f"{unit.name!r} has weights that were tied after fully_shard(), and cannot be "
                "copied: tie them before"
            )
        originals = unit.modules
        duplicates = []
        for module in originals:
            plain = plain_class(type(module))
            memo[id(module)] = duplicate = plain.__new__(plain)
            duplicates.append(duplicate)
        _copy_attributes(unit, memo)  # not before: they may lead to modules and other parameters
        for module, duplicate in zip(originals, duplicates, strict=True):
            state = hooks.without_hooks(module.__getstate__())
            del state["_fsdp_unit"]
            duplicate.__setstate__(deepcopy(state, memo))
        context = deepcopy(context_of(unit), memo)
        meshes = {}
        for param_group in unit.param_groups:
            mesh_info = context.mesh_info_of(param_group.mesh_info.mesh)
            mesh_info.plans.place(duplicates, [param_group.plan])
            for item, spec in zip(param_group.owned, param_group.plan.specs, strict=True):
                full = item.spmd.full if item.spmd is not None else None
                # As FSDP2's ShardPlacementResult.
                meshes[memo[id(item.parameter)]] = SimpleNamespace(
                    mesh_info=SimpleNamespace(
                        mesh=mesh_info.mesh,
                        spmd_mesh=full and full.mesh,
                        dp_mesh_dims=full,
                    ),
                    placement=Shard(spec.cut_dim),
                )
        tied = {memo[id(table[name])] for tie in unit.ties for table, name in tie.registrations}
        copied_unit = make_unit(
            duplicates,
            context,
            unit.mesh,
            reshard_after_forward=unit.reshard_after_forward,
            shard_placement_fn=meshes.__getitem__,
            mp_policy=_keeping_dtypes(unit.mp_policy, kept),
            offload_policy=unit.offload_policy,
            comm_policy=unit.comm_policy,
            conditional=unit.conditional,
            # What the unit does not own, the copy does not: ignored, or frozen and added later.
            ignored=frozenset(
                parameter
                for _, parameter, *_ in parameters_outside_units(duplicates)
                if parameter not in meshes and parameter not in tied
            ),
        )
        copied_unit.unowned = deepcopy(unit.unowned, memo)
        for module, duplicate in zip(originals, duplicates, strict=True):
            object.__setattr__(duplicate, "__class__", type(module))
        for mine, its in zip(unit.param_groups, copied_unit.param_groups, strict=True):
            # For an optimizer that is copied together with the model.
            memo.update(zip(map(id, mine.sharded_parameters), its.sharded_parameters, strict=True))
        unit.copy_to(copied_unit)
        return cast(nn.Module, memo[id(self)])

    def _units(self, recurse: bool) -> Iterable[Unit]:
        modules = self.modules() if recurse else [self]
        units = (unit for unit in map(unit_of, modules) if unit is not None)
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
    check_registrations(unit)
    lost = unit.changed() if unit.is_gathered else None
    context.schedule.reshard(unit)
    if unit.is_offloaded:
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
    setattr(module, method_name, ForwardMethod(module, method))


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


def _check_apply(unit: Unit, fn: Any) -> None:
    """Raise RuntimeError if ``fn``, which ``_apply()`` is to call, would move or cast shards where
    they cannot be."""
    for param_group in unit.param_groups:
        with torch.no_grad():
            result = fn(param_group.shard.new_empty(0))
        if param_group.is_opaque:  # left alone, whatever fn does to numbers
            result = result.to(param_group.shard.dtype)
        if (refused := validate_cast(unit, param_group, result)) is not None:
            raise RuntimeError(refused)


def plain_class(cls: type) -> Any:
    """Return the class that the user wrote, without what :func:`fully_shard` added."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


def _copy_parameters(unit: Unit, memo: dict[int, Any]) -> set[nn.Parameter]:
    """Put into ``memo`` a parameter without values for each of the unit's. Return those that keep
    their dtype."""
    kept: set[nn.Parameter] = set()
    for param_group in unit.param_groups:
        device = param_group.device if param_group.is_opaque else param_group.shard.device
        for spec, item, sharded in zip(
            param_group.plan.specs, param_group.owned, param_group.sharded_parameters, strict=True
        ):
            # make_unit() takes this over. Of its values only the shard is copied, below.
            empty = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            if param_group.is_extension:
                empty = sharded._local_tensor.new_zeros(spec.shape)
            copied = parameter_like(item.parameter, empty, spec.requires_grad)
            if spec.grad_dtype is not None:
                copied.grad_dtype = spec.grad_dtype
            memo[id(item.parameter)] = memo[id(sharded)] = copied
            memo.update((alias, empty.view_as(empty)) for alias in item.aliases)
            if spec.keeps_dtype:
                kept.add(copied)
    return kept


def _copy_attributes(unit: Unit, memo: dict[int, Any]) -> None:
    """Give the parameters in ``memo`` copies of the attributes that the unit's have."""
    for param_group in unit.param_groups:
        for parameter, sharded in zip(
            param_group.parameters, param_group.sharded_parameters, strict=True
        ):
            attributes = attributes_of(parameter) | attributes_of(sharded)
            del attributes["_fsdp_owner"]
            copied = memo[id(parameter)]
            own = vars(tp_local_tensor(copied))  # of its class, if it has one of its own
            given = {name: value for name, value in attributes.items() if name not in own}
            vars(copied).update(deepcopy(given, memo))


def _keeping_dtypes(
    policy: MixedPrecisionPolicy, parameters: set[nn.Parameter]
) -> MixedPrecisionPolicy:
    """Return the policy of a copy, in which ``parameters`` keep their dtype. ``policy`` itself may
    know the original parameters by identity, and the copy has others."""
    if not parameters:
        return policy
    changes: Any = {"param_dtype_override_fn": lambda p: p.dtype if p in parameters else None}
    return replace(policy, **changes)


class FSDPState:
    """A stand-in for FSDP2's ``FSDPState``, for code that queries FSDP2 about a module of ours, as
    the stages of ``torch.distributed.pipelining`` do: our modules are instances of FSDP2's class.

    It answers what pipelines ask, and raises an error for everything else.
    """

    __slots__ = ("_unit",)

    _unit: Unit

    all_states: Sequence[object] = ()
    """A stage reduces the parameter groups of each of these. There are none, because the callback
    reduces everything."""

    def __init__(self, unit: Unit) -> None:
        object.__setattr__(self, "_unit", unit)

    @property
    def _state_ctx(self) -> FSDPState:
        return self

    @property
    def _comm_ctx(self) -> CommStream:
        """The same object for units that share comm streams, and only for these."""
        return context_of(self._unit).comm_context.reduce_scatter_stream

    def _root_post_backward_final_callback(self) -> None:
        """Complete the gradients of a step. Stages of torch 2.13 call it where those of 2.15 call
        ``finalize_backward()``."""
        context = context_of(self._unit)
        if context.has_schedule:
            context.schedule.finalizer.complete()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name!r} is internal to FSDP2, and {self._unit.module_class_name} was sharded by "
            "fsdp_overlap, which has nothing like it. Functions of torch.distributed.fsdp that "
            "read it, such as register_fsdp_forward_method(), have the same name in fsdp_overlap"
        )


def state_of(module: nn.Module) -> FSDPState | None:
    """Return what ``fully_shard.state(module)`` gives. ``None`` if ``module`` is not ours."""
    unit = unit_of(module)
    return None if unit is None else FSDPState(unit)
