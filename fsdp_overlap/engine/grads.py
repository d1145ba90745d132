"""Gradients of one param group: from autograd's hooks through the reduce input into the sharded
``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, or_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.comm_streams import Accept, CommStream, WorkHandle
from fsdp_overlap.comm.host_copies import D2HCopy
from fsdp_overlap.engine.hsdp import ReplicaReduction
from fsdp_overlap.engine.options import ReduceOptions, sent_sizes
from fsdp_overlap.engine.param import is_placed_like, placed_like, tp_local_tensor
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tensor.sharded_param import call_gradient_hooks, call_hooks
from fsdp_overlap.tensor.subclasses import is_subclass

# Gradients of at least this size may move to the reduce input as soon as they arrive. Smaller ones
# are cheaper to copy together.
LARGE_BYTES = 1024 * 1024

_grad = attrgetter("grad")


class ParamGroupGradients:
    """Collects the gradients of one trainable param group and reduces them: the
    :class:`~fsdp_overlap.schedule.interface.Gradients` of the schedule.

    ``filled`` says for which parameters the reduce input holds a gradient. It may come from a
    backward without synchronization.
    """

    def __init__(
        self, param_group: ParamGroup, reduce_dtype: torch.dtype, reduce_options: ReduceOptions
    ) -> None:
        self.param_group = param_group
        self._options = reduce_options
        self.replica_reduction = (
            ReplicaReduction(param_group) if param_group.mesh_info.num_replicas > 1 else None
        )
        self.reduce_scatter_input = FlatBuffer(
            param_group.plan, reduce_dtype, param_group.full.flat.device
        )
        self.reduce_scatter_input.memory = param_group.full.memory
        sent = sent_sizes(
            param_group.gather_plan, reduce_dtype, param_group.comm_policy, reduced=True
        )
        self.reduced_nbytes = sum(sent)
        """What a reduce-scatter divides among the ranks."""
        self._communicates = self.reduced_nbytes - sent[param_group.mesh_info.shard_rank]
        if param_group.plan.specs[0].grad_dtype is not None:
            # Autograd rounds gradients to the grad_dtype of what it accumulates into.
            for parameter in param_group.parameters:
                parameter.grad_dtype = reduce_dtype
        self.count = len(param_group.parameters)
        self.filled = [False] * self.count
        self._filled_partly = [False] * self.count
        """For which parameters :attr:`replicas` holds a gradient, reduced among shards alone."""
        self.is_large = [
            spec.numel * reduce_dtype.itemsize >= LARGE_BYTES for spec in param_group.plan.specs
        ]
        self._on_full_mesh = [item.spmd for item in param_group.owned]
        # Reduced gradients of parameters that have none on this rank. They are kept until it is
        # known whether another rank has one.
        self.unused: list[tuple[int, torch.Tensor]] = []
        # Reduced gradients of an offloaded param group, on their way to the host, and what of them
        # is unused.
        self.offloads: list[tuple[D2HCopy, Sequence[bool] | None]] = []
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

    def may_copy_in_early(self, index: int) -> bool:
        """Return whether the gradient of parameter ``index``, which has just arrived, may be
        copied in before its param group is complete.

        It may not if copying it in takes a collective. All ranks of tensor parallelism must come to
        that at the same point, but what is copied in early depends on which other collectives are
        done on this rank.
        """
        if not self.is_large[index] or not self.param_group.is_tensor_parallel:
            return self.is_large[index]
        parameter, spmd = self.param_group.parameters[index], self._on_full_mesh[index]
        gradient = parameter.grad
        return gradient is None or is_placed_like(parameter, gradient, spmd)

    def copy_in_all(self) -> None:
        parameters = self.param_group.parameters
        gradients = list(map(_grad, parameters))
        # With create_graph=True gradients may require grad.
        if torch.is_grad_enabled() or any(map(is_, gradients, repeat(None))) or any(self.filled):
            self.copy_in(range(len(parameters)))
        else:
            if self.param_group.is_tensor_parallel:
                gradients = [self._tile(i, gradient) for i, gradient in enumerate(gradients)]
            if self.param_group.is_extension:
                gradients = list(map(_plain, gradients))
            try:
                torch._foreach_copy_(self.reduce_scatter_input.views, gradients)
            except RuntimeError:
                # Layouts are checked only now, and not for every gradient of every step.
                if all(gradient.layout is torch.strided for gradient in gradients):
                    raise
                self.copy_in(range(len(parameters)))
                return
            for parameter in parameters:
                parameter.grad = None
            self.filled = [True] * len(parameters)

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
            if self.param_group.is_tensor_parallel:
                gradient = self._tile(index, gradient)
            if type(gradient) is not torch.Tensor:
                gradient = _plain(gradient)
            if self.filled[index]:
                self.reduce_scatter_input.views[index].add_(gradient)
            else:
                self.filled[index] = True
                targets.append(self.reduce_scatter_input.views[index])
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _tile(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's tile of a gradient, placed as its parameter is: all of a plain
        gradient."""
        parameter, spmd = self.param_group.parameters[index], self._on_full_mesh[index]
        return tp_local_tensor(
            placed_like(parameter, gradient, spmd, self.reduce_scatter_input.flat.dtype)
        )

    @property
    def all_reduces(self) -> bool:
        """Whether there are replicas, and :meth:`reduce` reduces across them too."""
        return self.replica_reduction is not None and self._options.all_reduce_grads

    def reduce(self, comm_stream: CommStream, all_reduce_stream: CommStream | None) -> WorkHandle:
        """Enqueue the reduce-scatter of the reduce input. Its result becomes the sharded
        parameters' ``.grad``. If :attr:`all_reduces`, one more collective on ``all_reduce_stream``
        comes before that. If not, and there are replicas, the result waits for a backward that
        does.

        For a parameter without a gradient on this rank, the result is unused. It is kept until
        :meth:`accept_unused` if that will know whether another rank has a gradient, and otherwise
        given to the parameter at once. Collective over the mesh."""
        filled, self.filled = self.filled, [False] * len(self.filled)
        is_full = all(filled)
        empty = self.reduce_scatter_input.gaps  # they travel too
        if not is_full:
            views = zip(self.reduce_scatter_input.views, filled, strict=True)
            empty = [*empty, *(view for view, is_filled in views if not is_filled)]
        if empty:
            torch._foreach_zero_(empty)
        param_group, replicas = self.param_group, self.replica_reduction
        mesh_info = param_group.mesh_info
        # NCCL uses memory that is registered with its group for sums, and not for means.
        divisor, replicas_divisor = self._options.divisors(
            mesh_info.shard_size,
            mesh_info.num_replicas,
            sums=self.reduce_scatter_input.memory is not None,
        )
        accept: Accept
        if replicas is not None:
            filled = self._filled_partly = list(map(or_, self._filled_partly, filled))
            is_full = all(filled)
        if replicas is not None and not self.all_reduces:
            accept = replicas.keep
        else:
            self._filled_partly = [False] * self.count
            mesh_info.record_gradients(param_group.first_flag, filled)
            unused: list[bool] | None = None
            if not is_full:
                keep = mesh_info.syncs_unused_params
                pairs = zip(filled, param_group.parameters, strict=True)
                unused = [not given and (keep or not p.requires_grad) for given, p in pairs]
            accept = partial(self._accept, unused=unused)
            if replicas is not None:
                assert all_reduce_stream is not None
                accept = partial(replicas.start, all_reduce_stream, replicas_divisor, accept)
        comm_stream.after_compute()
        work = comm_stream.enqueue(
            "reduce_scatter",
            param_group.label,
            lambda: param_group.collectives.reduce_scatter(
                self.reduce_scatter_input.flat, param_group.groups.reduce, divisor
            ),
            accept,
            nbytes=self._communicates,
        )
        is_in_order = param_group.edits.has_hooks and not comm_stream.runs_ahead
        return _InOrder(work) if is_in_order else work

    def _accept(self, mean: torch.Tensor, unused: Sequence[bool] | None) -> None:
        if self._options.hook is not None:
            self._options.call_hook(mean)
        if mean.dtype != self.param_group.grad_dtype:
            mean = mean.to(self.param_group.grad_dtype)
        param_group = self.param_group
        edits = param_group.edits
        edits.check_not_ahead(param_group.label)
        is_plain = unused is None and not edits.has_hooks and not self.offloads
        if is_plain and edits.stepper is not None and edits.stepper.enqueue_step(self, mean):
            return
        if param_group.storage.is_on_host:
            self.offloads.append((param_group.storage.to_host(mean), unused))
            return
        self.give(mean, unused)

    def offload(self) -> None:
        """Block the host until the gradients on their way to it are there, and give them to the
        parameters."""
        for copy, unused in self.offloads:
            self.give(copy.wait(), unused)
        self.offloads.clear()

    def give(self, mean: torch.Tensor, unused: Sequence[bool] | None = None) -> None:
        """Make ``mean``, this rank's shard of the gradient, the parameters' ``.grad``, or add it.
        Keep what is ``unused``."""
        sizes, own = self._pieces
        pieces = [*mean.split_with_sizes(sizes), self._empty]
        parameters = self.param_group.sharded_parameters
        if unused is None:
            _give_gradients(parameters, [pieces[piece] for piece in own])
            return
        for index, piece in enumerate(own):
            if unused[index]:
                self.unused.append((index, pieces[piece]))
            else:
                _give_gradients([parameters[index]], [pieces[piece]])

    def accept_unused(self, has_gradient: Sequence[int]) -> None:
        """Give unused gradients to the parameters for which some rank had one, and drop the
        others. ``has_gradient``: the flags of the mesh. See Note [no gradient]."""
        for index, local in self.unused:
            if has_gradient[self.param_group.first_flag + index]:
                _give_gradients([self.param_group.sharded_parameters[index]], [local])
        self.unused.clear()

    def drop(self) -> None:
        """Forget everything that is not in a sharded ``.grad`` yet."""
        for parameter in self.param_group.parameters:
            parameter.grad = None
        self.filled = [False] * self.count
        self._filled_partly = [False] * self.count
        self.unused.clear()
        self.offloads.clear()
        if self.replica_reduction is not None:
            self.replica_reduction.drop()
        self.reduce_scatter_input.free()


class _InOrder:
    """A reduction whose result is given to hooks when it is waited for. They may communicate, so
    all ranks wait for it at the same point, and none as soon as it is done."""

    def __init__(self, work: WorkHandle) -> None:
        self.wait, self.wait_on_host, self.abandon = work.wait, work.wait_on_host, work.abandon

    def done(self) -> bool:
        return False


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient of a class of its own, as a plain tensor. It is copied there once, because
    an op on both may do more: one that consists of two would be added twice."""
    if isinstance(gradient, DTensor) or not is_subclass(gradient):
        return gradient
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _give_gradients(parameters: Sequence[Any], locals_: list[torch.Tensor]) -> None:
    """Give sharded parameters of a param group the gradients of what this rank has of them, which
    are flat. Call the hooks that users registered for that before and after it."""
    edits = parameters[0].edits
    if edits.has_hooks:
        call_gradient_hooks(parameters, locals_)
    parameters[0].give_grads(parameters, locals_)
    if edits.has_hooks:
        call_hooks(parameters)
