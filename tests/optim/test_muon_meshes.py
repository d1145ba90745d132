"""Muon on every mesh: experts, tensor parallelism, copies, stages of a pipeline."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_overlap import BlockAtomic, Flat, FsdpContext, TensorAtomic, fully_shard
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.optim import Muon, exchange, orthogonalization
from support import experts, tensor_parallel
from support.ranks import run_ranks
from support.tensor_parallel import ROWS, batches, grad, loss_of, parallelize, plain
from support.twins import Twins, same

EXACT: dict[str, Any] = {"lr": 0.05, "ns_dtype": torch.float64}
LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "blocks": BlockAtomic(rows=2),
    "whole": TensorAtomic(),
}


@contextmanager
def in_small_parts() -> Iterator[None]:
    """Several rounds and batches, for small matrices too."""
    with (
        patch.object(exchange, "ROUND_ELEMENTS", 60),
        patch.object(orthogonalization, "_CPU_ELEMENTS", 150),
    ):
        yield


class Spy:
    """Counts the matrices that this rank orthogonalizes, by shape."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[int, ...]] = Counter()
        self._original = orthogonalization.orthogonalize

    def __call__(self, stack: torch.Tensor, *args: Any) -> torch.Tensor:
        self.seen[tuple(stack.shape[1:])] += len(stack)
        return self._original(stack, *args)

    def watch(self) -> Any:
        return patch.object(orthogonalization, "orthogonalize", self)


def step_both_and_count(optimizer: Any, twin_optimizer: Any) -> tuple[Counter[Any], Counter[Any]]:
    """The matrices that this rank orthogonalized in a step, and those that there are."""
    mine, all_of_them = Spy(), Spy()
    with in_small_parts(), mine.watch():
        optimizer.step()
    with all_of_them.watch():
        twin_optimizer.step()
    for each in (optimizer, twin_optimizer):
        each.zero_grad()
    return mine.seen, all_of_them.seen


# Experts


def train_experts(layout: str, with_dtensors: bool) -> None:
    whole, shards, ep = experts.meshes()
    model, twin = experts.Moe(ep, with_dtensors), experts.Moe(None)
    ctx = FsdpContext(whole, layout=LAYOUTS[layout])
    units = [layer.experts for layer in model]
    ctx.plan_layout([*units, *model, model], meshes=dict.fromkeys(units, shards))
    experts.shard(model, whole, shards, ctx)
    optimizer, twin_optimizer = Muon(model, **EXACT), Muon(twin, **EXACT)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(4, experts.ROWS, experts.WIDTH, generator=generator, dtype=torch.double)
        model(x[dist.get_rank()]).square().mean().backward()
        torch.stack([twin(rows).square().mean() for rows in x]).mean().backward()
        with CommDebugMode() as issued:
            optimizer.step()
        assert not (layout == "whole" and issued.get_total_counts())
        twin_optimizer.step()
        for each in (optimizer, twin_optimizer):
            each.zero_grad()
        experts.compare(model, twin, ep, of_gradients=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("with_dtensors", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_stepped_as_unsharded(layout: str, with_dtensors: bool) -> None:
    run_ranks(train_experts, 4, layout, with_dtensors)


def train_copied_experts(layout: str) -> Any:
    """Two copies of experts that are divided among two ranks. Returns the matrices that this rank
    orthogonalized in a step, and those that there are."""
    grid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "ep"))
    model, twin = experts.Moe(grid["ep"], with_dtensors=True), experts.Moe(None)
    ctx = FsdpContext(grid._flatten(), layout=LAYOUTS[layout])
    copies = grid["replicate", "shard"]
    for layer in model:
        fully_shard(layer.experts, ctx, mesh=copies)
        layer.experts.set_gradient_divide_factor(4)
        fully_shard(layer, ctx)
    fully_shard(model, ctx)
    optimizer, twin_optimizer = Muon(model, **EXACT), Muon(twin, **EXACT)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x = torch.randn(4, experts.ROWS, experts.WIDTH, generator=generator, dtype=torch.double)
        model(x[dist.get_rank()]).square().mean().backward()
        torch.stack([twin(rows).square().mean() for rows in x]).mean().backward()
        seen = step_both_and_count(optimizer, twin_optimizer)
        experts.compare(model, twin, grid["ep"], of_gradients=False)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_experts_share_out_the_work(layout: str) -> None:
    found = run_ranks(train_copied_experts, 4, layout)
    assert sum((seen for seen, _ in found), Counter()) == found[0][1]


