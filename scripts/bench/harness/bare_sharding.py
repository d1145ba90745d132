"""About the least that sharding a unit can cost the host: no library, a floor to compare with.

A unit is gathered before its forward and before its backward, its parameters are swapped in and
out, and its gradients are copied together and reduce-scattered after its backward. Nothing is ahead
of use, nothing is checked, no gradient reaches an optimizer, and a unit must be one module with one
output whose parameters all have gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import distributed_c10d as c10d


class BareUnit:
    """Shards `module` over `group`, in place."""

    last: BareUnit | None = None
    """The unit whose backward is under way."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.places = [
            (owner._parameters, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self.parameters = [parameter for _, _, parameter in self.places]
        sizes = [parameter.numel() for parameter in self.parameters]
        padding = -sum(sizes) % group.size()
        self.full, self.gradients = (torch.empty(sum(sizes) + padding) for _ in range(2))
        self.gradient_views = []
        pieces = zip(
            self.parameters,
            self.full.split([*sizes, padding]),
            self.gradients.split([*sizes, padding]),
            strict=False,
        )
        for parameter, piece, gradient in pieces:
            piece.copy_(parameter.detach().flatten())
            parameter.data = piece.view(parameter.shape)
            self.gradient_views.append(gradient.view(parameter.shape))
        self.shard = self.full.chunk(group.size())[group.rank()].clone()
        self.sharded = [nn.Parameter(self.shard) for _ in self.parameters]
        self.nbytes = self.full.nbytes
        self.gather_options = c10d.AllgatherOptions()
        self.reduce_options = c10d.ReduceScatterOptions()
        self.gather_options.asyncOp = self.reduce_options.asyncOp = False
        self.reduce_options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        self.gradients.untyped_storage().resize_(0)
        self.reshard()
        module.register_forward_pre_hook(lambda *_: self.unshard())
        module.register_forward_hook(self.after_forward)

    def unshard(self) -> None:
        self.full.untyped_storage().resize_(self.nbytes)
        self.group._allgather_base(self.full, self.shard, self.gather_options).wait()
        for registered, name, parameter in self.places:
            registered[name] = parameter

    def reshard(self) -> None:
        for (registered, name, _), sharded in zip(self.places, self.sharded, strict=True):
            registered[name] = sharded
        self.full.untyped_storage().resize_(0)

    def after_forward(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        self.reshard()
        output.register_hook(self.before_backward)

    def before_backward(self, _: torch.Tensor) -> None:
        self.unshard()
        if BareUnit.last is None:
            Variable._execution_engine.queue_callback(BareUnit.reduce_last)
        else:
            BareUnit.reduce_last()
        BareUnit.last = self

    @staticmethod
    def reduce_last() -> None:
        assert BareUnit.last is not None
        BareUnit.last.reduce()
        BareUnit.last = None

    def reduce(self) -> None:
        self.reshard()
        self.gradients.untyped_storage().resize_(self.nbytes)
        torch._foreach_copy_(self.gradient_views, [p.grad for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        own = self.shard.new_empty(self.shard.shape)
        self.group._reduce_scatter_base(own, self.gradients, self.reduce_options).wait()
        self.gradients.untyped_storage().resize_(0)
