"""The verbs that :func:`fully_shard` gives a module, and two functions that take such modules. The
verbs of gradients are in ``gradient_verbs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed import fsdp as fsdp2

from fsdp_overlap.comm.custom_collectives import CustomComms
from fsdp_overlap.comm.group_memory import check_memory
from fsdp_overlap.comm.symmetric_memory import use_symmetric_memory
from fsdp_overlap.engine.context import context_of
from fsdp_overlap.engine.forward_method import ForwardMethod
from fsdp_overlap.engine.shared_lanes import share_lanes
from fsdp_overlap.engine.unit import Unit, unit_of
from fsdp_overlap.fsdp2_state import Fsdp2State
from fsdp_overlap.gradient_verbs import GradientVerbs
from fsdp_overlap.torch_internals import AllGather, ReduceScatter


class UnshardHandle(fsdp2.UnshardHandle):
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Makes compute wait for the all-gather and registers the unsharded parameters. Does
        nothing if they were freed meanwhile, for example by a forward."""
        if self._unit is not None and self._unit.is_gathered:
            self._unit.wait()
            self._unit.use_unsharded()
            self._unit.shows_unsharded = True
        self._unit = None


class FsdpModule(GradientVerbs, fsdp2.FSDPModule):
    """A module that was sharded. :func:`fully_shard` adds this to the module's own class.

    It is an instance of FSDP2's ``FSDPModule`` too, for code that looks for one and calls its
    verbs, as ``torch.distributed.pipelining`` does. Verbs of FSDP2 that are not here raise.
    """

    _is_fsdp_managed_module = True
    """For transformers' ``generate()``, which then runs equally many forwards on all ranks, and for
    ``torch.compile``."""
    _fsdp_use_orig_params = True
    """For ``torch.compile``, which refuses a managed module without it."""

    def _get_fsdp_state(self) -> Any:
        """What FSDP2's own functions ask of a module first."""
        return Fsdp2State(self._fsdp_unit)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, without those of inner units, and registers them in the
        module until they are freed: by :meth:`reshard`, or by a forward or backward that does not
        keep them. A backward that reduces their gradients registers the sharded ones in any case.
        Collective over the mesh.

        With ``async_op`` it returns a handle, and the parameters may be used after the handle's
        ``wait()``. A forward waits by itself.
        """
        unit = self._fsdp_unit
        context = context_of(unit)
        context.settle()
        context.join_capture(unit)
        unit.follow_trainability()
        unit.hook_gradients()
        context.schedule.gathers.use(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Whether reductions run on a process group of their own, beside all-gathers. They do by
        default, unless the context was made with ``separate_reduce_scatter_group=False``. Call it
        on every rank of the mesh, between iterations."""
        for unit in self._units(recurse):
            unit.settings.separates_reductions = enable
            context_of(unit).unsettle()

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Makes ``comm`` gather this unit. It has ``torch.distributed.fsdp``'s interface of an
        all-gather. Call this on every rank, between iterations.

        ``comm`` gathers into memory that it allocates. Parameters are views of memory that the
        library allocates, so the result is copied, and the unit takes twice the memory meanwhile.
        On a CPU no compute hides ``comm``. A single rank does not call it.

        Raises:
            ValueError: ranks hold shards of different sizes, the unit lies on several meshes, or
                it uses symmetric memory.
        """
        comms = replace(self._fsdp_unit.settings.comms, all_gather=comm)
        self._customize("set_custom_all_gather", comms)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Makes ``comm`` reduce this unit's gradients. It has ``torch.distributed.fsdp``'s
        interface of a reduce-scatter, and is asked for a mean, or for a sum if a divisor was set.
        Everything else is as in :meth:`set_custom_all_gather`."""
        comms = replace(self._fsdp_unit.settings.comms, reduce_scatter=comm)
        self._customize("set_custom_reduce_scatter", comms)

    def _customize(self, verb: str, comms: CustomComms) -> None:
        unit = self._fsdp_unit
        if len({bucket.domain for bucket in unit.buckets}) > 1:
            raise ValueError(
                f"{verb}() on unit {unit.name!r}, whose parameters lie on several meshes: make a "
                "unit for each"
            )
        _check_shards_are_equal(unit, verb)
        _check_no_symmetric_memory(unit, verb)
        unit.settings.comms = comms
        context_of(unit).unsettle()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether this unit's full buffers and reduce inputs lie in memory that the backend of its
        process groups allocates. It is registered with the groups of gathers and reductions, so
        that NCCL can work on it without copies of its own, on NVSwitch by NVLink SHARP. Gradients
        are summed then and divided after it, because NCCL takes means of them without that memory.
        A buffer that is kept moves there when it was freed. Call this on every rank of the mesh,
        between iterations.

        Raises:
            ValueError: the backend allocates none, or the unit has custom collectives, which work
                on memory of theirs, or uses symmetric memory.
        """
        unit = self._fsdp_unit
        if enable:
            if unit.settings.comms != CustomComms():
                raise ValueError(
                    "set_allocate_memory_from_process_group_for_comm(True) on unit "
                    f"{unit.name!r}, whose custom collectives work on memory that they allocate: "
                    "allocate it there"
                )
            _check_no_symmetric_memory(unit, "set_allocate_memory_from_process_group_for_comm")
            for bucket in unit.buckets:
                mesh = bucket.domain.mesh
                check_memory(mesh.get_group(mesh.ndim - 1), bucket.domain.device)
        unit.settings.uses_group_memory = enable
        context_of(unit).unsettle()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Makes what is gathered and reduced of this unit travel in symmetric memory: memory that
        all ranks of a process group have registered together. NCCL has faster collectives for it,
        which take fewer of a GPU's cores or none. Call this on every rank of the mesh, between
        iterations. There is no way back.

        Units on one mesh share this memory, one collective after the other. It has the size of the
        largest full buffer, of the largest reduce input and of a shard of the latter, and is kept
        while the context lives. What travels is copied there and back, on the lanes. A rank that
        has no other to send to uses none. What neighbours keep and what travels between copies is
        not moved there. Gradients are summed, then divided.

        Raises:
            ValueError: there is no symmetric memory for this unit's process group and device,
                ``backend`` is not ``"NCCL"``, ranks hold shards of different sizes, or the unit
                has custom collectives or memory of its process groups. Nothing was changed then.
        """
        unit, verb = self._fsdp_unit, "set_symm_mem_for_comm"
        settings = unit.settings
        if settings.comms != CustomComms() or settings.uses_group_memory:
            raise ValueError(
                f"{verb}() on unit {unit.name!r}, which has custom collectives or memory of its "
                "process groups: it travels in one kind of memory alone"
            )
        _check_shards_are_equal(unit, verb)
        for bucket in unit.buckets:
            mesh = bucket.domain.mesh
            use_symmetric_memory(backend, mesh.get_group(mesh.ndim - 1), bucket.domain.device)
        settings.uses_symmetric_memory = True
        context_of(unit).unsettle()

    def set_zero_stage(self, stage: int, *, recurse: bool = True) -> None:
        """Sets what is sharded at rest, by the stages of ZeRO (arXiv 1910.02054).

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
        """Whether forward frees the full buffers, as the argument of :func:`fully_shard` says it.

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
        """Whether backward frees the full buffers. A buffer that is kept is gathered again before
        its next use if the parameters were edited."""
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit is gathered for its backward. An embedding, for example, need not be:
        its backward reads no parameters. A backward that does read them raises a RuntimeError that
        says so. The unit is gathered all the same if other code handles what autograd saves, as
        checkpointing does.

        Raises:
            RuntimeError: the unit has opaque parameters, which backward reads past autograd.
        """
        opaque = [bucket for bucket in self._fsdp_unit.buckets if bucket.is_opaque]
        if opaque and not unshard_in_backward:
            kind = type(opaque[0].parameters[0]).__name__
            raise RuntimeError(
                f"set_unshard_in_backward(False) on unit {self._fsdp_unit.name!r}, which has a "
                f"parameter {opaque[0].plan.specs[0].fqn!r} that is a {kind}: its backward reads "
                "what autograd does not know of, so leave it at True"
            )
        self._fsdp_unit.settings.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp2.FSDPModule]) -> None:
        """Which units are gathered ahead when this one runs in forward. They replace those that the
        order predicts; ``[]`` returns to the prediction. Set the same on every rank.

        All of them are gathered, even if they are more than ``prefetch``. They are kept until they
        are used, or until the pass ends.

        Raises:
            ValueError: a module is no unit, or belongs to another context.
        """
        self._fsdp_unit.forward_prefetch = self._prefetched(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp2.FSDPModule]) -> None:
        """Which units are gathered ahead when this one runs in backward. See
        :meth:`set_modules_to_forward_prefetch`."""
        self._fsdp_unit.backward_prefetch = self._prefetched(modules)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether full buffers keep their memory while the unit is sharded. Unsharded parameters
        then keep their addresses. Each unit takes the memory of all its parameters from its first
        all-gather on. A whole step that is captured in a CUDA graph neither needs nor takes it."""
        for unit in self._units(recurse):
            context_of(unit).transfers.keep_storage(unit, keep)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the all-gathers of the next pass wait for ``event``, recorded after the optimizer's
        step, and not for all compute that was enqueued before the pass. It holds for one pass.
        Edits of parameters after this call are waited for all the same. On a CPU there is nothing
        to wait for."""
        context = context_of(self._fsdp_unit)
        context.schedule.gathers.wait_once_for(event, context.units)
        if context.shard_optimizer_over_replicas:
            context.transfers.copies_lane.after_event(event)

    def reset_iter_state(self) -> None:
        """Does what :meth:`FsdpContext.reset` does. This is its name in FSDP2.

        Raises:
            RuntimeError: this unit lies within another; call it on the root.
        """
        self._check_outermost("reset_iter_state")
        context_of(self._fsdp_unit).reset()

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


def _check_shards_are_equal(unit: Unit, verb: str) -> None:
    """Checks that ranks hold equally much of ``unit``, for the method ``verb``.

    Raises:
        ValueError: they do not.
    """
    for bucket in unit.buckets:
        if not bucket.plan.is_equal:
            raise ValueError(
                f"{verb}() on unit {unit.name!r}, of which ranks hold "
                f"{bucket.plan.shard_numels} elements: use FsdpContext(layout=Flat()), which makes "
                "equal shards"
            )


def _check_no_symmetric_memory(unit: Unit, verb: str) -> None:
    """Checks that ``unit`` may travel in other memory, for the method ``verb``.

    Raises:
        ValueError: it uses symmetric memory.
    """
    if unit.settings.uses_symmetric_memory:
        raise ValueError(
            f"{verb}() on unit {unit.name!r}, which has set_symm_mem_for_comm(): it travels in one "
            "kind of memory alone"
        )


def _set_reshard_after_forward(unit: Unit, reshard_after_forward: bool | None) -> None:
    """Replaces the argument of :func:`fully_shard`. If that was a number of ranks, the context
    settles its groups again."""
    if unit.part_size is not None:
        context_of(unit).unsettle()
    unit.reshard_after_forward = reshard_after_forward


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a unit run on unsharded parameters, as its forward does. Does nothing to a
    module that is no unit.

    Raises:
        ValueError: the unit has no such method.
    """
    if not isinstance(module, FsdpModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    setattr(module, method_name, ForwardMethod(module, method))


def share_comm_ctx(modules: Sequence[FsdpModule]) -> None:
    """Makes several roots, such as the chunks of a pipeline stage, share the lanes of the first.
    Each keeps its own context, and so its own order. Call it before the first forward.

    Raises:
        ValueError: a module is no unit, or is on another kind of device.
        RuntimeError: a unit has run already, on lanes of its own. Nothing was changed then.
    """
    contexts = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"share_comm_ctx takes units, got a {type(module).__name__}")
        contexts.append(context_of(unit))
    if contexts:
        share_lanes(contexts)