def save_and_load(path: str, sizes: Sequence[int]) -> None:
    """Saved by one division of the experts, loaded by the next, which trains on."""
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    twin = experts.Moe(None)
    twin_optimizer = Muon(twin, **EXACT)
    generator = torch.Generator().manual_seed(4)
    for index, size in enumerate(sizes):
        grid = init_device_mesh("cpu", (4 // size, size), mesh_dim_names=("shard", "ep"))
        model = experts.Moe(grid["ep"], with_dtensors=True)
        experts.shard(model, whole, grid["shard"], FsdpContext(whole, layout=LAYOUTS["blocks"]))
        optimizer = Muon(model, **EXACT)
        if index:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=f"{path}/{index - 1}")
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
        experts.compare(model, twin, grid["ep"], of_gradients=False)
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            if index and mine.dim() > 1:
                loaded = optimizer.state[mine]["momentum_buffer"].full_tensor()
                same(loaded, twin_optimizer.state[its]["momentum_buffer"], "momentum")
        x = torch.randn(4, experts.ROWS, experts.WIDTH, generator=generator, dtype=torch.double)
        model(x[dist.get_rank()]).square().mean().backward()
        torch.stack([twin(rows).square().mean() for rows in x]).mean().backward()
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
        experts.compare(model, twin, grid["ep"], of_gradients=False)
        saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=f"{path}/{index}")


def test_the_number_of_experts_on_a_rank_may_change_between_save_and_load(tmp_path: Path) -> None:
    run_ranks(save_and_load, 4, str(tmp_path), (2, 4, 1, 2))


# Tensor parallelism


