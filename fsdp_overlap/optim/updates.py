"""What Muon is to do to one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.optim.matrices import Ranges, Stack, divide
from fsdp_overlap.optim.newton_schulz import Polynomial, polynomials
from fsdp_overlap.optim.runs import local_of
from fsdp_overlap.tensor.placement import is_on_mesh
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Settings:
    """The options of a group of parameters, read once in a step."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    steps: tuple[Polynomial, ...]
    eps: float
    matches_adamw: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> Settings:
        return cls(
            float(group["lr"]),
            group["weight_decay"],
            group["momentum"],
            group["nesterov"],
            tuple(polynomials(group["ns_coefficients"], group["ns_steps"])),
            group["eps"],
            group["adjust_lr_fn"] == "match_rms_adamw",
        )

    def step_size(self, stack: Stack) -> float:
        """The learning rate for matrices of this shape, as in torch's Muon."""
        if self.matches_adamw:
            return 0.2 * sqrt(max(stack.rows, stack.columns)) * self.lr
        return sqrt(max(1, stack.rows / stack.columns)) * self.lr


class Update:
    """A parameter that moves along its orthogonalized momentum.

    ``local``, ``gradient`` and ``buffer`` (the momentum) are what this rank holds, flat. Matrices
    are orthogonalized on ``device``.
    """

    def __init__(
        self, parameter: torch.Tensor, buffer: torch.Tensor, split: Any, settings: Settings
    ) -> None:
        assert parameter.grad is not None
        self.settings = settings
        self.group: dist.ProcessGroup | None = None
        self._start = 0
        ranges: Ranges = ((0, 0, parameter.numel()),)
        if isinstance(parameter, ShardedTensor):
            self.group = parameter.range_group
            self._start = parameter.local_range[0]
            ranges = parameter.placement.ranges
        self.local = local_of(parameter).detach().view(-1)
        self.buffer = local_of(buffer).view(-1)
        self.gradient = local_of(parameter.grad).reshape(-1).to(self.buffer.dtype)
        self.device = self.local.device
        if isinstance(parameter, ShardedTensor) and not is_on_mesh(self.local, parameter._spec):
            # This device multiplies faster than the host, and its backend sends the matrices.
            self.device = torch.device(parameter.device_mesh.device_type)
        self.division = divide(tuple(parameter.shape), split, ranges)

    def read(self, first: int, last: int) -> torch.Tensor:
        """Elements ``[first, last)`` of the direction, before it is orthogonalized."""
        part = slice(first - self._start, last - self._start)
        if not self.settings.nesterov:
            return self.buffer[part]
        return self.gradient[part].lerp(self.buffer[part], self.settings.momentum)

    def write(self, stack: Stack, first: int, last: int, values: torch.Tensor) -> None:
        """Moves elements ``[first, last)`` of the parameter. ``values`` are these elements of the
        orthogonal matrices, and ``stack`` says the shape of the matrices."""
        part = self.local[first - self._start : last - self._start].view(values.shape)
        part.add_(values.to(part.device), alpha=-self.settings.step_size(stack))
