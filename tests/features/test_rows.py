"""``PerTensor()``: parameters lie as FSDP2's do, and train as any."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.features.rows import collectives as row_collectives
from fsdp_overlap.features.rows import param_group as rows
from fsdp_overlap.features.rows.collectives import InPlaceRows
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import Flat, ParamSpec, TensorAtomic, plan_units
from fsdp_overlap.optim import AdamW, Muon
from support import tensor_parallel
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.rows import check_alike, deep, tokens, torchs
from support.twins import COPIES, NAMES, Twins
from support.zoo import Model, shard_layers

# Chunks, some of them uneven or empty on up to nine ranks.
shapes = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple)


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def shard_columns(model: Any, ctx: FsdpContext) -> None:
    for layer in model.layers:
        fully_shard(layer, ctx, shard_placement_fn=columns)
    fully_shard(model, ctx, shard_placement_fn=columns)


# How parameters lie


@given(some=st.lists(shapes, min_size=1, max_size=4), ranks=st.integers(1, 9), data=st.data())
def test_chunks_are_torchs_and_have_places_of_their_own(
    some: list[tuple[int, ...]], ranks: int, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.uint8]))
    specs = tuple(
        ParamSpec(
            f"p{number}",
            shape,
            dtype,
            cut_dim=data.draw(st.integers(0, len(shape) - 1)),
        )
        for number, shape in enumerate(some)
    )
    [plan] = plan_units([specs], ranks, PerTensor())
    assert isinstance(plan, RowsPlan)
    ends = (0, 0)
    for index, spec in enumerate(specs):
        chunks = torch.empty(spec.shape).chunk(ranks, spec.cut_dim)
        sizes = [tuple(chunk.shape) for chunk in chunks]
        found = [plan.chunk_shape(spec, rank) for rank in range(ranks)]
        assert found[: len(sizes)] == sizes
        assert all(shape[spec.cut_dim] == 0 for shape in found[len(sizes) :])
        places = plan.offsets[index], plan.starts[index]
        assert all(place * dtype.itemsize % 16 == 0 for place in places)
        assert all(place >= end for place, end in zip(places, ends, strict=True))
        assert plan.chunks[index] >= chunks[0].numel()
        ends = places[0] + plan.chunks[index] * ranks, places[1] + plan.chunks[index]
    assert plan.numel >= ends[0]
    assert plan.numel % ranks == 0
    assert plan.shard_numels == (plan.packed.shard_numels[0],) * ranks
    assert plan.shard_numels[0] >= ends[1]
    assert sum(plan.sizes) == plan.shard_numels[0]


def as_fsdp2s(mesh: tuple[int, ...], placement_fn: Any) -> None:
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=NAMES[-len(mesh) :])
    models = []
    for shard in (partial(fully_shard, ctx=FsdpContext(device_mesh, layout=PerTensor())), torchs):
        model = deep()
        for module in (*model.layers, model):
            shard(module, mesh=device_mesh, shard_placement_fn=placement_fn)
        models.append(model)
    check_alike(*models)


def even_columns(parameter: nn.Parameter) -> Shard | None:
    """FSDP2 cuts no others."""
    is_even = parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if is_even else None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (2, 2)])
@pytest.mark.parametrize("placement_fn", [None, even_columns])
def test_parameters_are_what_fsdp2s_are(mesh: tuple[int, ...], placement_fn: Any) -> None:
    run_ranks(as_fsdp2s, torch.Size(mesh).numel(), mesh, placement_fn)


def beside_tensor_parallelism() -> None:
    mesh = tensor_parallel.make_mesh()
    ours, theirs = (
        tensor_parallel.parallelize(tensor_parallel.plain(), mesh["tp"]) for _ in range(2)
    )
    tensor_parallel.shard(ours, FsdpContext(mesh["dp"], layout=PerTensor()))
    for module in (*theirs.layers, theirs):
        torchs_fully_shard(module, mesh=mesh["dp"])
    check_alike(ours, theirs, beside_others=True)
    for optimizer in (partial(torch.optim.AdamW, lr=0.05, foreach=True), tensor_parallel.adamw):
        model = tensor_parallel.parallelize(tensor_parallel.plain(), mesh["tp"])
        tensor_parallel.shard(model, FsdpContext(mesh["dp"], layout=PerTensor()))
        tensor_parallel.train(mesh, model, tensor_parallel.plain(), optimizer)


@pytest.mark.slow
def test_parameters_that_tensor_parallelism_cuts() -> None:
    run_ranks(beside_tensor_parallelism, 4)


# Training


def train(options: dict[str, Any]) -> None:
    Twins(deep, options.pop("shard", shard_layers), layout=PerTensor(), **options).train(3)


def mixed(fqn: str, spec: ParamSpec) -> PerTensor | Flat | TensorAtomic:
    if "up" in fqn:
        return PerTensor()
    return TensorAtomic() if "down" in fqn else Flat()


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "our AdamW": {"optimizer": AdamW},
    "Muon": {"optimizer": Muon, "ns_dtype": torch.double},
    "nothing ahead": {"prefetch": 0},
    "columns": {"shard": shard_columns},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_training_equals_unsharded_training(mode: str, ranks: int) -> None:
    run_ranks(train, ranks, dict(MODES[mode]))


def train_with(**options: Any) -> None:
    def shard(model: Any, ctx: FsdpContext) -> None:
        for layer in model.layers:
            fully_shard(layer, ctx, **options)
        fully_shard(model, ctx, **options)

    Twins(deep, shard, layout=PerTensor()).train(2)


def train_several_ways() -> None:
    Twins(deep, shard_layers, layout=PerTensor(), **COPIES).train(2)
    Twins(
        deep, shard_layers, layout=PerTensor(), optimizer=Muon, ns_dtype=torch.double, **COPIES
    ).train(2)
    Twins(deep, shard_layers, layout=mixed).train(2)
    train_with(reshard_after_forward=2)
    train_with(reshard_after_forward=False)


@pytest.mark.slow
def test_training_with_copies_and_kept_parts_and_beside_other_layouts() -> None:
    run_ranks(train_several_ways, 4)


def train_in_place() -> None:
    """With the collectives that NCCL gets. Gloo has them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "choose_for_rows", lambda *given: InPlaceRows(given[-1]))
        patch.setattr(row_collectives, "AVG", dist.ReduceOp.SUM)  # gloo has no means
        patch.setattr(row_collectives, "divided", lambda total, _: total / dist.get_world_size())
        Twins(deep, shard_layers, layout=PerTensor()).train(2)


