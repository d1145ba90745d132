"""Linear layers that compute in float8 by torchao, each tensor with one scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.blocks import find_blocks
from fsdp_overlap.tools.emulator import Operation, active
from fsdp_overlap.tools.simulator.fusion import Kernel
from fsdp_overlap.tools.simulator.simulate import Step
from fsdp_overlap.torch_internals import current_graph_task_id

MULTIPLE = 16
"""GPUs multiply matrices in float8 whose sizes are multiples of this."""
ROUTERS = ("gate", "router")
"""The names of the modules beside ``experts`` that choose these."""


def check_linear_dtype(linear_dtype: str | None, tokens: int) -> None:
    """Check that products of as many ``tokens`` can be computed in ``linear_dtype``.

    Raises:
        ValueError: they cannot.
    """
    if linear_dtype is None:
        return
    if linear_dtype != "float8":
        raise ValueError(f"linear_dtype={linear_dtype!r}: must be float8, or be left out")
    if tokens % MULTIPLE:
        raise ValueError(
            f"products in float8 of {tokens} tokens: the gradient of a weight is summed over the "
            f"tokens of a microbatch, which must be a multiple of {MULTIPLE}"
        )


def compute_in_float8(model: nn.Module, gathers: bool) -> None:
    """Have torchao replace the linear layers of the model's blocks, so that the head stays. So do
    layers whose sizes are no multiples of 16, and those that choose experts. With ``gathers``
    weights also travel in float8, as torchao has it.

    Raises:
        ValueError: no layer can be replaced, or there is no torchao.
    """
    if find_spec("torchao") is None:
        raise ValueError("products in float8 need torchao: pip install 'torchao>=0.18'")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    inner = {each for block in find_blocks(model) for each in block.modules()}
    inner -= {
        child
        for each in inner
        if hasattr(each, "experts")
        for name, child in each.named_children()
        if name in ROUTERS
    }
    chosen = {
        each
        for each in inner
        if isinstance(each, nn.Linear)
        and each.in_features % MULTIPLE == each.out_features % MULTIPLE == 0
    }
    if not chosen:
        raise ValueError(
            f"products in float8: no block of {type(model).__name__} has an nn.Linear whose inputs "
            f"and outputs are multiples of {MULTIPLE}"
        )
    convert_to_float8_training(
        model,
        module_filter_fn=lambda layer, name: layer in chosen,
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=gathers),
    )
    chosen.clear()  # torchao's functions refer to each other, and would keep layers until collected


def fused_casts() -> AbstractContextManager[object]:
    """Count each cast of torchao's within as one operation, and those of the same tensor in a
    forward or a backward as one, as ``torch.compile`` makes of them.

    The largest magnitude of a tensor is found where it is computed, which costs nothing; then the
    tensor is read, and a byte written for each element. A weight was gathered and not computed, so
    it is read twice.
    """
    from torchao.float8 import float8_linear, float8_tensor_parallel

    casts, patches = _Casts(), ExitStack()
    for module in (float8_linear, float8_tensor_parallel):
        patches.enter_context(patch.object(module, "hp_tensor_to_float8_dynamic", casts.cast))
    of_gradients: Any = float8_tensor_parallel.NoopFwToFloat8BwDynamic
    patches.enter_context(patch.object(of_gradients, "backward", staticmethod(casts.cast_gradient)))
    return patches


def step_in_float8(step: Step, model: nn.Module, gathers: bool) -> Step:
    """Return ``step`` of a sharded model, after :func:`compute_in_float8`."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    def run() -> None:
        with fused_casts():
            step()
        if gathers:
            precompute_float8_dynamic_scale_for_fsdp(model)

    return run


class _Casts:
    """The casts of a step."""

    def __init__(self) -> None:
        self._in_forward = Kernel()
        self._in_backward = Kernel()
        self._backward = -1
        """Which backward that is."""

    def cast(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        config: Any,
        *,
        gemm_input_role: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Return ``tensor`` in float8, as torchao's function of these arguments does."""
        made: torch.Tensor = _Cast.apply(self, tensor, dtype, config, gemm_input_role)
        return made

    def cast_gradient(self, ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of a product in float8, as torchao casts it before it travels."""
        from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
        from torchao.float8.float8_training_tensor import GemmInputRole

        if not tensor_already_casted_to_fp8(gradient):
            role = GemmInputRole.GRAD_OUTPUT
            gradient = self.run_cast(gradient, ctx.target_dtype, ctx.linear_mm_config, role)
        return gradient, None, None

    def run_cast(
        self, tensor: torch.Tensor, dtype: torch.dtype, config: Any, role: Any
    ) -> torch.Tensor:
        from torchao.float8 import float8_training_tensor as torchaos

        if isinstance(tensor, DTensor):  # of tensor parallelism
            local = self.run_cast(tensor.to_local(), dtype, config, role)
            return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
        is_weight = role is torchaos.GemmInputRole.WEIGHT
        numbers = torch.empty_like(tensor, dtype=dtype)
        scale = torch.empty((), device=tensor.device)
        if self._is_first(tensor, is_weight):
            reads = [tensor, tensor] if is_weight else [tensor]
            active().run(Operation("cast_to_float8", reads, [numbers, scale]))
        made: torch.Tensor = torchaos.Float8TrainingTensor(
            numbers, scale, tensor.dtype, config, role
        )
        return made

    def _is_first(self, tensor: torch.Tensor, is_weight: bool) -> bool:
        backward = current_graph_task_id()
        if backward == -1:
            # The memory of a weight may have been gathered again since.
            return is_weight or self._in_forward.reads(tensor)
        if backward != self._backward:
            self._backward, self._in_backward = backward, Kernel()
        return self._in_backward.reads(tensor)


class _Cast(torch.autograd.Function):
    """A cast, which lets gradients pass."""

    @staticmethod
    def forward(ctx: Any, casts: _Casts, *args: Any) -> torch.Tensor:
        return casts.run_cast(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, gradients[0], None, None, None
