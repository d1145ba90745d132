"""The process groups that Muon's matrices travel on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.comm.group_facts import group_timeout
from fsdp_overlap.optim.teams import Teams
from support.lagging import BACKEND as LAGGING
from support.lagging import LaggingGroup
from support.ranks import run_ranks


def on_a_grid(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of the team of a matrix that lies over both dimensions of ``mesh``."""
    tiles = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)], src_data_rank=None)
    model = nn.ParameterList([nn.Parameter(tiles)])
    fully_shard(model, FsdpContext(mesh["dp"]))
    teams = Teams(None)
    teams.join([(model[0], 1)])
    group = teams.member(model[0]).group
    assert group is not None
    return group


def facts_of_the_mesh() -> None:
    """The mesh's groups have another timeout than the default group."""
    minute = timedelta(minutes=1, seconds=dist.get_world_size())
    grid = torch.arange(4).view(2, 2)
    groups = []
    for rows in (grid.mT, grid):
        made = [dist.new_group(row.tolist(), timeout=minute) for row in rows]
        groups.append(made[int(dist.get_rank() in rows[1])])
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=grid, mesh_dim_names=("dp", "tp"))
    group = on_a_grid(mesh)
    assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
    assert group_timeout(group, "cpu") == minute
    plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = on_a_grid(plain)
    assert group_timeout(other, "cpu") == group_timeout(plain.get_group("dp"), "cpu") != minute


def test_a_team_of_several_dimensions_has_the_timeout_of_the_mesh() -> None:
    run_ranks(facts_of_the_mesh, 4)


def options_of_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shards: Any = mesh.get_group("dp")
    shards.options.max_ctas = 4
    group = on_a_grid(mesh)
    assert isinstance(group, LaggingGroup)
    assert group.given.max_ctas == 4
    assert group.given is not shards.options


def test_a_team_of_several_dimensions_has_the_options_of_the_mesh() -> None:
    run_ranks(options_of_the_mesh, 4, backend=LAGGING)
