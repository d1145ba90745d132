"""Expert parallelism: experts sharded over a mesh of their own, in one context with the rest."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.comm import process_groups
from fsdp_overlap.optim import AdamW
from support.experts import ROWS, WIDTH, Moe, compare, meshes, shard, train
from support.ranks import run_ranks


@pytest.mark.parametrize("with_dtensors", [False, True])
@pytest.mark.parametrize("layout_is_whole", [False, True])
def test_experts_train_as_the_unsharded_model_does(
    layout_is_whole: bool, with_dtensors: bool
) -> None:
    run_ranks(train, 4, layout_is_whole, with_dtensors)


def save_and_load(path: str, sizes: Sequence[int]) -> None:
    """Saved by one division of the experts, loaded by the next, which trains on."""
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    twin = Moe(None)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(4)
    for index, size in enumerate(sizes):
        grid = init_device_mesh("cpu", (4 // size, size), mesh_dim_names=("shard", "ep"))
        model = Moe(grid["ep"], with_dtensors=True)
        shard(model, whole, grid["shard"], FsdpContext(whole))
        optimizer = AdamW(model.parameters(), lr=0.05)
        if index:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=f"{path}/{index - 1}")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        compare(model, twin, grid["ep"], of_gradients=False)
        x = torch.randn(4, ROWS, WIDTH, generator=generator, dtype=torch.double)
        model(x[dist.get_rank()]).square().mean().backward()
        torch.stack([twin(rows).square().mean() for rows in x]).mean().backward()
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
        compare(model, twin, grid["ep"], of_gradients=False)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(saved, checkpoint_id=f"{path}/{index}")


def test_the_number_of_experts_on_a_rank_may_change_between_save_and_load(tmp_path: Path) -> None:
    run_ranks(save_and_load, 4, str(tmp_path), (2, 4, 1, 2))


def against_fsdp2() -> None:
    whole, shards, ep = meshes()
    found = []
    for shard_one in (fully_shard, torch_fully_shard):
        model = Moe(ep)
        for layer in model:
            shard_one(layer.experts, mesh=shards)
            layer.experts.set_gradient_divide_factor(whole.size())
            shard_one(layer, mesh=whole)
        shard_one(model, mesh=whole)
        x = torch.ones(ROWS, WIDTH, dtype=torch.double) * dist.get_rank()
        for _ in range(2):
            model(x).square().mean().backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_gradients_equal_fsdp2s() -> None:
    run_ranks(against_fsdp2, 4)


def groups_and_comm_streams() -> None:
    whole, shards, ep = meshes()
    model = Moe(ep)
    ctx = FsdpContext(whole)
    shard(model, whole, shards, ctx)
    made: list[list[int]] = []
    make = process_groups.make_group

    def counted(name: str, ranks: list[int], *options: Any) -> dist.ProcessGroup:
        made.append(ranks)
        return make(name, ranks, *options)

    with patch.object(process_groups, "make_group", counted):
        for _ in range(2):
            model(torch.ones(ROWS, WIDTH, dtype=torch.double)).sum().backward()
    # Two for each set, one to gather and one to reduce.
    shards_here = [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    assert made == [shards_here] * 2 + [[0, 1, 2, 3]] * 2
    assert len(ctx.mesh_infos) == 2
    assert ctx.stats.order_checks == 4


def test_groups_are_made_once_for_each_set_of_ranks() -> None:
    run_ranks(groups_and_comm_streams, 4)


def only_some_ranks() -> None:
    """A unit on ranks 0 and 1 alone, beside one of all. Every rank runs every unit of a context, so
    it has a context of its own."""
    ctx = FsdpContext(init_device_mesh("cpu", (4,)))
    torch.manual_seed(2)
    dense, extra = nn.Linear(4, 4), nn.Linear(4, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    fully_shard(dense, ctx)
    has_extra = dist.get_rank() < 2
    if has_extra:
        fully_shard(extra, FsdpContext(mesh))
    x = torch.full((1, 4), float(dist.get_rank()))
    for _ in range(3):
        out = dense(x)
        (extra(out) if has_extra else out).sum().backward()
    assert ctx.stats.current_full_buffers == 0
    # A group that the user makes afterwards, with all ranks, is the same on all.
    dist.barrier(dist.new_group([0, 1, 2, 3]))
    if has_extra:
        assert extra.bias.grad is not None
        assert torch.equal(extra.bias.grad.full_tensor(), torch.full((4,), 3.0))


def test_not_every_rank_needs_to_take_part_in_a_submesh() -> None:
    run_ranks(only_some_ranks, 4)


def makes_groups() -> None:
    torch.manual_seed(0)
    fully_shard(nn.Linear(4, 4))(torch.ones(1, 4)).sum().backward()


def a_fresh_process(folder: str) -> None:
    """Rank 1 joins the next process group from a process that has made no groups before."""
    makes_groups()
    rank = dist.get_rank()
    dist.destroy_process_group()
    code = "import sys; sys.path[:] = eval(sys.argv[1]); import test_experts; test_experts.joins("
    command = [sys.executable, "-c", f"{code}{folder!r}, 1)", repr(sys.path)]
    if rank:
        subprocess.run(command, check=True, timeout=50)
    else:
        joins(folder, 0)


def joins(folder: str, rank: int) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=45)
    )
    makes_groups()


@pytest.mark.slow
def test_groups_are_made_together_with_ranks_that_are_fresh_processes(tmp_path: Path) -> None:
    run_ranks(a_fresh_process, 2, str(tmp_path))


def different_experts() -> None:
    """Rank 2 alone runs the experts in another order, before a unit that ranks 1 and 3, whose
    experts are others, share with it."""
    whole, shards, _ = meshes()
    ctx = FsdpContext(whole)
    experts = [fully_shard(nn.Linear(4, 4), ctx, mesh=shards) for _ in range(2)]
    dense = fully_shard(nn.Linear(4, 4), ctx)
    if dist.get_rank() == 2:
        experts.reverse()
    first, second = experts
    dense(second(first(torch.ones(1, 4)))).sum().backward()


def expect_different_experts() -> None:
    said = r"rank 0: all_gather of unit 'Linear\[0\]'; rank 2: all_gather of unit 'Linear\[1\]'"
    if dist.get_rank() % 2:  # whose experts agree
        said = f"rank [02] ended: ranks ran different units.*{said}"
    with pytest.raises(RuntimeError, match=said):
        different_experts()


def test_experts_that_differ_among_their_ranks_get_an_error() -> None:
    run_ranks(expect_different_experts, 4)


class Mixed(nn.Module):
    """Parameters of both meshes in one unit."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.dense(x)))


