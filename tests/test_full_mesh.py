"""``dp_mesh_dims``: parameters lie over a mesh of all parallelism, as FSDP2's do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp_overlap import (
    DataParallelMeshDims,
    FsdpContext,
    FsdpModule,
    Rows,
    fully_shard,
    replacing_fsdp2,
)
from fsdp_overlap.layout import Flat, LayoutRule, Whole
from fsdp_overlap.optim import AdamW, clip_grad_norm_
from fsdp_overlap.runtime.full_mesh import full_mesh
from support import annotated
from support.ranks import run_ranks
from support.rows import check_alike

# Uneven over the ranks, but for what FSDP2's tiles must divide.
WIDTH, HIDDEN, LENGTH, BATCH = 6, 10, 4, 8

Dims = dict[str, Any]


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
    """``x`` with another placement along tensor parallelism, if it has that."""
    if not isinstance(x, DTensor) or "tp" not in (x.device_mesh.mesh_dim_names or ()):
        return x
    dim = x.device_mesh.mesh_dim_names.index("tp")
    return x.redistribute(placements=[*x.placements[:dim], along_tp, *x.placements[dim + 1 :]])


def distributed(mesh: DeviceMesh) -> Model:
    """The model over all of ``mesh``, as tensor parallelism and nothing else cuts it."""
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
    """The loss on this rank's rows, or on all without a ``mesh``."""
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


def grads_alike(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert isinstance(its.grad, DTensor)
        assert mine.grad.placements == its.grad.placements, name
        assert mine.grad.device_mesh == its.grad.device_mesh, name
        torch.testing.assert_close(mine.grad.to_local(), its.grad.to_local())


def beside_fsdp2(shape: tuple[int, ...], names: tuple[str, ...], dims: Dims) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    named = DataParallelMeshDims(**dims)
    theirs = shard(distributed(mesh), partial(torchs_fully_shard, mesh=mesh, dp_mesh_dims=named))
    with replacing_fsdp2():
        from torch.distributed.fsdp import fully_shard as replaced

        ours = shard(distributed(mesh), partial(replaced, mesh=mesh, dp_mesh_dims=named))
    assert isinstance(ours, FsdpModule)
    found = full_mesh(mesh, named)
    assert found is not None
    data = found.data
    check_alike(ours, theirs, beside_others=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (ours, theirs)]
    for step in range(3):
        losses = [loss_of(each, mesh, data, step) for each in (ours, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        for loss in losses:
            loss.backward()
        grads_alike(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), its.to_local())


MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], Dims]] = {
    "no tp": ((4,), ("dp",), {"shard": "dp"}),
    "tp": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "tp first": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "copies": ((2, 2), ("copy", "dp"), {"shard": "dp", "replicate": "copy"}),
    "copies and tp": ((2, 1, 2), ("copy", "dp", "tp"), {"shard": "dp", "replicate": "copy"}),
    "two dimensions": ((2, 2), ("dp", "cp"), {"shard": ("dp", "cp")}),
    "two dimensions and tp": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
    "two kinds of copies": ((2, 1, 2), ("a", "b", "dp"), {"shard": "dp", "replicate": ("a", "b")}),
    "copies and two dimensions": (
        (2, 1, 2),
        ("copy", "dp", "cp"),
        {"shard": ("dp", "cp"), "replicate": "copy"},
    ),
}


@pytest.mark.parametrize("case", MESHES)
def test_parameters_lie_and_train_as_fsdp2s(case: str) -> None:
    run_ranks(beside_fsdp2, 4, *MESHES[case])


def beside_unsharded(
    shape: tuple[int, ...], names: tuple[str, ...], dims: Dims, layout: LayoutRule, **options: Any
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    named = DataParallelMeshDims(**dims)
    found = full_mesh(mesh, named)
    assert found is not None
    ctx = FsdpContext(found.data, layout=layout, **options)
    shard_it = partial(fully_shard, ctx=ctx, mesh=mesh, dp_mesh_dims=named)
    first = shard(distributed(mesh), shard_it)
    # A copy lies as the original does, and a model without memory as one with.
    with torch.device("meta"):
        hollow = distributed(mesh)
    hollow = shard(hollow, partial(fully_shard, mesh=mesh, dp_mesh_dims=named))
    hollow.to_empty(device="cpu")
    hollow.load_state_dict(plain_state(first), strict=True)
    for model in (first, copy.deepcopy(first), hollow):
        trains_as_the_twin(model, mesh, found.data)


def plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def trains_as_the_twin(model: Any, mesh: DeviceMesh, data: DeviceMesh) -> None:
    twin = plain()
    steps = [AdamW(model.parameters(), lr=0.05), AdamW(twin.parameters(), lr=0.05)]
    for step in range(2):
        loss_of(model, mesh, data, step).backward()
        loss_of(twin, None, data, step).backward()
        same(model, twin, lambda parameter: parameter.grad)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    same(model, twin, lambda parameter: parameter)


def same(model: nn.Module, twin: nn.Module, of: Callable[[Any], Any]) -> None:
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        found, expected = of(mine).full_tensor(), of(its)
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layout", [Flat(), Whole(), Rows()])
@pytest.mark.parametrize("case", ["tp first", "copies and tp", "two dimensions and tp"])
def test_training_equals_unsharded_training(case: str, layout: LayoutRule) -> None:
    run_ranks(beside_unsharded, 4, *MESHES[case], layout)


def divided() -> None:
    beside_unsharded(*MESHES["copies and tp"], Flat(), divide_copies=True)


def test_copies_can_be_divided() -> None:
    run_ranks(divided, 4)


# Plain tiles


def with_annotations(layout: LayoutRule) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    named = DataParallelMeshDims(shard="dp")
    twin = annotated.model()
    model: Any = annotated.cut(annotated.model(), mesh)
    with annotated.annotations():
        ctx = FsdpContext(mesh["dp"], layout=layout)
        for layer in model:
            fully_shard(layer, ctx, mesh=mesh, dp_mesh_dims=named)
        fully_shard(model, ctx, mesh=mesh, dp_mesh_dims=named)
        models = (model, copy.deepcopy(model))
    if isinstance(layout, Rows):
        lying = [parameter.placements for parameter in model[0].parameters()]
        rows, columns = (_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1))
        assert lying == [(Shard(0), Replicate()), (Shard(0), Replicate()), rows, columns]
    assert all(parameter.device_mesh == mesh for parameter in model.parameters())
    x = torch.randn(4, annotated.WIDTH, generator=torch.Generator().manual_seed(2)).double()
    twin(x).square().mean().backward()
    for each in models:
        each(x.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
        same(each, twin, lambda parameter: parameter.grad)
        same(each, twin, lambda parameter: parameter)
        each[0].unshard()
        assert type(each[0].up) is nn.Parameter
        assert each[0].up.shape == (annotated.HIDDEN // 2, annotated.WIDTH)
        each[0].reshard()


@pytest.mark.parametrize("layout", [Flat(), Rows()])
def test_gradients_of_annotated_tiles_are_summed_where_they_are_parts_of_a_sum(
    layout: LayoutRule,
) -> None:
    run_ranks(with_annotations, 4, layout)


# What is refused


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))