def train_in_pieces(columns_too: bool) -> None:
    """Large parameters travel by themselves, in place, and what is small in a packed buffer."""
    for large in (1, 300):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_collectives, "MIN_UNPACKED_BYTES", large)
            Twins(deep, shard_columns if columns_too else shard_layers, layout=PerTensor()).train(2)


@pytest.mark.parametrize("columns_too", [False, True])
def test_large_parameters_travel_by_themselves(columns_too: bool) -> None:
    run_ranks(train_in_pieces, 3, columns_too)


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_in_place_train_alike(ranks: int) -> None:
    run_ranks(train_in_place, ranks)


def in_low_precision() -> None:
    """Beside FSDP2, which computes the same numbers."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models = []
    ctx = FsdpContext(layout=PerTensor())
    for shard in (partial(fully_shard, ctx=ctx), torchs):
        model = deep().float()
        for module in (*model.layers, model):
            shard(module, mp_policy=policy)
        model(tokens()).float().square().mean().backward()
        models.append(model)
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        assert mine.grad.dtype == its.grad.dtype
        torch.testing.assert_close(mine.grad.to_local(), its.grad.to_local())


def test_gradients_in_low_precision_are_fsdp2s() -> None:
    run_ranks(in_low_precision, 2)


# What is refused


def refused() -> None:
    class WithScalar(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(ValueError, match="'scale' of WithScalar is a scalar"):
        fully_shard(WithScalar(), FsdpContext(layout=PerTensor()))
    model = Model()
    with pytest.raises(ValueError, match=r"are cut under FsdpContext\(layout=PerT"):
        fully_shard(model, FsdpContext(), shard_placement_fn=columns)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    with pytest.raises(ValueError, match="which replicas cannot divide"):
        fully_shard(
            model, FsdpContext(mesh, layout=PerTensor(), shard_optimizer_over_replicas=True)
        )
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_what_cannot_be_cut_into_rows_is_refused_before_anything_changes() -> None:
    run_on_fake_group(refused, 2)
