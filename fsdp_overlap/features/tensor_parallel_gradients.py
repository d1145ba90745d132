"""Gradients of parameters that tensor parallelism divides."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.param import tp_local_tensor
from fsdp_overlap.features.full_mesh import SPMDPlacement


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
        return gradient is None or _is_placed_like(parameter, gradient, item.placement)

    def copy_in_all(self) -> None:
        self.copy_in(range(self.count))

    def _local(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's tile of a gradient, placed as its parameter is: all of a plain
        gradient."""
        item, parameter = self.param_group.owned[index], self.param_group.parameters[index]
        dtype = self.reduce_scatter_input.flat.dtype
        tile = tp_local_tensor(_placed_like(parameter, gradient, item.placement, dtype))
        return super()._local(index, tile)


def _is_placed_like(
    parameter: torch.Tensor, gradient: torch.Tensor, over_all: SPMDPlacement | None
) -> bool:
    """Return whether a rank's tile of ``gradient`` is the gradient of its tile of ``parameter``."""
    if over_all is not None:
        return over_all.is_reduced(gradient)
    if not isinstance(parameter, DTensor):
        return True
    return isinstance(gradient, DTensor) and gradient.placements == parameter.placements


def _placed_like(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    over_all: SPMDPlacement | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``gradient``, placed as ``parameter`` is. Autograd may have left it placed otherwise,
    as parts of a sum on the ranks of tensor parallelism. Then it is brought there in ``dtype``,
    which is collective over these ranks.

    Raises:
        RuntimeError: it is no DTensor, though ``parameter`` is one, or lies over another mesh.
    """
    if _is_placed_like(parameter, gradient, over_all):
        return gradient
    if over_all is not None:
        return over_all.reduce(gradient, dtype)
    assert isinstance(parameter, DTensor)
    if not isinstance(gradient, DTensor) or gradient.device_mesh != parameter.device_mesh:
        raise RuntimeError(
            f"the gradient of a parameter over {parameter.device_mesh} is a "
            f"{type(gradient).__name__} over {getattr(gradient, 'device_mesh', 'no mesh')}"
        )
    return cast(DTensor, gradient.to(dtype)).redistribute(placements=parameter.placements)
