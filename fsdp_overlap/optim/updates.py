"""Muon's update of parameters: momentum, direction, learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple, TypeVar

import torch

from fsdp_overlap.optim.contiguous import compute_device, local_of
from fsdp_overlap.optim.matrices import MatrixBatch, MatrixChunk, SharedMatrices
from fsdp_overlap.optim.newton_schulz import Polynomial, polynomials
from fsdp_overlap.optim.owner_groups import Ownership

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DeviceRate:
    """A learning rate on the device, which the host does not read, so that captured steps follow
    it."""

    value: torch.Tensor


@dataclass(frozen=True)
class MuonSettings:
    """The options of a param group, read once in a step."""

    lr: float | DeviceRate
    weight_decay: float
    momentum: float
    nesterov: bool
    steps: tuple[Polynomial, ...]
    eps: float
    match_rms_adamw: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> MuonSettings:
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
        """The factor of weight decay."""
        lr = self.lr.value if isinstance(self.lr, DeviceRate) else self.lr
        return 1 - lr * self.weight_decay

    def lr_ratio(self, matrices: MatrixBatch | SharedMatrices) -> float:
        """Return the factor of the learning rate for matrices of this shape, as in torch's Muon."""
        if self.match_rms_adamw:
            return 0.2 * sqrt(max(matrices.rows, matrices.columns))
        return sqrt(max(1, matrices.rows / matrices.columns))


class Update:
    """The update of one parameter by its orthogonalized momentum.

    ``local``, ``gradient`` and ``buffer`` (the momentum) are this rank's shards, flat. Matrices are
    orthogonalized on ``device``, by the ranks of ``ownership.owner_group``.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        buffer: torch.Tensor,
        settings: MuonSettings,
        ownership: Ownership,
    ) -> None:
        assert parameter.grad is not None
        self.parameter = parameter
        self.settings = settings
        self.ownership = ownership
        self.local = local_of(parameter).detach().view(-1)
        self.buffer = local_of(buffer).view(-1)
        self.gradient = local_of(parameter.grad).reshape(-1).to(self.buffer.dtype)
        self.device = compute_device(parameter)


class UpdateSlice(NamedTuple):
    """Elements ``[first, last)`` of the flattened tile, which this rank holds, and which belong to
    ``matrices``."""

    update: Update
    matrices: MatrixBatch | SharedMatrices
    first: int
    last: int

    def view_of(self, local: torch.Tensor) -> torch.Tensor:
        """Return these elements of ``local``, this rank's shard of the parameter or a state."""
        start = self.update.ownership.start
        return local[self.first - start : self.last - start]


@dataclass(frozen=True, eq=False)
class Task:
    """Matrices to orthogonalize: the chunks that this rank holds (``own``), those that came from
    other ranks (``received``), and those for which other ranks wait (``results``)."""

    matrices: MatrixBatch | SharedMatrices
    settings: MuonSettings
    own: list[tuple[UpdateSlice, MatrixChunk]] = field(default_factory=list)
    received: list[tuple[torch.Tensor, MatrixChunk]] = field(default_factory=list)
    results: list[tuple[torch.Tensor, MatrixChunk]] = field(default_factory=list)

    @property
    def is_tall(self) -> bool:
        return self.matrices.rows > self.matrices.columns


def momentum_directions(slices: Sequence[UpdateSlice]) -> list[torch.Tensor]:
    """Return the direction of each slice before it is orthogonalized: flat, in the dtype of its
    momentum."""
    directions = [part.view_of(part.update.buffer) for part in slices]
    for settings, indices in _grouped(slices, lambda part: part.update.settings):
        if settings.nesterov:
            lerped = torch._foreach_lerp(
                [slices[i].view_of(slices[i].update.gradient) for i in indices],
                [directions[i] for i in indices],
                settings.momentum,
            )
            for i, direction in zip(indices, lerped, strict=True):
                directions[i] = direction
    return directions


def move(slices: Sequence[UpdateSlice], values: Sequence[torch.Tensor]) -> None:
    """Update each slice by its ``values``: the elements of its orthogonal matrices, flat."""

    def step(part: UpdateSlice) -> tuple[float | DeviceRate, float, torch.dtype, torch.device]:
        local, settings = part.update.local, part.update.settings
        return settings.lr, settings.lr_ratio(part.matrices), local.dtype, local.device

    for (lr, ratio, dtype, device), indices in _grouped(slices, step):
        moved = [values[i].to(device, dtype) for i in indices]
        if isinstance(lr, DeviceRate):
            moved = list(torch._foreach_mul(moved, lr.value))
            lr = 1.0
        torch._foreach_add_(
            [slices[i].view_of(slices[i].update.local) for i in indices], moved, alpha=-(ratio * lr)
        )


def _grouped(
    slices: Sequence[UpdateSlice], key: Callable[[UpdateSlice], T]
) -> Iterator[tuple[T, list[int]]]:
    """Yield the indices of the slices of each key."""
    groups: dict[T, list[int]] = {}
    for index, part in enumerate(slices):
        groups.setdefault(key(part), []).append(index)
    yield from groups.items()
