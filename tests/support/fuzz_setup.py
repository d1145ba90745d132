"""What a random program trains, and how it is divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, fully_shard
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.layout import plan as planner
from fsdp_overlap.optim import AdamW, Muon
from support.random_models import Built, Experts, Node, TensorAtomic, units_of
from support.twins import NAMES

# A large eps, so that what is zero but for rounding stays small in a step.
OPTIONS: dict[str, Any] = {"lr": 0.02, "eps": 1e-3}
MUON_OPTIONS: dict[str, Any] = {**OPTIONS, "ns_dtype": torch.float64, "adamw": OPTIONS}
OPTIMIZERS = ("AdamW of torch", "AdamW", "Muon")

PLAIN, TENSOR_PARALLELISM, EXPERT_PARALLELISM = "plain", "tensor parallelism", "expert parallelism"


class Meshes(NamedTuple):
    """``data`` is that of the context, `None` if it has the default one. ``tensor`` is that of
    tensor parallelism. Experts are divided among the ranks of ``experts`` and sharded over those of
    ``shards``."""

    data: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    shards: DeviceMesh | None = None


@dataclass(frozen=True)
class Setup:
    """What is trained, and how it is sharded. ``ends``: the embedding and the head are a unit.
    ``mesh``: how many copies, and how many shards. ``device``: the type of the one that it is
    trained on. ``optimizer``: one of `OPTIMIZERS`. Linear layers are divided among ``tensor_ranks``
    by tensor parallelism, and experts among ``expert_ranks``. ``in_pieces``: whether the first unit
    travels in pieces, small as it is. ``casts``: whether inputs of another dtype are cast."""

    node: Node
    prefetch: int
    layout: LayoutRule
    ends: bool = False
    mesh: tuple[int, ...] | None = None
    shard_optimizer_over_replicas: bool = False
    optimizer: str = OPTIMIZERS[0]
    device: str = "cpu"
    tensor_ranks: int = 1
    expert_ranks: int = 1
    in_pieces: bool = False
    casts: bool = False

    @property
    def notes(self) -> list[str]:
        """What a run notes of it, beside the names of operations."""
        divisions = {
            TENSOR_PARALLELISM: self.tensor_ranks > 1,
            EXPERT_PARALLELISM: self.expert_ranks > 1,
        }
        return [self.optimizer, *(name for name, is_so in divisions.items() if is_so)]

    def make_meshes(self) -> Meshes:
        world = dist.get_world_size()
        if self.tensor_ranks > 1:
            sizes = (*(self.mesh or (world // self.tensor_ranks,)), self.tensor_ranks)
            names = (*NAMES, "tensor")[-len(sizes) :]
            mesh = init_device_mesh(self.device, sizes, mesh_dim_names=names)
            return Meshes(data=mesh[names[:-1]], tensor=mesh["tensor"])
        meshes = Meshes()
        if self.mesh is not None:
            data = init_device_mesh(self.device, self.mesh, mesh_dim_names=NAMES)
            meshes = meshes._replace(data=data)
        if self.expert_ranks > 1:
            sizes = (world // self.expert_ranks, self.expert_ranks)
            mesh = init_device_mesh(self.device, sizes, mesh_dim_names=("shard", "expert"))
            meshes = meshes._replace(experts=mesh["expert"], shards=mesh["shard"])
        return meshes

    def make_context(self, meshes: Meshes) -> FsdpContext:
        return FsdpContext(
            meshes.data,
            prefetch=self.prefetch,
            layout=self.layout,
            shard_optimizer_over_replicas=self.shard_optimizer_over_replicas,
        )

    def shard(self, model: TensorAtomic, ctx: FsdpContext, meshes: Meshes) -> None:
        least = 1 if self.in_pieces else planner.MIN_SHARD_BYTES
        with patch.object(planner, "MIN_SHARD_BYTES", least):
            self._shard(model, ctx, meshes)

    def _shard(self, model: TensorAtomic, ctx: FsdpContext, meshes: Meshes) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.float64 if self.casts else None)
        for module in model.tree.modules():
            if isinstance(module, Built) and module.node.kind == "linear" and meshes.tensor:
                parallelize(module, meshes.tensor)
            if isinstance(module, Experts) and meshes.experts:
                module.divide(meshes.experts)
                fully_shard(module, ctx, mesh=meshes.shards, mp_policy=policy)
                module.set_gradient_divide_factor(dist.get_world_size())  # type: ignore[operator]
        for module in units_of(model.tree):
            fully_shard(module, ctx, mp_policy=policy)
        if self.ends:
            fully_shard([model.embedding, model.head], ctx, mp_policy=policy)
        fully_shard(model, ctx, mp_policy=policy)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "Muon":
            return Muon(model, **MUON_OPTIONS, prefetch_next_forward=True)
        if self.optimizer == "AdamW":
            return AdamW(model.parameters(), **OPTIONS, prefetch_next_forward=True)
        return torch.optim.AdamW(model.parameters(), **OPTIONS)

    def make_twin_optimizer(self, twin: nn.Module) -> torch.optim.Optimizer:
        """Return torch's, where it has one for a whole model."""
        if self.optimizer == "Muon":
            return Muon(twin, **MUON_OPTIONS)
        return torch.optim.AdamW(twin.parameters(), **OPTIONS)


def parallelize(module: nn.Module, mesh: DeviceMesh) -> None:
    trainable = [parameter.requires_grad for parameter in module.parameters()]
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for parameter, requires_grad in zip(module.parameters(), trainable, strict=True):
        parameter.requires_grad_(requires_grad)