def meshes_by_parameter() -> None:
    """FSDP2's ``shard_placement_fn``, which gives parameters a mesh."""
    api = "torch.distributed.fsdp._fully_shard._fsdp_common"
    common = pytest.importorskip(api)
    if not hasattr(common, "ShardPlacementResult"):  # torch 2.11
        return
    whole, shards, _ = meshes()
    found = []
    for shard_one in (fully_shard, torch_fully_shard):
        model = Mixed()
        experts = set(model.expert.parameters())
        info = common.FSDPMeshInfo(mesh=shards, shard_mesh_dim=0)
        dense = common.FSDPMeshInfo(mesh=whole, shard_mesh_dim=0)

        def place(parameter: nn.Parameter, experts=experts, info=info, dense=dense) -> object:
            mesh_info = info if parameter in experts else dense
            return common.ShardPlacementResult(placement=Shard(0), mesh_info=mesh_info)

        shard_one(model, mesh=whole, shard_placement_fn=place)
        assert model.expert.weight.device_mesh.size() == 2
        assert model.dense.weight.device_mesh.size() == 4
        copied = copy.deepcopy(model) if shard_one is fully_shard else model
        for each in {model, copied}:
            x = torch.ones(ROWS, WIDTH, dtype=torch.double) * dist.get_rank()
            each(x).square().mean().backward()
            found.append([parameter.grad.full_tensor() for parameter in each.parameters()])
    for ours, copied, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(copied, theirs, rtol=1e-9, atol=1e-12)


def test_a_unit_may_have_parameters_of_several_meshes() -> None:
    run_ranks(meshes_by_parameter, 4)
