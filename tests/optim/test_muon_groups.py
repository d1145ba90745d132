"""The process groups that Muon's matrices travel on."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.comm.process_groups import group_timeout
from fsdp_overlap.optim import Muon, muon
from fsdp_overlap.optim.owner_groups import OwnerGroups
from support.lagging import BACKEND as LAGGING
from support.lagging import LaggingGroup
from support.ranks import run_ranks
from support.twins import same


def on_a_grid(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group for a matrix that lies over both dimensions of ``mesh``."""
    tiles = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)], src_data_rank=None)
    model = nn.ParameterList([nn.Parameter(tiles)])
    fully_shard(model, FsdpContext(mesh["dp"]))
    groups = OwnerGroups("Muon")
    groups.add([(model[0], 1)])
    owner_group = groups.ownership_of(model[0]).owner_group
    assert owner_group is not None
    return owner_group.group


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


def test_an_owner_group_of_several_dimensions_has_the_timeout_of_the_mesh() -> None:
    run_ranks(facts_of_the_mesh, 4)


def options_of_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shards: Any = mesh.get_group("dp")
    shards.options.max_ctas = 4
    group = on_a_grid(mesh)
    assert isinstance(group, LaggingGroup)
    assert group.given.max_ctas == 4
    assert group.given is not shards.options


def test_an_owner_group_of_several_dimensions_has_the_options_of_the_mesh() -> None:
    run_ranks(options_of_the_mesh, 4, backend=LAGGING)


def apart_at_reset() -> None:
    """A group that cannot be closed. One rank has issued more on it than the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tiles = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)], src_data_rank=None)
    model = nn.ParameterList([nn.Parameter(tiles)])
    ctx = FsdpContext(mesh["dp"])
    fully_shard(model, ctx)
    groups = OwnerGroups("Muon")

    def group() -> LaggingGroup:
        groups.drop_ended()
        groups.add([(model[0], 1)])
        owner_group = groups.ownership_of(model[0]).owner_group
        assert owner_group is not None
        assert isinstance(owner_group.group, LaggingGroup)
        return owner_group.group

    first = group()
    ctx.reset()
    assert group() is first
    LaggingGroup.patience = timedelta(seconds=0.3)
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(1), group=first, group_src=1)
    LaggingGroup.patience = None
    ctx.reset()
    assert first.aborted
    assert group() is not first


def test_a_reset_replaces_a_group_on_which_ranks_are_apart() -> None:
    run_ranks(apart_at_reset, 4, backend=LAGGING)


# ---- the order of several owner groups ----


def in_a_ring() -> None:
    """Four ranks and four owner groups: each rank is in two, with one neighbour each. If a rank
    took its groups in another order than the others, each would wait for the next."""
    rank = dist.get_rank()
    mine, twins, owner_groups = [], [], []
    for first in range(4):
        ranks = sorted((first, (first + 1) % 4))
        group = dist.new_group(ranks)
        torch.manual_seed(first)
        layer = nn.Linear(6, 8, bias=False).double()
        if rank not in ranks:
            continue
        owner_groups.append(ranks)
        twins.append(copy.deepcopy(layer))
        mesh = DeviceMesh.from_group(group, "cpu")
        mine.append(fully_shard(layer, FsdpContext(mesh)))
    optimizer, twin_optimizer = (
        Muon([layer.weight for layer in layers], lr=0.05, ns_dtype=torch.float64)
        for layers in (mine, twins)
    )
    for _ in range(2):
        for layer, twin in zip(mine, twins, strict=True):
            layer.weight.grad = layer.weight.detach() * 3
            twin.weight.grad = twin.weight.detach() * 3
        with patch.object(Muon, "_exchanges", autospec=True, side_effect=Muon._exchanges) as begun:
            optimizer.step()
        # One order for all ranks: that of the parameters.
        assert [call.args[1].ranks for call in begun.call_args_list] == owner_groups
        twin_optimizer.step()
        for layer, twin in zip(mine, twins, strict=True):
            whole: Any = layer.weight
            same(whole.full_tensor(), twin.weight, "weight")


def test_owner_groups_that_have_ranks_in_common_exchange_in_one_order() -> None:
    run_ranks(in_a_ring, 4, timeout=20)


# ---- what the user changes between steps ----


def split_anew(placement: Placement) -> None:
    """Each split asks for another owner group: along one dimension of the mesh, or along both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = torch.randn(8, 6, generator=torch.Generator().manual_seed(5)).double()
    tiles = distribute_tensor(value, mesh["tp"], [placement], src_data_rank=None)
    model, twin = (nn.ParameterList([nn.Parameter(each)]) for each in (tiles, value.clone()))
    fully_shard(model, FsdpContext(mesh["dp"]))
    options: dict[str, Any] = {"lr": 0.05, "ns_dtype": torch.float64}
    optimizer = Muon(model.parameters(), **options)
    weight: Any = model[0]
    momentum = torch.zeros_like(twin[0])
    for split in (1, 2, (3, 5), 4, 1):
        optimizer.param_groups[0]["split"] = split
        weight.grad, twin[0].grad = weight.detach() * 3, twin[0].detach() * 3
        optimizer.step()
        # The twin's optimizer is a new one each time, and has never known another split.
        fresh = Muon([{"params": [twin[0]], "split": split}], **options)
        fresh.state[twin[0]]["momentum_buffer"] = momentum
        fresh.step()
        momentum = fresh.state[twin[0]]["momentum_buffer"]
        same(weight.full_tensor(), twin[0], f"weight after a step with split={split}")


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_split_may_be_changed_between_steps(placement: Placement) -> None:
    run_ranks(split_anew, 4, placement)


# ---- parameters that no context shards ----


def without_a_context(fails: bool) -> None:
    """Tensors that were distributed by hand. A step that fails leaves the groups as they were, or
    new ones are taken."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    value = torch.randn(8, 6, generator=torch.Generator().manual_seed(5)).double()
    ranges = fully_shard(nn.ParameterList([value.clone()]), FsdpContext(mesh))[0].detach()
    weight, twin = nn.Parameter(ranges.clone()), nn.Parameter(value.clone())
    optimizer, twin_optimizer = (
        Muon([each], lr=0.05, ns_dtype=torch.float64) for each in (weight, twin)
    )
    for step in range(3):
        for each in (weight, twin):
            each.grad = each.detach() * 3
        if fails and step == 1:
            raising = patch.object(muon, "run_rounds", side_effect=ArithmeticError("planned"))
            saved = [weight.detach().clone(), optimizer.state[weight]["momentum_buffer"].clone()]
            with raising, pytest.raises(ArithmeticError):
                optimizer.step()
            with torch.no_grad():
                weight.copy_(saved[0])
                optimizer.state[weight]["momentum_buffer"].copy_(saved[1])
        optimizer.step()
        twin_optimizer.step()
        whole: Any = weight
        same(whole.full_tensor(), twin, "weight")


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_that_no_context_shards(fails: bool) -> None:
    run_ranks(without_a_context, 4, fails)
