"""The verbs that :func:`fully_shard` gives a module, and functions of modules beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn
from weakref import ref

import torch
from torch import nn

from fsdp_overlap.comm.collectives import CustomComms
from fsdp_overlap.runtime.finalization import GradientReductionHandle
from fsdp_overlap.runtime.forward_method import ForwardMethod
from fsdp_overlap.runtime.unit import Unit, unit_names, unit_of
from fsdp_overlap.sharded_module import ShardedModule

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Makes compute wait for the all-gather and registers the unsharded parameters. Does
        nothing once they were freed again, as by a forward."""
        if self._unit is not None and self._unit.is_gathered:
            self._unit.wait()
            self._unit.use_unsharded()
        self._unit = None


class FsdpModule(ShardedModule):
    """Mixed into the class of every module given to :func:`fully_shard`."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, not those of inner units, and registers them in the
        module until :meth:`reshard` or the end of its next forward. Collective over the mesh.

        With ``async_op`` returns a handle; the parameters may be used after its ``wait()``, and in
        forward, which waits by itself.
        """
        unit = self._fsdp_unit
        unit.context.settle()
        unit.follow_trainability()
        unit.watch_gradients()
        gathers = unit.context.schedule.gathers
        gathers.after_edits()
        gathers.use(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients. Without, they are summed on each rank, unsharded and
        in the reduce dtype, until a backward that does: gradient accumulation without
        communication. ``zero_grad()`` does not know of such sums; ``ctx.reset()`` drops them."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync
            unit.reducing.across_copies = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a mesh ``(replicate, shard)``: whether backward reduces gradients across copies too.
        Without, they are reduced among shards and summed, until a backward that does: gradient
        accumulation with the communication inside a node alone. ``.grad`` is what it was until
        then. :meth:`set_requires_gradient_sync` sets this too."""
        for unit in self._units(recurse):
            unit.reducing.across_copies = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of this unit's gradients over all ranks of its mesh is divided by, instead
        of their number.

        Experts that are sharded over a part of the ranks, and get tokens from all of them, want
        the number of all.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): use a positive number")
        self._fsdp_unit.reducing.divisor = float(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives of this unit's gradients must be sums, and divisions apart."""
        self._fsdp_unit.reducing.sums_only = enable

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Calls ``hook`` with what was reduced, this rank's range of the unit's gradients, flat and
        in the reduce dtype, before it becomes or is added to ``.grad``: once for each bucket, after
        the reduction across copies if there are any. It may edit the tensor in place.

        Args:
            hook: runs on the lane of the reduction, on a CPU when compute waits for that.
            stream: the CUDA stream to run it on instead; not with copies.

        Raises:
            ValueError: ``stream`` is given on a mesh ``(replicate, shard)``.
        """
        unit = self._fsdp_unit
        if stream is not None and unit.has_copies:
            raise ValueError(
                "set_all_reduce_hook(stream=...) on a mesh (replicate, shard): the hook runs where "
                "the reduction across copies does; leave stream out"
            )
        unit.reducing.hook, unit.reducing.hook_stream = hook, stream

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Whether reductions run on a process group of their own, beside all-gathers, as they do
        unless the context was made with ``separate_groups=False``. Must be called on every rank of
        the mesh, between iterations."""
        for unit in self._units(recurse):
            unit.separates_reductions = enable
            unit.context.unsettle()

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gathers this unit by ``comm``, ``torch.distributed.fsdp``'s interface of an all-gather.

        Parameters are views of memory that the library gives, so that what is gathered is copied
        from the memory that ``comm`` allocates, which takes as much again meanwhile. On a CPU it
        hides behind no compute. One rank alone gathers without it. Between iterations, on every
        rank.

        Raises:
            ValueError: ranks hold shards of different sizes, or the unit lies on several meshes.
        """
        comms = replace(self._fsdp_unit.comms, all_gather=comm)
        self._customize("set_custom_all_gather", comms)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduces this unit's gradients by ``comm``, ``torch.distributed.fsdp``'s interface of a
        reduce-scatter: a mean, or a sum where a divisor was given. All else as for
        :meth:`set_custom_all_gather`."""
        comms = replace(self._fsdp_unit.comms, reduce_scatter=comm)
        self._customize("set_custom_reduce_scatter", comms)

    def _customize(self, verb: str, comms: CustomComms) -> None:
        unit = self._fsdp_unit
        if len({bucket.domain for bucket in unit.buckets}) > 1:
            raise ValueError(
                f"{verb}() on unit {unit.name!r}, whose parameters lie on several meshes: make a "
                "unit for each"
            )
        for bucket in unit.buckets:
            if not bucket.plan.is_equal:
                raise ValueError(
                    f"{verb}() on unit {unit.name!r}, of which ranks hold "
                    f"{bucket.plan.shard_numels} elements: use FsdpContext(layout=Flat()), which "
                    "makes equal shards"
                )
        unit.comms = comms
        unit.context.unsettle()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """For FSDP2's callers; ``False`` changes nothing.

        Raises:
            ValueError: ``enable`` is true.
        """
        if enable:
            raise ValueError(
                "set_allocate_memory_from_process_group_for_comm(True): what travels is the memory "
                "that parameters are views of, so there are no buffers for the process group to "
                "allocate; leave the call out, or allocate from it in set_custom_all_gather()"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """For FSDP2's callers.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"set_symm_mem_for_comm({backend!r}): what travels is the memory that parameters are "
            "views of, so there are no buffers to put in symmetric memory; leave the call out, or "
            "allocate it in set_custom_all_gather()"
        )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer's step. At stage 1 of
        :meth:`set_zero_stage` it is the one that reduces gradients."""
        for unit in self._units(recurse=True):
            unit.is_last_backward = is_last_backward

    def set_zero_stage(self, stage: int, *, recurse: bool = True) -> None:
        """What is sharded at rest, in the words of ZeRO (arXiv 1910.02054).

        3: all, as :func:`fully_shard` does by default. 2: gradients and optimizer states; full
        buffers are kept, and gathered again after the optimizer's step, under the next forward. 1:
        as 2, and gradients too are full until the last backward of a step, which alone reduces
        them; say which is by :meth:`set_is_last_backward`.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in (1, 2, 3):
            raise ValueError(f"set_zero_stage({stage!r}): use 1, 2 or 3")
        for unit in self._units(recurse):
            unit.reshard_after_forward = None if stage == 3 else False
            unit.reshard_after_backward = stage == 3
            unit.reduces_last_only = stage == 1

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward frees the full buffers. As the argument of :func:`fully_shard`.

        Raises:
            ValueError: it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward({reshard_after_forward!r}): use True or False"
            )
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward frees the full buffers. Buffers that are kept are gathered again before
        their next use if the parameters were edited."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit is gathered for its backward. An embedding, say, need not be: its
        backward reads no parameters. One that does read them raises a RuntimeError that says so.
        It is gathered all the same where somebody else handles what autograd saves, as
        checkpointing does."""
        self._fsdp_unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FsdpModule]) -> None:
        """Which units are gathered ahead where this one runs in forward, instead of those that are
        expected next; ``[]`` leaves that to the order again. Set the same on every rank.

        All of them are gathered, also more than ``prefetch``, and kept until they are used, at the
        longest to the end of the pass.

        Raises:
            ValueError: one is no unit, or belongs to another context.
        """
        self._fsdp_unit.forward_prefetch = self._prefetched(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FsdpModule]) -> None:
        """As :meth:`set_modules_to_forward_prefetch`, where this one's backward runs."""
        self._fsdp_unit.backward_prefetch = self._prefetched(modules)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reduce inputs may exist at once, those that travel and the one that is filled.
        2 by default, 1 with ``prefetch=0``. The units of a context share them: the largest number
        that was set on one of them counts.

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
            unit.max_reduce_inputs = max_input_buffers
            unit.context.follow_reduce_inputs()

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Changes nothing, for code that calls it: parameters without a gradient on this rank
        always take part in the reduction, so that ranks may use different ones; where no rank has
        one, ``.grad`` stays as it was."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether full buffers keep their memory, and so unsharded parameters their addresses,
        while the unit is sharded, as a captured CUDA graph needs. Takes the memory of each unit,
        whole, from its first all-gather on."""
        for unit in self._units(recurse):
            unit.context.keep_storage(unit, keep)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The all-gathers of the next pass wait for ``event``, recorded after the optimizer's step,
        and not for all compute enqueued before the pass. Counts once. Edits of parameters that are
        made after this call are waited for all the same. On a CPU there is nothing to wait for."""
        context = self._fsdp_unit.context
        context.schedule.gathers.wait_once_for(event)
        if context.divide_copies:
            context.copies_lane.after_event(event)

    def reset_iter_state(self) -> None:
        """As :meth:`FsdpContext.reset`, by FSDP2's name.

        Raises:
            RuntimeError: this unit lies within another; call it on the root.
        """
        self._check_outermost("reset_iter_state")
        self._fsdp_unit.context.reset()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether backwards leave it to :meth:`finalize_backward` to complete gradients. Without
        that call they never are.

        Raises:
            RuntimeError: this unit lies within another, or a backward is not finalized yet.
        """
        self._check_outermost("set_manual_backward_finalization")
        self._fsdp_unit.context.schedule.finalization.set_manual(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Completes the gradients of the backwards since the last call: reduces what backwards
        without synchronization left on units that synchronize now, and frees full buffers that are
        not to be kept after backward. Before the first forward it does nothing. Collective over the
        mesh.

        With ``async_op`` returns a handle; the gradients may be used, and the next forward or
        backward run, after its ``wait()``.

        Raises:
            RuntimeError: this unit lies within another, finalization is not manual, a backward is
                under way, or the last handle was not waited for.
        """
        self._check_outermost("finalize_backward")
        context = self._fsdp_unit.context
        if not context.has_schedule:
            return GradientReductionHandle(None) if async_op else None
        handle = context.schedule.finalization.finalize()
        if async_op:
            return handle
        handle.wait()
        return None

    def _check_outermost(self, verb: str) -> None:
        unit = self._fsdp_unit
        if unit in unit_names(unit.context.units):
            raise RuntimeError(
                f"{verb}() is for the root, and unit {unit.name!r} lies within another: call it on "
                "the outermost"
            )

    def _prefetched(self, modules: Sequence[FsdpModule]) -> list[ref[Unit]]:
        mine = self._fsdp_unit.context
        units = []
        for module in modules:
            unit = unit_of(module) if isinstance(module, nn.Module) else None
            if unit is None:
                raise ValueError(
                    f"can prefetch units only, got a {type(module).__name__}: call fully_shard on "
                    "it first"
                )
            if unit.context is not mine and not (mine.is_implicit or unit.context.is_implicit):
                raise ValueError(
                    f"unit {unit.name!r} has another FsdpContext than the unit "
                    f"{self._fsdp_unit.name!r} that would prefetch it; give both the same"
                )
            units.append(ref(unit))
        return units

    def _units(self, recurse: bool) -> Iterable[Unit]:
        modules = self.modules() if recurse else [self]
        found = (unit for unit in map(unit_of, modules) if unit is not None)
        return dict.fromkeys(found)  # a list of modules shares one


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a unit run on unsharded parameters, as its forward does. Does nothing to
    another module.

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
    """Makes several roots, as the chunks of a pipeline stage, share the lanes of the first. Each
    keeps its own context, and so its own order. To be called before the first forward.

    Raises:
        ValueError: one is no unit, or on another kind of device.
        RuntimeError: one has run already, on lanes of its own. Nothing was changed then.
    """
    contexts = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"share_comm_ctx takes units, got a {type(module).__name__}")
        contexts.append(unit.context)
    for context in contexts[1:]:
        context.check_may_use_lanes_of(contexts[0])
    for context in contexts[1:]:
        context.use_lanes_of(contexts[0])
