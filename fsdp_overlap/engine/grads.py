"""One bucket's gradients: from autograd's hooks through the reduce input into the sharded
``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.lanes import Lane, Ticket
from fsdp_overlap.engine.hsdp import Accept, ReplicaReduction
from fsdp_overlap.engine.options import ReduceOptions, sent_sizes
from fsdp_overlap.engine.param import is_placed_like, placed_like, tp_local_tensor
from fsdp_overlap.engine.param_group import Bucket, D2HCopy, give_gradients, places_in_shard
from fsdp_overlap.tensor.extension import is_subclass
from fsdp_overlap.tensor.flat_buffer import FlatBuffer

# Gradients of at least this size may move to the reduce input as soon as they arrive. Smaller ones
# are cheaper to copy together.
LARGE_BYTES = 1024 * 1024

_grad = attrgetter("grad")


class BucketGradients:
    """Collects the gradients of one trainable bucket and reduces them.

    ``filled`` says for which parameters the reduce input holds a gradient. It may come from a
    backward without synchronization.
    """

    def __init__(
        self, bucket: Bucket, reduce_dtype: torch.dtype, reduce_options: ReduceOptions
    ) -> None:
        self.bucket = bucket
        self._options = reduce_options
        self.copies = ReplicaReduction(bucket) if bucket.mesh_info.copies > 1 else None
        self.input = FlatBuffer(bucket.plan, reduce_dtype, bucket.full.flat.device)
        self.input.memory = bucket.full.memory
        policy = bucket.comm_policy
        codes = policy.reduce_dtype if policy is not None else None
        sent = sent_sizes(bucket.gather_plan, reduce_dtype, policy, codes)
        self.reduced_nbytes = sum(sent)
        """What a reduce-scatter divides among the ranks."""
        self._travels = self.reduced_nbytes - sent[bucket.mesh_info.shard_rank]
        if bucket.plan.specs[0].grad_dtype is not None:
            # Autograd rounds gradients to the grad_dtype of what it accumulates into.
            for parameter in bucket.parameters:
                parameter.grad_dtype = reduce_dtype
        self.count = len(bucket.parameters)
        self.filled = [False] * self.count
        self.is_large = [
            spec.numel * reduce_dtype.itemsize >= LARGE_BYTES for spec in bucket.plan.specs
        ]
        self._on_full_mesh = [item.spmd for item in bucket.owned]
        # Reduced gradients of parameters that have none on this rank. They are kept until it is
        # known whether another rank has one.
        self.doubtful: list[tuple[int, torch.Tensor]] = []
        # Reduced gradients of an offloaded bucket, on their way to the host, and what of them is
        # doubtful.
        self.offloads: list[tuple[D2HCopy, Sequence[bool] | None]] = []
        self._pieces = self._plan_pieces()
        # The gradient of a parameter of which this rank holds nothing. The first forward may run in
        # inference mode, and in-place ops refuse tensors made in it ever after.
        with torch.inference_mode(False):
            self._empty = bucket.shard.new_empty(0, dtype=bucket.grad_dtype)

    def _plan_pieces(self) -> tuple[list[int], list[int]]:
        """Return the sizes, in elements, that split a shard into ranges of parameters and the gaps
        between them. Then the number of each parameter's piece, -1 if this rank holds nothing of
        it."""
        sizes: list[int] = []
        pieces = []
        end = 0
        plan, rank = self.bucket.plan, self.bucket.mesh_info.plan_rank
        for start, size in places_in_shard(plan, rank):
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
    def has_input(self) -> bool:
        """Whether the reduce input has memory."""
        return self.input.allocated

    def leaves_early(self, index: int) -> bool:
        """Return whether the gradient of parameter ``index``, which has just arrived, may be
        absorbed before its bucket is complete.

        It may not if absorbing takes a collective. All ranks of tensor parallelism must come to
        that at the same point, but what is absorbed early depends on which other collectives are
        done on this rank.
        """
        if not self.is_large[index] or not self.bucket.is_tensor_parallel:
            return self.is_large[index]
        parameter, spmd = self.bucket.parameters[index], self._on_full_mesh[index]
        gradient = parameter.grad
        return gradient is None or is_placed_like(parameter, gradient, spmd)

    def absorb_all(self) -> None:
        """Move every gradient that autograd holds into the reduce input."""
        parameters = self.bucket.parameters
        gradients = list(map(_grad, parameters))
        # With create_graph=True gradients may require grad.
        if torch.is_grad_enabled() or any(map(is_, gradients, repeat(None))) or any(self.filled):
            self.absorb(range(len(parameters)))
        else:
            if self.bucket.is_tensor_parallel:
                gradients = [self._tile(i, gradient) for i, gradient in enumerate(gradients)]
            if self.bucket.is_extension:
                gradients = list(map(_plain, gradients))
            try:
                torch._foreach_copy_(self.input.views, gradients)
            except RuntimeError:
                # Layouts are checked only now, and not for every gradient of every step.
                if all(gradient.layout is torch.strided for gradient in gradients):
                    raise
                self.absorb(range(len(parameters)))
                return
            for parameter in parameters:
                parameter.grad = None
            self.filled = [True] * len(parameters)

    def absorb(self, indices: Sequence[int]) -> None:
        """Move the gradients that autograd holds for these parameters into the reduce input."""
        targets, sources = [], []
        for index in indices:
            parameter = self.bucket.parameters[index]
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            if gradient.requires_grad:  # by backward(create_graph=True)
                gradient = gradient.detach()
            if gradient.layout is not torch.strided:  # by nn.Embedding(sparse=True)
                gradient = gradient.to_dense()
            if self.bucket.is_tensor_parallel:
                gradient = self._tile(index, gradient)
            if type(gradient) is not torch.Tensor:
                gradient = _plain(gradient)
            if self.filled[index]:
                self.input.views[index].add_(gradient)
            else:
                self.filled[index] = True
                targets.append(self.input.views[index])
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _tile(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's tile of a gradient, placed as its parameter is: all of a plain
        gradient."""
        parameter, spmd = self.bucket.parameters[index], self._on_full_mesh[index]
        return tp_local_tensor(placed_like(parameter, gradient, spmd, self.input.flat.dtype))

    @property
    def goes_across(self) -> bool:
        """Whether there are copies, and :meth:`reduce` reduces across them too."""
        return self.copies is not None and self._options.across_copies

    def reduce(self, lane: Lane, copies_lane: Lane | None) -> Ticket:
        """Enqueue the reduce-scatter of the reduce input. Its result becomes the sharded
        parameters' ``.grad``. If :attr:`goes_across`, one more collective on ``copies_lane`` comes
        before that. If not, and there are copies, the result waits for a backward that does.

        For a parameter without a gradient on this rank, the result is doubtful. It is kept until
        :meth:`settle_doubts` if that will know whether another rank has a gradient, and otherwise
        given to the parameter at once. Collective over the mesh."""
        filled, self.filled = self.filled, [False] * len(self.filled)
        is_full = all(filled)
        empty = self.input.gaps  # they travel too
        if not is_full:
            views = zip(self.input.views, filled, strict=True)
            empty = [*empty, *(view for view, is_filled in views if not is_filled)]
        if empty:
            torch._foreach_zero_(empty)
        bucket, copies = self.bucket, self.copies
        mesh_info = bucket.mesh_info
        # NCCL uses memory that is registered with its group for sums, and not for means.
        divisor, copies_divisor = self._options.divisors(
            mesh_info.shard_size, mesh_info.copies, sums=self.input.memory is not None
        )
        accept: Accept
        if copies is not None and not self.goes_across:
            copies.keep_filled(filled)
            accept = copies.keep
        else:
            if copies is not None:
                filled = copies.take_filled(filled)
                is_full = all(filled)
            mesh_info.note_gradients(bucket, filled)
            doubtful = None if is_full else self._doubtful_among(filled)
            accept = partial(self._accept, doubtful=doubtful)
            if copies is not None:
                assert copies_lane is not None
                accept = partial(copies.start, copies_lane, copies_divisor, accept)
        lane.after_compute()
        return lane.enqueue(
            "reduce_scatter",
            bucket.label,
            lambda: bucket.collectives.reduce_scatter(
                self.input.flat, bucket.gather_plan, bucket.groups.reduce, divisor
            ),
            accept,
            nbytes=self._travels,
        )

    def _doubtful_among(self, filled: Sequence[bool]) -> list[bool]:
        keep = self.bucket.mesh_info.knows_gradients
        return [
            not is_filled and (keep or not parameter.requires_grad)
            for is_filled, parameter in zip(filled, self.bucket.parameters, strict=True)
        ]

    def _accept(self, mean: torch.Tensor, doubtful: Sequence[bool] | None) -> None:
        if self._options.hook is not None:
            self._options.call_hook(self._options.hook, mean)
        if mean.dtype != self.bucket.grad_dtype:
            mean = mean.to(self.bucket.grad_dtype)
        if self.bucket.offload is not None:
            self.offloads.append((self.bucket.to_host(mean), doubtful))
            return
        self._give(mean, doubtful)

    def offload(self) -> None:
        """Block the host until the gradients on their way to it are there, and gives them to the
        parameters."""
        for landing, doubtful in self.offloads:
            self._give(landing.wait(), doubtful)
        self.offloads.clear()

    def _give(self, mean: torch.Tensor, doubtful: Sequence[bool] | None) -> None:
        sizes, own = self._pieces
        pieces = [*mean.split_with_sizes(sizes), self._empty]
        parameters = self.bucket.sharded_parameters
        if doubtful is None:
            give_gradients(parameters, [pieces[piece] for piece in own])
            return
        for index, piece in enumerate(own):
            if doubtful[index]:
                self.doubtful.append((index, pieces[piece]))
            else:
                give_gradients([parameters[index]], [pieces[piece]])

    def settle_doubts(self, has_gradient: Sequence[int]) -> None:
        """Give doubtful gradients to the parameters for which some rank had one, and drops the
        others. ``has_gradient``: the flags of the mesh. See Note [no gradient]."""
        for index, local in self.doubtful:
            if has_gradient[self.bucket.first_flag + index]:
                give_gradients([self.bucket.sharded_parameters[index]], [local])
        self.doubtful.clear()

    def drop(self) -> None:
        """Forget everything that is not in a sharded ``.grad`` yet."""
        for parameter in self.bucket.parameters:
            parameter.grad = None
        self.filled = [False] * len(self.filled)
        self.doubtful.clear()
        self.offloads.clear()
        if self.copies is not None:
            self.copies.drop()
        self.input.free()


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient of a class of its own, as a plain tensor. It is copied there once, because
    an op on both may do more: one that consists of two would be added twice."""
    if isinstance(gradient, DTensor) or not is_subclass(gradient):
        return gradient
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
