"""The verbs of a module that say when and how its gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_overlap.deciding.finalization import GradientReductionHandle
from fsdp_overlap.runtime.context import context_of
from fsdp_overlap.sharded_module import ShardedModule


class GradientVerbs(ShardedModule):
    """The part of :class:`FsdpModule` that is about gradients."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients. Without, they are summed on each rank, unsharded and
        in the reduce dtype, until a backward that does: gradient accumulation without
        communication. ``zero_grad()`` does not know of such sums; ``ctx.reset()`` drops them, and a
        copy of the model has none."""
        for unit in self._units(recurse):
            unit.settings.requires_gradient_sync = requires_gradient_sync
            unit.settings.reducing.across_copies = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a mesh ``(replicate, shard)``: whether backward reduces gradients across copies too.
        Without, they are reduced among shards and summed, until a backward that does: gradient
        accumulation with the communication inside a node alone. ``.grad`` is what it was until
        then. :meth:`set_requires_gradient_sync` sets this too."""
        for unit in self._units(recurse):
            unit.settings.reducing.across_copies = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer's step. At stage 1 of
        :meth:`set_zero_stage` it is the one that reduces gradients."""
        for unit in self._units(recurse=True):
            unit.settings.is_last_backward = is_last_backward

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
        self._fsdp_unit.settings.reducing.divisor = float(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives of this unit's gradients must be sums, and divisions apart."""
        self._fsdp_unit.settings.reducing.sums_only = enable

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.Stream | None = None,
    ) -> None:
        """Calls ``hook`` with what was reduced, this rank's range of the unit's gradients, flat and
        in the reduce dtype, before it becomes or is added to ``.grad``: once for each bucket, after
        the reduction across copies if there are any. It may edit the tensor in place.

        Args:
            hook: runs on the lane of the reduction, on a CPU when compute waits for that.
            stream: the stream to run it on instead; not with copies.

        Raises:
            ValueError: ``stream`` is given on a mesh ``(replicate, shard)``.
        """
        unit = self._fsdp_unit
        if stream is not None and unit.has_copies:
            raise ValueError(
                "set_all_reduce_hook(stream=...) on a mesh (replicate, shard): the hook runs where "
                "the reduction across copies does; leave stream out"
            )
        unit.settings.reducing.hook, unit.settings.reducing.hook_stream = hook, stream

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
            unit.settings.max_reduce_inputs = max_input_buffers
            context_of(unit).follow_reduce_inputs()

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Changes nothing, for code that calls it: parameters without a gradient on this rank
        always take part in the reduction, so that ranks may use different ones; where no rank has
        one, ``.grad`` stays as it was."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether backwards leave it to :meth:`finalize_backward` to complete gradients. Without
        that call they never are.

        Raises:
            RuntimeError: this unit lies within another, or a backward is not finalized yet.
        """
        self._check_outermost("set_manual_backward_finalization")
        context_of(self._fsdp_unit).schedule.finalization.set_manual(enabled)

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
        context = context_of(self._fsdp_unit)
        if not context.has_schedule:
            return GradientReductionHandle(None) if async_op else None
        handle = context.schedule.finalization.finalize()
        if async_op:
            return handle
        handle.wait()
        return None
