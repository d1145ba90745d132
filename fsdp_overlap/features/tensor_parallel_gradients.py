"""Gradients of parameters that tensor parallelism divides."""

from __future__ import annotations

import torch

from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.param import is_placed_like, placed_like, tp_local_tensor


class TensorParallelGradients(ParamGroupGradients):
    """Gradients of which the reduce input takes this rank's tiles."""

    def may_copy_in_early(self, index: int) -> bool:
        """Return False if copying it in takes a collective. All ranks of tensor parallelism must
        come to that at the same point, but what is copied in early depends on which other
        collectives are done on this rank."""
        if not super().may_copy_in_early(index):
            return False
        item, parameter = self.param_group.owned[index], self.param_group.parameters[index]
        gradient = parameter.grad
        return gradient is None or is_placed_like(parameter, gradient, item.spmd)

    def copy_in_all(self) -> None:
        self.copy_in(range(self.count))

    def _local(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's tile of a gradient, placed as its parameter is: all of a plain
        gradient."""
        item, parameter = self.param_group.owned[index], self.param_group.parameters[index]
        dtype = self.reduce_scatter_input.flat.dtype
        tile = tp_local_tensor(placed_like(parameter, gradient, item.spmd, dtype))
        return super()._local(index, tile)
