"""Sharded tensors over meshes of several dimensions: ranges of what tensor parallelism leaves."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap import RaggedDTensor, RaggedShard, distribute_tensor
from fsdp_overlap.checkpoint import SafeFileSystemReader
from fsdp_overlap.optim import clip_grad_norm_
from fsdp_overlap.tensor.ragged_dtensor import contiguous_spec
from fsdp_overlap.tensor.tiles import Tile, tile_of
from support.fake_group import run_on_fake_group
from support.optimizers import FORMS, OPTIMIZERS
from support.pointwise import POINTWISE
from support.ranks import run_ranks

SHAPE = (5, 3)

# Of a mesh of 4 ranks, and where the range stands among the placements.
MESHES: dict[str, tuple[tuple[int, ...], int, list[Placement]]] = {
    "rows": ((2, 2), 0, [Shard(0)]),
    "columns": ((2, 2), 0, [Shard(1)]),
    "replicated": ((2, 2), 0, [Replicate()]),
    "range last": ((2, 2), 1, [Shard(0)]),
    "more ranks than columns": ((1, 4), 0, [Shard(1)]),
    "three dimensions": ((2, 1, 2), 1, [Replicate(), Shard(1)]),
    "cut twice": ((1, 2, 2), 0, [Shard(0), Shard(0)]),
}


def whole_tensor() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def placed(mesh: DeviceMesh, at: int, others: list[Placement]) -> tuple[Placement, ...]:
    """A range for the first rank along dimension ``at`` of the mesh, and the rest for the last."""
    before, after = others[:at], others[at:]
    meta = torch.Size(SHAPE)
    tile = tile_of(contiguous_spec(mesh, (*before, RaggedShard(()), *after), meta, torch.float32))
    last = mesh.size(at) - 1
    cut = tile.numel // 3 if last else 0
    ranges = ((0, 0, cut), (last, cut, tile.numel)) if last else ((0, 0, tile.numel),)
    return (*before, RaggedShard(tuple(r for r in ranges if r[1] < r[2])), *after)


def on_meshes() -> Iterator[tuple[str, Any, torch.Tensor]]:
    """A parameter over each mesh, and the same unsharded."""
    for name, (shape, at, others) in MESHES.items():
        mesh = init_device_mesh("cpu", shape)
        whole = whole_tensor()
        tensor = distribute_tensor(whole, mesh, placed(mesh, at, others))
        yield name, tensor, whole


def same(actual: Any, expected: torch.Tensor, what: str) -> None:
    if isinstance(actual, RaggedDTensor):
        actual = actual.full_tensor()
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{what}: {text}")


def whole_again() -> None:
    for name, tensor, whole in on_meshes():
        assert torch.equal(tensor.full_tensor(), whole), name
        assert tensor.shape == whole.shape
        tile = tile_of(tensor._spec)
        start, stop = tensor.local_range
        assert torch.equal(tensor.to_local(), tile.of(whole).flatten()[start:stop]), name
        assert ("tile" in repr(tensor)) == (name != "replicated"), repr(tensor)


def test_every_rank_holds_a_range_of_its_tile() -> None:
    run_ranks(whole_again, 4)


# Views that are not the whole again would be none, or several ranges, of a tile.
CONTIGUOUS_VIEWS = {
    "mask assigned",
    "view",
    "reshape",
    "row of",
    "rows of",
    "part of a row",
    "iteration",
    "chunk",
    "unsqueeze",
    "edited view",
}


def pointwise() -> None:
    for name, tensor, whole in on_meshes():
        for op, function in POINTWISE.items():
            expected = function(whole.clone())
            if op in CONTIGUOUS_VIEWS and name != "replicated":
                with pytest.raises(RuntimeError, match="not supported on a RaggedDTensor"):
                    function(tensor.clone())
            else:
                same(function(tensor), expected, f"{op} over {name}")


def test_pointwise_ops_and_copies_are_those_of_the_whole() -> None:
    run_ranks(pointwise, 4)


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(1),
    "mean": lambda x: x.mean(dim=0, keepdim=True),
    "max": lambda x: x.max(),
    "amin of columns": lambda x: x.amin(0),
    "all": lambda x: (x > -9).all(),
    "any": lambda x: (x > 9).any(),
    "norm": lambda x: x.norm(),
    "one norm": lambda x: torch.linalg.vector_norm(x, 1),
    "largest": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "smallest of rows": lambda x: torch.linalg.vector_norm(x, -float("inf"), dim=1),
    "foreach norm": lambda x: torch._foreach_norm([x, x * 2])[1],
    "norm of rows": lambda x: x.norm(dim=1),
    "equal": lambda x: torch.tensor(torch.equal(x, x.clone())),
}


def reductions() -> None:
    for name, tensor, whole in on_meshes():
        for op, function in REDUCTIONS.items():
            same(function(tensor), function(whole), f"{op} over {name}")


def test_reductions_count_every_element_once() -> None:
    run_ranks(reductions, 4)


def clipping() -> None:
    parameters, wholes = [], []
    for _, tensor, whole in on_meshes():
        parameter: Any = nn.Parameter(tensor)
        parameter.grad = tensor * 3
        parameters.append(parameter)
        wholes.append(nn.Parameter(whole))
        wholes[-1].grad = whole * 3
    for order in (2.0, 1.0, float("inf")):
        expected = nn.utils.clip_grad_norm_(wholes, 2.0, order)
        torchs = copy.deepcopy(parameters)
        same(nn.utils.clip_grad_norm_(torchs, 2.0, order), expected, f"torch's, order {order}")
        same(clip_grad_norm_(parameters, 2.0, order), expected, f"order {order}")
        for parameter, of_torch, whole in zip(parameters, torchs, wholes, strict=True):
            assert whole.grad is not None
            same(parameter.grad, whole.grad, f"order {order}")
            same(of_torch.grad, whole.grad, f"order {order}")


def test_clipping_counts_every_element_once() -> None:
    run_ranks(clipping, 4)


def optimizers() -> None:
    cases = [(tensor.double(), whole.double()) for _, tensor, whole in on_meshes()]
    for name, form in product(("SGD", "AdamW", "Adafactor"), ("single", "foreach")):
        pairs = [tuple(nn.Parameter(t.clone()) for t in case) for case in cases]
        for parameters in zip(*pairs, strict=True):
            options = OPTIMIZERS[name][form == "foreach"]
            optimizer = getattr(torch.optim, name)(parameters, lr=0.05, **FORMS[form], **options)
            for step in range(2):
                for parameter in parameters:
                    parameter.grad = (parameter.detach() + step) * 3
                optimizer.step()
        for tensor, whole in pairs:
            same(tensor.detach(), whole.detach(), f"{name}, {form}, {tensor}")


def test_optimizers_step_as_on_the_whole() -> None:
    run_ranks(optimizers, 4)


def edits() -> None:
    for name, tensor, whole in on_meshes():
        other = torch.arange(15.0).view(SHAPE)
        same(tensor.clone().copy_(other), other, f"copy_ over {name}")
        plain = torch.zeros(SHAPE)
        same(plain.copy_(tensor), whole, f"copy_ from {name}")
        half = [Shard(0)] * tensor.device_mesh.ndim
        same(tensor.redistribute(placements=half).full_tensor(), whole, f"{name} in rows")
        of_torch = torch.distributed.tensor.distribute_tensor(other, tensor.device_mesh, half)
        same(tensor.clone().copy_(of_torch), other, f"copy_ of a DTensor over {name}")
        same(tensor.redistribute(placements=tensor.placements), whole, f"{name} to itself")
        for init in (nn.init.kaiming_uniform_, nn.init.trunc_normal_, torch.Tensor.normal_):
            torch.manual_seed(5)
            expected = init(torch.empty(SHAPE))
            torch.manual_seed(5)
            same(init(tensor.clone()), expected, f"{init.__name__} over {name}")


def test_whole_tensors_and_random_fills_meet_their_tiles() -> None:
    run_ranks(edits, 4)


def seeds_of_their_own() -> None:
    for name, tensor, _ in on_meshes():
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(tensor)
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, tensor.full_tensor())
        assert all(torch.equal(other, of_all[0]) for other in of_all), name


def test_copies_stay_copies_whatever_the_seeds() -> None:
    run_ranks(seeds_of_their_own, 4)


def from_one_rank() -> None:
    for name, tensor, whole in on_meshes():
        mine = whole if dist.get_rank() == 0 else torch.full_like(whole, 9.0)
        again = distribute_tensor(mine, tensor.device_mesh, tensor.placements)
        same(again, whole, name)


def test_the_values_of_the_first_rank_count() -> None:
    run_ranks(from_one_rank, 4)


def refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = whole_tensor()
    with pytest.raises(ValueError, match="must be given for a mesh of 2"):
        distribute_tensor(whole, mesh)
    for placements in ([Shard(0), Shard(1)], [RaggedShard(()), RaggedShard(())], [RaggedShard(())]):
        with pytest.raises(ValueError, match="do not make a RaggedDTensor over a mesh of 2"):
            distribute_tensor(whole, mesh, placements)
    with pytest.raises(ValueError, match="places 15 elements, not the"):
        distribute_tensor(whole, mesh, [RaggedShard(((0, 0, 15),)), Shard(0)])


def test_other_placements_are_refused() -> None:
    run_on_fake_group(refused, 4)


def pickles() -> None:
    for name, tensor, _ in on_meshes():
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded.placements == tensor.placements
        assert torch.equal(loaded.to_local(), tensor.to_local()), name


def test_they_can_be_pickled() -> None:
    run_ranks(pickles, 4)


@pytest.mark.parametrize("weights_only", [True, False])
def test_files_of_earlier_versions_name_another_module(
    weights_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, file = RaggedShard(((0, 0, 3), (1, 3, 4))), io.BytesIO()
    monkeypatch.setattr(RaggedShard, "__module__", "fsdp_overlap.tensor.placement")
    torch.save(placement, file)
    monkeypatch.undo()
    file.seek(0)
    assert torch.load(file, weights_only=weights_only) == placement


def save(folder: Path) -> None:
    dcp.save({name: tensor for name, tensor, _ in on_meshes()}, checkpoint_id=folder)


def load(folder: Path) -> None:
    readers = [dcp.FileSystemReader(folder), SafeFileSystemReader(folder)]
    for reader in readers:
        states: dict[str, Any] = {name: tensor.mul(0) for name, tensor, _ in on_meshes()}
        dcp.load(states, storage_reader=reader)
        for name, state in states.items():
            same(state, whole_tensor(), name)


def load_whole(folder: Path) -> None:
    states: dict[str, Any] = {name: torch.zeros(SHAPE) for name in MESHES}
    dcp.load(states, storage_reader=SafeFileSystemReader(folder))
    for name, state in states.items():
        same(state, whole_tensor(), name)


def save_by_torch(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    states = {
        name: torch.distributed.tensor.distribute_tensor(whole_tensor(), mesh, [Shard(1), Shard(0)])
        for name in MESHES
    }
    assert all(isinstance(state, DTensor) for state in states.values())
    dcp.save(states, checkpoint_id=folder)


@pytest.mark.parametrize("writer", [save, save_by_torch])
def test_checkpoints_of_them_move_to_other_meshes(tmp_path: Path, writer: Any) -> None:
    run_ranks(writer, 4, tmp_path)
    run_ranks(load, 4, tmp_path)
    run_ranks(load_whole, 2, tmp_path)


def test_a_tile_is_a_view_of_the_whole() -> None:
    whole = torch.arange(15.0).view(SHAPE)
    tile = Tile((3, 1), (2, 2)).of(whole)
    assert tile.tolist() == [[10.0, 11.0], [13.0, 14.0]]
    tile.zero_()
    assert whole.sum() == 105.0 - 48.0
