"""A model whose parameters are DTensors over a mesh of all parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

# Uneven over the ranks of data parallelism.
WIDTH, HIDDEN, LENGTH, BATCH = 6, 10, 4, 8


class Layer(nn.Module):
    """Its first matrix is cut by columns over tensor parallelism, its second by rows. The scale is
    applied to a part of the sequence, so its gradient is a part of a sum there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 1)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.randn(HIDDEN))
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = placed(placed(x, Shard(1)) * self.scale, Replicate())
        hidden = torch.tanh(scaled @ self.up.t() + self.bias)
        return x + placed(hidden @ self.down.t(), Replicate())


CUTS = {"up": Shard(0), "bias": Shard(0), "down": Shard(1)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.head).sum(-1)


def plain() -> Model:
    torch.manual_seed(3)
    return Model().double()


def placed(x: torch.Tensor, along_tp: Placement) -> torch.Tensor:
    """Return ``x`` with another placement along tensor parallelism, if it has that."""
    if not isinstance(x, DTensor) or "tp" not in (x.device_mesh.mesh_dim_names or ()):
        return x
    dim = x.device_mesh.mesh_dim_names.index("tp")
    return x.redistribute(placements=[*x.placements[:dim], along_tp, *x.placements[dim + 1 :]])


def distributed(mesh: DeviceMesh) -> Model:
    """Return the model over all of ``mesh``, as tensor parallelism and nothing else cuts it."""
    model = plain()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            assert parameter is not None
            placements = [
                CUTS.get(name, Replicate()) if dim == "tp" else Replicate()
                for dim in mesh.mesh_dim_names or ()
            ]
            spread = distribute_tensor(parameter.detach(), mesh, placements)
            module._parameters[name] = nn.Parameter(spread)
    return model


def loss_of(model: nn.Module, mesh: DeviceMesh | None, data: DeviceMesh, step: int) -> Any:
    """Return the loss on this rank's rows, or on all without a ``mesh``."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    if mesh is None:
        return model(batch).square().mean()
    coordinate, rank = data.get_coordinate(), 0
    for place, size in zip(coordinate or (), data.shape, strict=True):
        rank = rank * size + place
    own = batch.chunk(data.size())[rank]
    # Each rank's rows are its own, and those of tensor parallelism are the same.
    names = mesh.mesh_dim_names or ()
    cut = [Replicate() if name == "tp" else Shard(0) for name in names]
    out = model(DTensor.from_local(own, mesh, cut))
    return out.to_local().square().mean()


def shard(model: Model, with_: Callable[..., Any]) -> Any:
    for layer in model.layers:
        with_(layer)
    with_(model)
    return model
