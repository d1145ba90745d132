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
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_overlap import FsdpContext, ShardedTensor, fully_shard
from fsdp_overlap.comm import pool
from fsdp_overlap.layout import Whole
from fsdp_overlap.optim import AdamW, clip_grad_norm_
from support.ranks import run_ranks
from support.twins import same

EXPERTS = 4
WIDTH = 6
ROWS = 8


class Experts(nn.Module):
    """``weight[e]`` for each of this rank's experts, of ``EXPERTS`` in all, plain or a DTensor of
    all. Token ``i`` goes to expert ``i % EXPERTS``: each rank of ``group`` sends every other one
    those of its experts."""

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, EXPERTS, WIDTH).transpose(0, 1)  # [expert, token, width]
        if self.group is None:
            return torch.tanh(tokens @ self.weight).transpose(0, 1).reshape(x.shape)
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        ranks, local = self.group.size(), weight.shape[0]
        sent = tokens.contiguous().flatten()
        received = exchange(sent, self.group).view(ranks, local, -1, WIDTH)
        done = torch.tanh(received.transpose(0, 1).flatten(1, 2) @ weight)
        back = done.view(local, ranks, -1, WIDTH).transpose(0, 1).contiguous().flatten()
        returned = exchange(back, self.group).view(EXPERTS, -1, WIDTH)
        return returned.transpose(0, 1).reshape(x.shape)


def exchange(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``all_to_all`` of equal parts, through which gradients flow."""
    sizes = [values.numel() // group.size()] * group.size()
    exchanged = all_to_all_single_autograd(values, sizes, sizes, group)
    assert isinstance(exchanged, torch.Tensor)
    return exchanged


class Layer(nn.Module):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.dense(x))


class Moe(nn.Sequential):
    """Two layers whose experts are divided among the ranks of ``ep``, if there are any: as plain
    tensors, or as DTensors, which know how many there are in all."""

    def __init__(self, ep: DeviceMesh | None, with_dtensors: bool = False) -> None:
        torch.manual_seed(11)
        layers = []
        group = None if ep is None else ep.get_group()
        for _ in range(2):
            weight = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.double) / WIDTH**0.5
            if ep is not None and with_dtensors:
                weight = distribute_tensor(weight, ep, [Shard(0)], src_data_rank=None)
            elif group is not None:
                weight = weight.chunk(group.size())[group.rank()].clone()
            layers.append(Layer(Experts(weight, group)))
        super().__init__(*layers)
        self.double()


def meshes() -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Of all four ranks: the whole, the one that experts are sharded over, the one that they are
    divided among."""
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
    return whole, grid["shard"], grid["ep"]


def shard(model: Moe, whole: DeviceMesh, shards: DeviceMesh, ctx: FsdpContext) -> None:
    for layer in model:
        fully_shard(layer.experts, ctx, mesh=shards)
        layer.experts.set_gradient_divide_factor(whole.size())
        fully_shard(layer, ctx)
    fully_shard(model, ctx)


def train(layout_is_whole: bool, with_dtensors: bool) -> None:
    whole, shards, ep = meshes()
    model, twin = Moe(ep, with_dtensors), Moe(None)
    ctx = FsdpContext(whole, layout=Whole()) if layout_is_whole else FsdpContext(whole)
    if layout_is_whole:
        experts = [layer.experts for layer in model]
        ctx.plan([*experts, *model, model], meshes=dict.fromkeys(experts, shards))
    shard(model, whole, shards, ctx)
    optimizer = AdamW(model.parameters(), lr=0.05)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(4, ROWS, WIDTH, generator=generator, dtype=torch.double)
        loss = model(x[dist.get_rank()]).square().mean()
        loss.backward()
        torch.stack([twin(rows).square().mean() for rows in x]).mean().backward()
        compare(model, twin, ep, of_gradients=True)
        # Of plain experts nobody can tell that other ranks have others.
        clipped = nn.Module.parameters if with_dtensors else expert_free
        norm = clip_grad_norm_(clipped(model), 0.1)
        expected = nn.utils.clip_grad_norm_(clipped(twin), 0.1)
        torch.testing.assert_close(norm, expected)
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
        compare(model, twin, ep, of_gradients=False)
        assert ctx.stats.full_buffers_alive == ctx.stats.reduce_inputs_alive == 0


def expert_free(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "experts" not in name]


def compare(model: nn.Module, twin: nn.Module, ep: DeviceMesh, of_gradients: bool) -> None:
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        actual, expected = (parameter.grad, other.grad) if of_gradients else (parameter, other)
        assert isinstance(actual, ShardedTensor)
        assert expected is not None
        expected = expected.detach()
        if "experts" in name and actual.device_mesh.ndim == 1:  # this rank's, by themselves
            expected = expected.chunk(ep.size())[ep.get_local_rank()]
        same(actual.full_tensor().detach(), expected, name)


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


def groups_and_lanes() -> None:
    whole, shards, ep = meshes()
    model = Moe(ep)
    ctx = FsdpContext(whole)
    shard(model, whole, shards, ctx)
    made: list[list[int]] = []
    make = pool._make

    def counted(name: str, ranks: list[int], *options: Any) -> dist.ProcessGroup:
        made.append(ranks)
        return make(name, ranks, *options)

    with patch.object(pool, "_make", counted):
        for _ in range(2):
            model(torch.ones(ROWS, WIDTH, dtype=torch.double)).sum().backward()
    # Two for each set, one to gather and one to reduce.
    shards_here = [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    assert made == [shards_here] * 2 + [[0, 1, 2, 3]] * 2
    assert len(ctx.domains) == 2
    assert ctx.stats.order_checks == 4


def test_groups_are_made_once_for_each_set_of_ranks() -> None:
    run_ranks(groups_and_lanes, 4)


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
    assert ctx.stats.full_buffers_alive == 0
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
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=15)
    )
    makes_groups()


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
