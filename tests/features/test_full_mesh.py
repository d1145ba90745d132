"""``dp_mesh_dims``: parameters lie over a mesh of all parallelism, as FSDP2's do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp_overlap import (
    DataParallelMeshDims,
    FsdpContext,
    FsdpModule,
    PerTensor,
    fully_shard,
    patch_fsdp2,
)
from fsdp_overlap.features.full_mesh import SPMDPlacement, spmd_mesh
from fsdp_overlap.layout import Flat, LayoutRule, TensorAtomic
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from support import annotated
from support.fake_group import run_on_fake_group
from support.full_mesh import WIDTH, distributed, loss_of, plain, shard
from support.ranks import run_ranks
from support.rows import check_alike

Dims = dict[str, Any]


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
    with patch_fsdp2():
        from torch.distributed.fsdp import fully_shard as replaced

        ours = shard(distributed(mesh), partial(replaced, mesh=mesh, dp_mesh_dims=named))
    assert isinstance(ours, FsdpModule)
    found = spmd_mesh(mesh, named)
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


needs_torchs = pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="torch 2.11 has no dp_mesh_dims"
)


@pytest.mark.sampled(9)
@needs_torchs
@pytest.mark.parametrize("case", MESHES)
def test_parameters_lie_and_train_as_fsdp2s(case: str) -> None:
    run_ranks(beside_fsdp2, 4, *MESHES[case])


class Experts(nn.Module):
    """Each rank along ``ep`` has its experts, of which each ``efsdp`` has copies."""

    def __init__(self, dense: DeviceMesh, sparse: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(3)
        copied, cut = [Replicate(), Replicate()], [Replicate(), Shard(0)]
        self.scale = nn.Parameter(distribute_tensor(torch.rand(WIDTH).double(), dense, copied))
        self.experts = nn.Parameter(distribute_tensor(torch.rand(8, WIDTH).double(), sparse, cut))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: Any = self.scale  # each rank of tensor parallelism has other rows
        scale = parts.to_local(grad_placements=[Partial(), Partial()])
        local: Any = self.experts
        return (x * scale) @ local.to_local().tanh().t()


def two_meshes() -> None:
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    infos = {
        dense: _fsdp_init._get_mesh_info(dense, DataParallelMeshDims(shard="dp")),
        sparse: _fsdp_init._get_mesh_info(sparse, DataParallelMeshDims(shard="efsdp")),
    }

    def place(parameter: Any) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), infos[parameter.device_mesh])

    options: Any = {
        "mesh": dense,
        "dp_mesh_dims": DataParallelMeshDims(shard="dp"),
        "shard_placement_fn": place,
    }
    theirs: Any = torchs_fully_shard(Experts(dense, sparse), **options)
    ours: Any = fully_shard(
        Experts(dense, sparse), FsdpContext(dense["dp"], layout=PerTensor()), **options
    )
    check_alike(ours, theirs, beside_others=True)
    x = torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).double()
    for each in (theirs, ours, copy.deepcopy(ours)):
        each(x).square().mean().backward()
        grads_alike(each, theirs)


@needs_torchs
def test_parameters_of_a_unit_may_lie_over_several_full_meshes() -> None:
    run_ranks(two_meshes, 4)


def beside_unsharded(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    dims: Dims,
    layouts: Sequence[LayoutRule],
    kept: bool | int | None = None,
    **options: Any,
) -> None:
    # DTensor thinks for seconds about what it does on a mesh first. It remembers that for all
    # layouts.
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layout in layouts:
        try:
            with_layout(mesh, DataParallelMeshDims(**dims), layout, kept, **options)
        except BaseException as error:
            error.add_note(f"with {layout}")
            raise


def with_layout(
    mesh: DeviceMesh,
    named: DataParallelMeshDims,
    layout: LayoutRule,
    kept: bool | int | None,
    **options: Any,
) -> None:
    found = spmd_mesh(mesh, named)
    assert found is not None
    ctx = FsdpContext(found.data, layout=layout, **options)
    shard_it = partial(
        fully_shard, ctx=ctx, mesh=mesh, dp_mesh_dims=named, reshard_after_forward=kept
    )
    first = shard(distributed(mesh), shard_it)
    # A copy lies as the original does, and a model without memory as one with.
    with torch.device("meta"):
        hollow = distributed(mesh)
    hollow = shard(hollow, partial(fully_shard, mesh=mesh, dp_mesh_dims=named))
    hollow.to_empty(device="cpu")
    hollow.load_state_dict(plain_state(first), strict=True)
    steps_of: list[Callable[[nn.Module], Any]] = [
        lambda model: AdamW(model.parameters(), lr=0.05),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True),
        lambda model: Muon(model, lr=0.05, ns_dtype=torch.float64),
    ]
    for model, optimizer in zip((first, copy.deepcopy(first), hollow), steps_of, strict=True):
        trains_as_the_twin(model, mesh, found.data, optimizer)


def plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def trains_as_the_twin(
    model: Any, mesh: DeviceMesh, data: DeviceMesh, steps_of: Callable[[nn.Module], Any]
) -> None:
    twin = plain()
    steps = [steps_of(each) for each in (model, twin)]
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["tp first", "copies and tp", "two dimensions and tp"])
def test_training_equals_unsharded_training(case: str) -> None:
    run_ranks(beside_unsharded, 4, *MESHES[case], (Flat(), TensorAtomic(), PerTensor()))


def test_parameters_can_be_kept_among_neighbours() -> None:
    run_ranks(beside_unsharded, 4, *MESHES["no tp"], (Flat(),), 2)


def divided() -> None:
    beside_unsharded(*MESHES["copies and tp"], (Flat(),), shard_optimizer_over_replicas=True)


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
    if isinstance(layout, PerTensor):
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


@pytest.mark.parametrize("layout", [Flat(), PerTensor()])
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


def gradient_placed_wrongly(of_another_kind: bool) -> None:
    mesh = mesh_of_two()
    found = spmd_mesh(mesh, DataParallelMeshDims(shard="dp"))
    assert found is not None
    lies = SPMDPlacement(found, (Replicate(), Replicate()), torch.Size([4, 4]))
    gradient = torch.ones(4, 4)
    if not of_another_kind:
        gradient = distribute_tensor(gradient, mesh, [Shard(0), Replicate()])
    assert not lies.is_reduced(gradient)
    lies.reduce(gradient, torch.float32)


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
    "gradient without a mesh": (
        partial(gradient_placed_wrongly, True),
        RuntimeError,
        "the gradient of a parameter over .* is a Tensor over no mesh",
    ),
    "gradient that is cut": (
        partial(gradient_placed_wrongly, False),
        RuntimeError,
        "is placed as .*, cut along a dimension of data parallelism",
    ),
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
    run_on_fake_group(refused, 2, case)
