"""Gradients of one param group: from autograd's hooks through the reduce input into the sharded
``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.comm_streams import Accept, CommStream, PendingCollective, WorkHandle
from fsdp_overlap.desync.order_check import REDUCE_SCATTER
from fsdp_overlap.engine.options import ReduceOptions
from fsdp_overlap.engine.param_group import ParamGroup, sent_sizes
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tensor.ragged_dtensor import call_gradient_hooks, call_hooks
from fsdp_overlap.tensor.subclasses import is_subclass

# Gradients of at least this size may move to the reduce input as soon as they arrive. Smaller ones
# are cheaper to copy together.
LARGE_BYTES = 1024 * 1024

_grad = attrgetter("grad")


class CommPart(Protocol):
    """What a feature has under way on the comm streams of a context."""

    def finish(self) -> None:
        """Make compute wait for the reductions under way, at the end of a backward."""
        ...

    def abandon(self) -> None:
        """Wait for the reductions under way, after an error. Nobody needs their results."""
        ...


Part = TypeVar("Part", bound=CommPart)


class ReduceStreams(Protocol):
    """The comm streams that reductions are enqueued on."""

    reduce_scatter_stream: CommStream

    @property
    def all_reduce_stream(self) -> CommStream: ...

    def part(self, kind: type[Part]) -> Part:
        """Return the part of this class. It is made at the first call."""
        ...


class ParamGroupGradients:
    """Collects the gradients of one trainable param group and reduces them: the
    :class:`~fsdp_overlap.schedule.interface.Gradients` of the schedule.

    What a feature does otherwise is in a subclass, which is chosen when the gradients are made.
    ``kinds``: what :meth:`reduce` issues without and with a reduction over replicas.
    ``filled`` says for which parameters the reduce input holds a gradient. It may come from a
    backward without synchronization.
    """

    kinds = REDUCE_SCATTER, REDUCE_SCATTER

    def __init__(
        self, param_group: ParamGroup, reduce_dtype: torch.dtype, reduce_options: ReduceOptions
    ) -> None:
        self.param_group = param_group
        self.reduce_options = reduce_options
        plan, full = param_group.plan, param_group.full
        self.reduce_scatter_input = FlatBuffer(plan, reduce_dtype, full.flat.device)
        self.reduce_scatter_input.memory = full.memory
        sent = sent_sizes(
            param_group.gather_plan, reduce_dtype, param_group.comm_policy, reduced=True
        )
        self.reduced_nbytes = sum(sent)
        """What a reduce-scatter divides among the ranks."""
        self._comm_nbytes = self.reduced_nbytes - sent[param_group.mesh_info.shard_rank]
        if plan.specs[0].grad_dtype is not None:
            # Autograd rounds gradients to the grad_dtype of what it accumulates into.
            for parameter in param_group.parameters:
                parameter.grad_dtype = reduce_dtype
        self.count = len(param_group.parameters)
        self.filled = [False] * self.count
        self._all_filled = bytes([True]) * self.count
        nbytes = [spec.numel * reduce_dtype.itemsize for spec in plan.specs]
        self.is_large = [each >= LARGE_BYTES for each in nbytes]
        # Reduced gradients of parameters that have none on this rank. They are kept until it is
        # known whether another rank has one.
        self.unused: list[tuple[int, torch.Tensor]] = []
        self._pieces = self._plan_pieces()
        # The gradient of a parameter of which this rank holds nothing. The first forward may run in
        # inference mode, and in-place ops refuse tensors made in it ever after.
        with torch.inference_mode(False):
            self._empty = param_group.shard.new_empty(0, dtype=param_group.grad_dtype)

    def _plan_pieces(self) -> tuple[list[int], list[int]]:
        """Return the sizes, in elements, that split a shard into ranges of parameters and the gaps
        between them. Then the number of each parameter's piece, -1 if this rank holds nothing of
        it."""
        sizes: list[int] = []
        pieces = []
        end = 0
        plan, rank = self.param_group.plan, self.param_group.mesh_info.plan_rank
        for start, size in plan.places(rank):
            if not size:
                pieces.append(-1)
                continue
            if start > end:
                sizes.append(start - end)
            pieces.append(len(sizes))
            sizes.append(size)
            end = start + size
        sizes.append(plan.shard_numels[rank] - end)
        return sizes, pieces

    @property
    def runs(self) -> list[tuple[int, int]]:
        """``(start, elements)`` of what lies end to end in a shard of the gradient, without
        gaps."""
        plan, rank = self.param_group.plan, self.param_group.mesh_info.plan_rank
        runs: list[tuple[int, int]] = []
        for start, numel in plan.places(rank):
            if numel and runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + numel)
            elif numel:
                runs.append((start, numel))
        return runs

    @property
    def has_input(self) -> bool:
        return self.reduce_scatter_input.allocated

    # From autograd into the reduce input

    def may_copy_in_early(self, index: int) -> bool:
        """Return whether the gradient of parameter ``index``, which has just arrived, may be
        copied in before its param group is complete."""
        return self.is_large[index]

    def copy_in_all(self) -> None:
        parameters = self.param_group.parameters
        gradients = list(map(_grad, parameters))
        # With create_graph=True gradients may require grad.
        if torch.is_grad_enabled() or any(map(is_, gradients, repeat(None))) or any(self.filled):
            self.copy_in(range(self.count))
            return
        try:
            torch._foreach_copy_(self.reduce_scatter_input.views, gradients)
        except RuntimeError:
            # Layouts are checked only now, and not for every gradient of every step.
            if all(gradient.layout is torch.strided for gradient in gradients):
                raise
            self.copy_in(range(self.count))
            return
        for parameter in parameters:
            parameter.grad = None
        self.filled = [True] * self.count

    def copy_in(self, indices: Sequence[int]) -> None:
        targets, sources = [], []
        for index in indices:
            parameter = self.param_group.parameters[index]
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            if gradient.requires_grad:  # by backward(create_graph=True)
                gradient = gradient.detach()
            if gradient.layout is not torch.strided:  # by nn.Embedding(sparse=True)
                gradient = gradient.to_dense()
            gradient = self._local(index, gradient)
            if self.filled[index]:
                self.reduce_scatter_input.views[index].add_(gradient)
            else:
                self.filled[index] = True
                targets.append(self.reduce_scatter_input.views[index])
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _local(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the reduce input takes of a gradient of parameter ``index``."""
        return gradient if type(gradient) is torch.Tensor else as_plain(gradient)

    # The reduction

    def reduce(self, comm: ReduceStreams, accept: Accept | None = None) -> WorkHandle:
        """Enqueue the reduce-scatter of the reduce input. Its result becomes the sharded
        parameters' ``.grad``.

        For a parameter without a gradient on this rank, the result is unused. It is kept until
        :meth:`complete` if that will know whether another rank has a gradient, and otherwise given
        to the parameter at once. ``accept`` takes the result instead, if it is given. Collective
        over the mesh."""
        param_group, comm_stream = self.param_group, comm.reduce_scatter_stream
        if not all(self.filled):
            self._zero_unfilled()
            accept = accept or self._accept_filled(self.filled)
        elif accept is None:
            first, accept = param_group.first_flag, self._accept
            flags = param_group.mesh_info.order_check.has_gradient
            flags[first : first + self.count] = self._all_filled
        self.filled = [False] * self.count
        if self.reduce_scatter_input.gaps:  # they travel too
            torch._foreach_zero_(self.reduce_scatter_input.gaps)
        comm_stream.after_compute()
        work = comm_stream.enqueue(
            "reduce_scatter", param_group.label, self._issue, accept, self._comm_nbytes
        )
        is_in_order = param_group.edits.has_hooks and not comm_stream.runs_ahead
        return _InOrder(work) if is_in_order else work

    def _issue(self) -> PendingCollective:
        param_group, buffer = self.param_group, self.reduce_scatter_input
        divisor = self.reduce_options.divisor
        # NCCL uses memory that is registered with its group for sums, and not for means.
        if divisor is None and (self.reduce_options.sums_only or buffer.memory is not None):
            divisor = float(param_group.mesh_info.shard_size)
        groups = param_group.groups
        return param_group.collectives.reduce_scatter(
            buffer.flat, groups.reduce_ref() or groups.reduce, divisor
        )

    def _zero_unfilled(self) -> None:
        views = zip(self.reduce_scatter_input.views, self.filled, strict=True)
        torch._foreach_zero_([view for view, is_filled in views if not is_filled])

    def _accept_filled(self, filled: Sequence[bool]) -> Accept:
        """Note that this rank has gradients of the ``filled`` parameters. Return what takes the
        reduced gradients."""
        param_group = self.param_group
        mesh_info = param_group.mesh_info
        mesh_info.order_check.record_gradients(param_group.first_flag, filled)
        if all(filled):
            return self._accept
        keep = mesh_info.syncs_unused_params
        pairs = zip(filled, param_group.parameters, strict=True)
        unused = [not given and (keep or not p.requires_grad) for given, p in pairs]
        return partial(self._accept, unused=unused)

    # From the reduction into ``.grad``

    def _accept(self, mean: torch.Tensor, unused: Sequence[bool] | None = None) -> None:
        if self.reduce_options.hook is not None:
            self.reduce_options.call_hook(mean)
        if mean.dtype != self.param_group.grad_dtype:
            mean = mean.to(self.param_group.grad_dtype)
        if self.param_group.edits.stepper is None or not self._is_stepped(mean, unused):
            self._keep(mean, unused)

    def _is_stepped(self, mean: torch.Tensor, unused: Sequence[bool] | None) -> bool:
        """Return whether the optimizer steps the shard now. Then it takes ``mean``."""
        edits = self.param_group.edits
        edits.check_not_ahead(self.param_group.label)
        if unused is not None or edits.has_hooks:
            return False
        return edits.stepper is not None and edits.stepper.enqueue_step(self, mean)

    def give(self, mean: torch.Tensor, unused: Sequence[bool] | None = None) -> None:
        """Make ``mean``, this rank's shard of the gradient, the parameters' ``.grad``, or add it.
        Keep what is ``unused``."""
        sizes, own = self._pieces
        pieces = [*mean.split_with_sizes(sizes), self._empty]
        locals_ = list(map(pieces.__getitem__, own))
        parameters = self.param_group.sharded_parameters
        if unused is not None:
            self._give_used(locals_, unused)
        elif self.param_group.edits.has_hooks:
            self._give_hooked(parameters, locals_)
        else:
            self.param_group.give_grads(parameters, locals_)

    _keep = give
    """Does with a reduced gradient what the place where the shard rests asks for."""

    def _give_used(self, locals_: Sequence[torch.Tensor], unused: Sequence[bool]) -> None:
        self.param_group.mesh_info.has_late_gradients = True
        for index, local in enumerate(locals_):
            if unused[index]:
                self.unused.append((index, local))
            else:
                self._give_hooked([self.param_group.sharded_parameters[index]], [local])

    def _give_hooked(self, parameters: Sequence[Any], locals_: list[torch.Tensor]) -> None:
        """Give parameters the gradients of what this rank has of them, which are flat. Call the
        hooks that users registered for that before and after it."""
        has_hooks = self.param_group.edits.has_hooks
        if has_hooks:
            call_gradient_hooks(parameters, locals_)
        self.param_group.give_grads(parameters, locals_)
        if has_hooks:
            call_hooks(parameters)

    def complete(self, has_gradient: Sequence[int]) -> None:
        """Give the parameters what they get only at the end of backward: unused gradients, if some
        rank had one. Drop the others. ``has_gradient`` has the flags of the mesh.
        See Note [no gradient]."""
        for index, local in self.unused:
            if has_gradient[self.param_group.first_flag + index]:
                self._give_hooked([self.param_group.sharded_parameters[index]], [local])
        self.unused.clear()

    def drop(self) -> None:
        """Forget everything that is not in a sharded ``.grad`` yet."""
        for parameter in self.param_group.parameters:
            parameter.grad = None
        self.filled = [False] * self.count
        self.unused.clear()
        self.reduce_scatter_input.free()


class _InOrder:
    """A reduction whose result is given to hooks when it is waited for. They may communicate, so
    all ranks wait for it at the same point, and none as soon as it is done."""

    def __init__(self, work: WorkHandle) -> None:
        self.wait, self.wait_on_host, self.abandon = work.wait, work.wait_on_host, work.abandon

    def done(self) -> bool:
        return False


def as_plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient of a class of its own, as a plain tensor. It is copied there once, because
    an op on both may do more: one that consists of two would be added twice."""
    if isinstance(gradient, DTensor) or not is_subclass(gradient):
        return gradient
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