def over(mesh: DeviceMesh, *placements: Placement) -> nn.Module:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, placements))
    return linear


def named_by_a_string() -> None:
    fully_shard(over(mesh_of_two(), Replicate(), Replicate()), dp_mesh_dims="dp")  # type: ignore[call-overload]


def without_a_mesh() -> None:
    fully_shard(nn.Linear(4, 4), dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def mesh_without_names() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def unknown_name() -> None:
    dims = DataParallelMeshDims(shard="fsdp")
    fully_shard(nn.Linear(4, 4), mesh=mesh_of_two(), dp_mesh_dims=dims)


def named_twice() -> None:
    dims = DataParallelMeshDims(shard="dp", replicate="dp")
    fully_shard(nn.Linear(4, 4), mesh=mesh_of_two(), dp_mesh_dims=dims)


def copies_alone() -> None:
    dims = DataParallelMeshDims(replicate="dp")
    fully_shard(nn.Linear(4, 4), mesh=mesh_of_two(), dp_mesh_dims=dims)


def plain_parameter() -> None:
    dims = DataParallelMeshDims(shard="dp")
    fully_shard(nn.Linear(4, 4), mesh=mesh_of_two(), dp_mesh_dims=dims)


def over_another_mesh() -> None:
    mesh = mesh_of_two()
    dims = DataParallelMeshDims(shard="dp")
    fully_shard(over(mesh["tp"], Replicate()), mesh=mesh, dp_mesh_dims=dims)


def cut_by_data_parallelism() -> None:
    mesh = mesh_of_two()
    dims = DataParallelMeshDims(shard="dp")
    fully_shard(over(mesh, Shard(0), Replicate()), mesh=mesh, dp_mesh_dims=dims)


def noted_wrongly(kinds: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(4, 4, bias=False)
    annotated.annotate(linear.weight, mesh, kinds)
    with annotated.annotations():
        fully_shard(linear, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


CASES: dict[str, tuple[Callable[[], None], type[Exception], str]] = {
    "no class": (
        named_by_a_string,
        TypeError,
        "dp_mesh_dims is a str: give a DataPar",
    ),
    "no mesh": (without_a_mesh, ValueError, "no mesh was given, which has no names: pass mesh="),
    "no names": (mesh_without_names, ValueError, "DeviceMesh.* has no names: pass mesh=init_devic"),
    "unknown": (unknown_name, ValueError, r"'fsdp' is no dimension of the mesh, \('dp', 'tp'\)"),
    "twice": (
        named_twice,
        ValueError,
        "names 'dp' twice: parameters are sharded",
    ),
    "copies": (copies_alone, ValueError, "names no dimension to shard along: for copies alone"),
    "plain": (
        plain_parameter,
        ValueError,
        "'weight' of Linear is a plain tensor, and",
    ),
    "other mesh": (
        over_another_mesh,
        ValueError,
        "'weight' of Linear is a DTensor over .*tp.* is for those",
    ),
    "cut": (cut_by_data_parallelism, ValueError, "gives 'dp' to data parallelism: place it as Rep"),
    "not noted": (
        partial(noted_wrongly, {"dp": annotated.Kind.R}),
        ValueError,
        "spmd_types has None for parameter 'weight' of Linear along 'tp'",
    ),
    "noted as varying": (
        partial(noted_wrongly, {"tp": annotated.Kind.V}),
        ValueError,
        "has Kind.V for parameter 'weight' of Linear along 'tp' .* as R, I or S",
    ),
}


def refused(case: str) -> None:
    run, error, text = CASES[case]
    with pytest.raises(error, match=text):
        run()


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_right_is_refused(case: str) -> None:
    run_ranks(refused, 2, case)