def train_in_tiles(shape: tuple[int, ...], layout: str, divided: bool, split: bool) -> Any:
    """Returns the matrices that this rank orthogonalized in a step, and those that there are."""
    names = ("replicate", "shard", "tp")[3 - len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh[names[:-1]]
    model = tensor_parallel.shard(
        parallelize(plain(), mesh["tp"]),
        FsdpContext(data, layout=LAYOUTS[layout], shard_optimizer_over_replicas=divided),
    )
    twin = plain()
    options = {**EXACT, "split": {"*.wq.weight": 4, "*.wk.weight": (3, 5)} if split else {}}
    optimizer, twin_optimizer = Muon(model, **options), Muon(twin, **options)
    ranks = math.prod(shape[:-1])
    rank = dist.get_rank() // shape[-1]
    for tokens, targets in batches(2, ranks):
        loss_of(model, tokens.split(ROWS)[rank], targets.split(ROWS)[rank]).backward()
        loss_of(twin, tokens, targets).backward()
        tensor_parallel.same(model, twin, "gradient", grad)
        seen = step_both_and_count(optimizer, twin_optimizer)
        tensor_parallel.same(model, twin, "value")
    return seen


TILES = [
    ((2, 2), "flat", False, False),
    ((2, 2), "flat", False, True),
    ((2, 2), "whole", False, False),
    ((1, 2, 2), "blocks", False, True),
    ((2, 1, 2), "flat", False, False),
    ((2, 1, 2), "flat", True, True),
    ((1, 2, 2), "whole", False, True),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("shape", "layout", "divided", "split"), TILES)
def test_matrices_cut_by_tensor_parallelism_are_put_together_once(
    shape: tuple[int, ...], layout: str, divided: bool, split: bool
) -> None:
    found = run_ranks(train_in_tiles, 4, shape, layout, divided, split)
    assert sum((seen for seen, _ in found), Counter()) == found[0][1]


class Stacks(nn.Module):
    """Experts whose matrices tensor parallelism cuts, of which some tiles are empty or uneven."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.up, self.down, self.narrow, self.copied = (
            nn.Parameter(self.place(torch.randn(*shape, generator=generator).double(), mesh, how))
            for shape, how in (
                ((3, 5, 4), Shard(1)),
                ((3, 4, 5), Shard(2)),
                ((3, 2), Shard(0)),
                ((4, 6), Replicate()),
            )
        )

    @staticmethod
    def place(value: torch.Tensor, mesh: DeviceMesh | None, how: Any) -> torch.Tensor:
        return value if mesh is None else distribute_tensor(value, mesh, [how], src_data_rank=None)


def step_stacks(shape: tuple[int, ...], layout: str) -> Any:
    names = ("replicate", "shard", "tp")[3 - len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, twin = Stacks(mesh["tp"]), Stacks(None)
    fully_shard(model, FsdpContext(mesh[names[:-1]], layout=LAYOUTS[layout]))
    options: dict[str, Any] = {"algorithms": {"*": "muon"}, **EXACT}
    optimizer, twin_optimizer = Muon(model, **options), Muon(twin, **options)
    seen = Spy()
    for _ in range(2):
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            value: Any = mine.detach()
            mine.grad, its.grad = value * 3, its.detach() * 3
        with in_small_parts(), seen.watch():
            optimizer.step()
        twin_optimizer.step()
        tensor_parallel.same(model, twin, "value")
    return seen.seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1), (2, 1, 2)])
def test_stacks_in_uneven_tiles(shape: tuple[int, ...], layout: str) -> None:
    found = run_ranks(step_stacks, 4, shape, layout)
    assert sum(found, Counter()) == {(4, 5): 12, (2, 3): 2, (4, 6): 2}


# Copies


def train_copies(layout: str, divided: bool) -> Any:
    """Returns the matrices that this rank orthogonalized, and those that there are."""
    twins = Twins.of(
        "layers",
        optimizer=Muon,
        layout=LAYOUTS[layout],
        mesh=(2, 2),
        shard_optimizer_over_replicas=divided,
        ns_dtype=torch.float64,
    )
    for batch in twins.batches(3):
        twins.backward(*batch)
        seen = step_both_and_count(twins.optimizer, twins.twin_optimizer)
        twins.check_parameters()
    return seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_copies_share_out_the_work(layout: str, divided: bool) -> None:
    found = run_ranks(train_copies, 4, layout, divided)
    total = sum((seen for seen, _ in found), Counter())
    assert total == found[0][1]
    assert max(sum(seen.values()) for seen, _ in found) < sum(total.values()) / 2


# Stages, and context parallelism


def train_stage() -> None:
    """Two stages of a pipeline, on two ranks each, whose matrices have nothing in common."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    stage = grid["stage"].get_local_rank()
    torch.manual_seed(stage)
    model = nn.Sequential(*(nn.Linear(4, 4 + stage, bias=False).double() for _ in range(1 + stage)))
    twin = copy.deepcopy(model)
    fully_shard(model, FsdpContext(grid["dp"]))
    optimizer, twin_optimizer = Muon(model.parameters(), **EXACT), Muon(twin.parameters(), **EXACT)
    for _ in range(2):
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            value: Any = mine.detach()
            mine.grad, its.grad = value * 3, its.detach() * 3
        optimizer.step()
        twin_optimizer.step()
        tensor_parallel.same(model, twin, "value")


def test_each_stage_of_a_pipeline_steps_its_own() -> None:
    run_ranks(train_stage, 4)


def train_with_context_parallelism() -> None:
    """Ranks of context parallelism hold other parts of a sequence, and shards as all others."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)).double()
    twin = copy.deepcopy(model)
    fully_shard(model, FsdpContext(grid["dp", "cp"]._flatten()))
    optimizer, twin_optimizer = Muon(model.parameters(), **EXACT), Muon(twin.parameters(), **EXACT)
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)).double()
    mine = x[grid["dp"].get_local_rank()].chunk(2)[grid["cp"].get_local_rank()]
    for _ in range(2):
        model(mine).square().mean().backward()
        twin(x).square().mean().backward()
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
        tensor_parallel.same(model, twin, "value")


def test_context_parallelism() -> None:
    run_ranks(train_with_context_parallelism, 4)


# What reviews found


def step_beside(shape: tuple[int, ...], layout: str) -> None:
    """A matrix that tensor parallelism copies, in a param group with one whose tiles differ in
    size: the ranges of its copies differ too."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    shapes = ((5, 64), (32, 32), (33, 7))
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(*each, generator=generator).double() for each in shapes]
    model, twin = (nn.ParameterList(copy.deepcopy(values)) for _ in range(2))
    for index, how in enumerate((Shard(0), Replicate(), Replicate())):
        cut = distribute_tensor(values[index], mesh["tp"], [how], src_data_rank=None)
        model[index] = nn.Parameter(cut)
    holder = nn.Sequential(model)
    fully_shard(holder, FsdpContext(mesh["dp"], layout=LAYOUTS[layout]))
    step_both(holder, twin)


def step_both(model: nn.Module, twin: nn.Module) -> None:
    optimizer, twin_optimizer = Muon(model.parameters(), **EXACT), Muon(twin.parameters(), **EXACT)
    for _ in range(2):
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            value: Any = mine.detach()
            mine.grad, its.grad = value * 3, its.detach() * 3
        with in_small_parts():
            optimizer.step()
            twin_optimizer.step()
        tensor_parallel.same(model, twin, "value")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_beside_uneven_tiles(layout: str) -> None:
    run_ranks(step_beside, 4, (2, 2), layout)


def step_on_rows_out_of_order() -> None:
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Linear(7, 9, bias=False).double()
    twin = copy.deepcopy(model)
    fully_shard(model, FsdpContext(mesh))
    step_both(model, twin)


def test_copies_on_a_mesh_whose_rows_are_out_of_order() -> None:
    run_ranks(step_on_rows_out_of_order, 4)
