"""What Muon is to do to one parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple, TypeVar

import torch

from fsdp_overlap.optim.matrices import Shared, Stack
from fsdp_overlap.optim.newton_schulz import Polynomial, polynomials
from fsdp_overlap.optim.spans import local_of
from fsdp_overlap.optim.teams import Member
from fsdp_overlap.tensor.placement import is_on_mesh
from fsdp_overlap.tensor.row_tensor import Sharded

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DeviceRate:
    """A learning rate on the device, which the host does not read: captured steps follow it."""

    value: torch.Tensor


@dataclass(frozen=True)
class Settings:
    """The options of a group of parameters, read once in a step."""

    lr: float | DeviceRate
    weight_decay: float
    momentum: float
    nesterov: bool
    steps: tuple[Polynomial, ...]
    eps: float
    matches_adamw: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> Settings:
        lr = group["lr"]
        is_on_device = (
            isinstance(lr, torch.Tensor)
            and lr.device.type != "cpu"
            and all(local_of(parameter).device == lr.device for parameter in group["params"])
        )
        return cls(
            DeviceRate(lr) if is_on_device else float(lr),
            group["weight_decay"],
            group["momentum"],
            group["nesterov"],
            tuple(polynomials(group["ns_coefficients"], group["ns_steps"])),
            group["eps"],
            group["adjust_lr_fn"] == "match_rms_adamw",
        )

    @property
    def decay(self) -> float | torch.Tensor:
        """What weights are multiplied by."""
        lr = self.lr.value if isinstance(self.lr, DeviceRate) else self.lr
        return 1 - lr * self.weight_decay

    def scale(self, matrices: Stack | Shared) -> float:
        """What the learning rate is multiplied by for matrices of this shape, as in torch's
        Muon."""
        if self.matches_adamw:
            return 0.2 * sqrt(max(matrices.rows, matrices.columns))
        return sqrt(max(1, matrices.rows / matrices.columns))


class Update:
    """A parameter that moves along its orthogonalized momentum.

    ``local``, ``gradient`` and ``buffer`` (the momentum) are what this rank holds, flat. Matrices
    are orthogonalized on ``device``, by the ranks of ``member.group``.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        buffer: torch.Tensor,
        settings: Settings,
        member: Member,
    ) -> None:
        assert parameter.grad is not None
        self.parameter = parameter
        self.settings = settings
        self.member = member
        self.local = local_of(parameter).detach().view(-1)
        self.buffer = local_of(buffer).view(-1)
        self.gradient = local_of(parameter.grad).reshape(-1).to(self.buffer.dtype)
        self.device = self.local.device
        if isinstance(parameter, Sharded) and not is_on_mesh(self.local, parameter._spec):
            # This device multiplies faster than the host, and its backend sends the matrices.
            self.device = torch.device(parameter.device_mesh.device_type)


class Part(NamedTuple):
    """Elements ``[first, last)`` of the tile that ``update`` has a range of. This rank holds them,
    and they belong to ``matrices``."""

    update: Update
    matrices: Stack | Shared
    first: int
    last: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """These elements of ``local``, which is what this rank holds."""
        start = self.update.member.start
        return local[self.first - start : self.last - start]


def directions(parts: Sequence[Part]) -> list[torch.Tensor]:
    """The direction in which each part moves, before it is orthogonalized: flat, in the dtype of
    its momentum."""
    found = [part.of(part.update.buffer) for part in parts]
    for settings, indices in _alike(parts, lambda part: part.update.settings):
        if settings.nesterov:
            lerped = torch._foreach_lerp(
                [parts[i].of(parts[i].update.gradient) for i in indices],
                [found[i] for i in indices],
                settings.momentum,
            )
            for i, direction in zip(indices, lerped, strict=True):
                found[i] = direction
    return found


def move(parts: Sequence[Part], values: Sequence[torch.Tensor]) -> None:
    """Moves each part along its ``values``: the elements of its orthogonal matrices, flat."""

    def step(part: Part) -> tuple[float | DeviceRate, float, torch.dtype, torch.device]:
        local, settings = part.update.local, part.update.settings
        return settings.lr, settings.scale(part.matrices), local.dtype, local.device

    for (lr, scale, dtype, device), indices in _alike(parts, step):
        moved = [values[i].to(device, dtype) for i in indices]
        if isinstance(lr, DeviceRate):
            moved = list(torch._foreach_mul(moved, lr.value))
            lr = 1.0
        torch._foreach_add_(
            [parts[i].of(parts[i].update.local) for i in indices], moved, alpha=-(scale * lr)
        )


def _alike(parts: Sequence[Part], kind: Callable[[Part], T]) -> Iterator[tuple[T, list[int]]]:
    """The numbers of the parts of each kind."""
    found: dict[T, list[int]] = {}
    for number, part in enumerate(parts):
        found.setdefault(kind(part), []).append(number)
    yield from found.items()
