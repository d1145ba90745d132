"""The verbs of a sharded module that say when and how its gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_overlap.engine.context import context_of
from fsdp_overlap.schedule.finalization import GradientReductionHandle
from fsdp_overlap.sharded_module import ShardedModule


class GradientVerbs(ShardedModule):
    """The verbs of :class:`FsdpModule` that are about gradients."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients. If not, each rank sums them, unsharded and in the
        reduce dtype, until a backward that does. This is gradient accumulation without
        communication. ``zero_grad()`` does not clear such sums, but ``ctx.reset()`` drops them, and
        a copy of the model has none."""
        for unit in self._units(recurse):
            unit.settings.requires_gradient_sync = requires_gradient_sync
            unit.settings.reduce_options.across_copies = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients across copies too, on a mesh ``(replicate, shard)``.
        If not, they are reduced among shards and summed, until a backward that does. This is
        gradient accumulation that communicates inside a node alone. ``.grad`` does not change until
        then. :meth:`set_requires_gradient_sync` sets this too."""
        for unit in self._units(recurse):
            unit.settings.reduce_options.across_copies = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer's step. At stage 1 of
        :meth:`set_zero_stage` the last backward is the one that reduces gradients."""
        for unit in self._units(recurse=True):
            unit.settings.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets what this unit's summed gradients are divided by. The sum is over all ranks of its
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
        """Whether collectives of this unit's gradients must be sums. The division is a step of its
        own then."""
        self._fsdp_unit.settings.reduce_options.sums_only = enable

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.Stream | None = None,
    ) -> None:
        """Calls ``hook`` with the reduced gradients of each bucket, before they become ``.grad`` or
        are added to it. If there are copies, that is after the reduction across them.

        Args:
            hook: gets this rank's range of the gradients, as a flat tensor in the reduce dtype,
                which it may edit in place. It runs on the lane of the reduction. On a CPU it runs
                when compute waits for the reduction.
            stream: the stream to run ``hook`` on instead. Not possible with copies.

        Raises:
            ValueError: ``stream`` is given on a mesh ``(replicate, shard)``.
        """
        unit = self._fsdp_unit
        if stream is not None and unit.has_copies:
            raise ValueError(
                "set_all_reduce_hook(stream=...) on a mesh (replicate, shard): the hook runs where "
                "the reduction across copies does; leave stream out"
            )
        unit.settings.reduce_options.hook, unit.settings.reduce_options.hook_stream = hook, stream

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reduce inputs may exist at once: those that travel and the one that is being
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
            context_of(unit).follow_reduce_inputs()

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Changes nothing; it is here for code that was written for FSDP2. Parameters without a
        gradient on this rank always take part in the reduction, so ranks may use different
        parameters. If no rank has a gradient, ``.grad`` stays as it was."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether backwards leave it to :meth:`finalize_backward` to complete gradients. Without
        that call, gradients are never complete.

        Raises:
            RuntimeError: this unit lies within another, or a backward is not finalized yet.
        """
        self._check_outermost("set_manual_backward_finalization")
        context_of(self._fsdp_unit).schedule.finalization.set_manual(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Completes the gradients of all backwards since the last call. Collective over the mesh.

        It reduces what backwards without synchronization left on units that synchronize now. It
        frees the full buffers that are not kept after backward. Before the first forward it does
        nothing.

        With ``async_op`` it returns a handle. After the handle's ``wait()`` the gradients may be
        used, and the next forward or backward may run.

        Raises:
            RuntimeError: this unit lies within another, finalization is not manual, a backward is
                under way, or the last handle was not waited for.
        """
        self._check_outermost("finalize_backward")
        context = context_of(self._fsdp_unit)
        if not context.has_schedule:
            return GradientReductionHandle(None) if async_op else None
        handle = context.schedule.finalization.finalize()
        if async_op:
            return handle
        handle.wait()
        return None
