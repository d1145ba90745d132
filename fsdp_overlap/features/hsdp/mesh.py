"""Meshes with replicas: ``(replicate, shard)``."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.features.hsdp.groups import ReplicatedGroups, replicated_groups
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.tensor.ragged_dtensor import RaggedShard


class ReplicatedMeshInfo(MeshInfo):
    """A mesh ``(replicate, shard)``: parameters are sharded along its second dimension, with
    replicas along the first. ``shards_replicas``: whether the ranks that hold replicas of a shard
    divide it. They are neighbors in plans then.

    Raises:
        ValueError: parameters cannot be sharded over ``mesh`` (:func:`check_mesh`).
    """

    def __init__(self, mesh: DeviceMesh, *args: Any, shards_replicas: bool) -> None:
        check_mesh(mesh, shards_replicas)
        self.num_replicas = mesh.size(0)
        self.shards_replicas = shards_replicas and self.num_replicas > 1
        super().__init__(mesh, *args)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        mesh = self.mesh
        if mesh.mesh_dim_names is not None:
            return mesh[mesh.mesh_dim_names[-1]]
        return DeviceMesh.from_group(mesh.get_group(-1), mesh.device_type)

    @cached_property
    def tensor_mesh(self) -> DeviceMesh:
        """:attr:`mesh`, flattened if shards are divided over replicas."""
        return self.mesh._flatten() if self.shards_replicas else self.mesh

    def make_groups(self, separate: bool) -> ReplicatedGroups:
        return replicated_groups(self.group_cache, self.mesh, separate)

    def find_places(self) -> None:
        self.num_places = self.shard_size = self.mesh.size(1)
        self.plan_rank = self.shard_rank = self.mesh.get_local_rank(1)
        if self.shards_replicas:
            self.num_places *= self.num_replicas
            self.plan_rank = self.plan_rank * self.num_replicas + self.mesh.get_local_rank(0)

    @cached_property
    def _replica_ranks(self) -> list[int]:
        """For each place in plans, the rank in the group of :attr:`tensor_mesh` that has it. The
        two orders differ: neighbors in plans hold parts of one shard, neighbors in the mesh hold
        shards of one copy."""
        mesh = self.mesh.mesh
        places = mesh.argsort(1).argsort(1) * self.num_replicas + mesh.argsort(0).argsort(0)
        rank_at = dict(zip(places.flatten().tolist(), mesh.flatten().tolist(), strict=True))
        ranks = dist.get_process_group_ranks(self.tensor_mesh.get_group())
        return [ranks.index(rank_at[place]) for place in range(len(ranks))]

    def range_shard(self, plan: ParamGroupPlan, fqn: str) -> RaggedShard:
        if not self.shards_replicas:
            return super().range_shard(plan, fqn)
        ranges = plan.ranges(fqn)
        return RaggedShard(
            tuple((self._replica_ranks[rank], start, stop) for rank, start, stop in ranges)
        )

    def placements(self, placement: Placement) -> tuple[Placement, ...]:
        return (Replicate(), placement) if self.tensor_mesh.ndim == 2 else (placement,)


def check_mesh(mesh: DeviceMesh, shards_replicas: bool) -> None:
    """Raise ValueError if ``mesh`` has more than two dimensions, its rows order their ranks
    differently, or replicas share to be shards and its dimensions have no names."""
    if mesh.ndim > 2:
        raise ValueError(
            f"parameters are sharded over a mesh of one dimension, or of two, (replicate, shard); "
            f"got {mesh.ndim}, {mesh.mesh_dim_names or tuple(mesh.shape)}: pass the data-parallel "
            "ones, as mesh['replicate', 'shard']"
        )
    order = mesh.mesh.argsort(mesh.ndim - 1)
    if not bool((order == order[0]).all()):
        raise ValueError(
            "the ranks that hold replicas of a shard must have the same place in their rows of the "
            f"mesh, and torch sorts the ranks of each row; got {mesh.mesh.tolist()}: order the "
            "ranks of every row alike"
        )
    if shards_replicas and not mesh.mesh_dim_names:
        raise ValueError(
            "shard_optimizer_over_replicas needs a mesh with names, as init_device_mesh('cuda', "
            "(2, 4), mesh_dim_names=('replicate', 'shard'))"
        )
