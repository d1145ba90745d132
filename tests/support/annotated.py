"""Plain tiles of parameters with notes of what they are tiles of, as ``spmd_types`` writes them.

The package has an environment of its own, with torchtitan, whose tests train with its real notes.
Here stands what the library reads of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

WIDTH, HIDDEN = 6, 8


class Kind(Enum):
    R = "R"
    I = "I"  # noqa: E741
    V = "V"


@dataclass(frozen=True)
class Cut:
    """What the package calls ``Shard``."""

    dim: int


@contextmanager
def annotations() -> Iterator[None]:
    """Have the library find a package ``spmd_types`` inside the ``with`` block."""
    of = SimpleNamespace(of=lambda group: tuple(dist.get_process_group_ranks(group)))
    package: Any = SimpleNamespace(
        R=Kind.R,
        I=Kind.I,
        Shard=Cut,
        MeshAxis=of,
        get_local_type=lambda parameter: getattr(parameter, "_kinds", {}),
        get_partition_spec=lambda parameter: getattr(parameter, "_cuts", None),
        types=SimpleNamespace(partition_spec_to_shard_types=dict),
    )
    sys.modules["spmd_types"] = package
    try:
        yield
    finally:
        del sys.modules["spmd_types"]


def annotate(parameter: nn.Parameter, mesh: DeviceMesh, kinds: Mapping[str, Kind | Cut]) -> None:
    """Note the kind of ``parameter`` along dimensions of ``mesh``, by their names. A cut is noted
    as varying, and apart as what it is."""
    noted: Any = parameter
    axes = {name: tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in kinds}
    cuts = {axes[name]: kind for name, kind in kinds.items() if isinstance(kind, Cut)}
    noted._kinds = {axes[name]: Kind.V if axes[name] in cuts else kinds[name] for name in kinds}
    noted._cuts = cuts or None


class Enter(torch.autograd.Function):
    """The same on all ranks of tensor parallelism, each of which uses it for a part of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return collectives.all_reduce(gradient, "sum", ctx.group), None


class Leave(torch.autograd.Function):
    """The sum of what these ranks have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class Layer(nn.Module):
    """Two matrices with a scale before tensor parallelism begins and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.rand(WIDTH) + 1)
        self.after = nn.Parameter(torch.rand(WIDTH) + 1)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.group: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x * self.before
        if self.group is not None:
            inner = Enter.apply(inner, self.group)
        out = torch.tanh((inner * self.after) @ self.up.t()) @ self.down.t()
        return x + (out if self.group is None else Leave.apply(out, self.group))


KINDS: dict[str, Kind | Cut] = {
    "before": Kind.I,
    "after": Kind.R,
    "up": Cut(0),
    "down": Cut(-1),
}


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Layer().double() for _ in range(2)))


def cut(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Leave each rank its tiles, annotated along the dimension ``tp``."""
    for layer in model:
        assert isinstance(layer, Layer)
        layer.group = mesh.get_group("tp").group_name
        for name, kind in KINDS.items():
            whole = layer.get_parameter(name).detach()
            if isinstance(kind, Cut):
                whole = whole.chunk(mesh["tp"].size(), kind.dim)[mesh["tp"].get_local_rank()]
            tile = nn.Parameter(whole.clone(memory_format=torch.contiguous_format))
            annotate(tile, mesh, {"dp": Kind.R, "tp": kind})
            layer._parameters[name] = tile
    return model
