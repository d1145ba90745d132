"""``Rows()``: sharded parameters are what FSDP2's are, and do what FSDP2's do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_overlap import FsdpContext, Rows, fully_shard
from fsdp_overlap.comm import row_collectives
from fsdp_overlap.comm.row_collectives import InPlaceRows
from fsdp_overlap.layout import Flat, ParamSpec, RowsPlan, Whole, plan_units
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from fsdp_overlap.runtime import bucket
from support import tensor_parallel
from support.ranks import run_ranks
from support.twins import COPIES, NAMES, Twins, same
from support.zoo import VOCABULARY, Model, shard_layers

# Chunks, some of them uneven or empty on up to nine ranks.
shapes = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple)


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def shard_columns(model: Any, ctx: FsdpContext) -> None:
    for layer in model.layers:
        fully_shard(layer, ctx, shard_placement_fn=columns)
    fully_shard(model, ctx, shard_placement_fn=columns)


def deep() -> Any:
    torch.manual_seed(1)
    return Model(layers=3).double()


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(5))


# How parameters lie


@given(some=st.lists(shapes, min_size=1, max_size=4), ranks=st.integers(1, 9), data=st.data())
def test_chunks_are_torchs_and_have_places_of_their_own(
    some: list[tuple[int, ...]], ranks: int, data: st.DataObject
) -> None:
    specs = tuple(
        ParamSpec(
            f"p{number}",
            shape,
            torch.float32,
            cut_dim=data.draw(st.integers(0, len(shape) - 1)),
        )
        for number, shape in enumerate(some)
    )
    [plan] = plan_units([specs], ranks, Rows())
    assert isinstance(plan, RowsPlan)
    ends = (0, 0)
    for index, spec in enumerate(specs):
        chunks = torch.empty(spec.shape).chunk(ranks, spec.cut_dim)
        sizes = [tuple(chunk.shape) for chunk in chunks]
        found = [plan.chunk_shape(spec, rank) for rank in range(ranks)]
        assert found[: len(sizes)] == sizes
        assert all(shape[spec.cut_dim] == 0 for shape in found[len(sizes) :])
        places = plan.offsets[index], plan.starts[index]
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
    for shard in (partial(fully_shard, ctx=FsdpContext(device_mesh, layout=Rows())), torchs):
        model = deep()
        for module in (*model.layers, model):
            shard(module, mesh=device_mesh, shard_placement_fn=placement_fn)
        models.append(model)
    check_alike(*models)


def torchs(module: nn.Module, **options: Any) -> None:
    torchs_fully_shard(module, **options)


def check_alike(ours: nn.Module, theirs: nn.Module, beside_others: bool = False) -> None:
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert isinstance(mine, nn.Parameter)
        assert isinstance(its, DTensor)
        assert (mine.device_mesh, mine.placements) == (its.device_mesh, its.placements), name
        assert mine.to_local().shape == its.to_local().shape, name
        assert torch.equal(mine.to_local(), its.to_local()), name
        assert torch.equal(mine.full_tensor(), its.full_tensor()), name
        if not beside_others:  # torch cannot cut a tensor into strided shards
            whole = mine.full_tensor().detach()
            again = distribute_tensor(whole, mine.device_mesh, mine.placements)
            assert torch.equal(again.to_local(), mine.to_local())


def even_columns(parameter: nn.Parameter) -> Shard | None:
    """FSDP2 cuts no others."""
    is_even = parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if is_even else None


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (2, 2)])
@pytest.mark.parametrize("placement_fn", [None, even_columns])
def test_parameters_are_what_fsdp2s_are(mesh: tuple[int, ...], placement_fn: Any) -> None:
    run_ranks(as_fsdp2s, torch.Size(mesh).numel(), mesh, placement_fn)


def beside_tensor_parallelism() -> None:
    mesh = tensor_parallel.make_mesh()
    ours, theirs = (
        tensor_parallel.parallelize(tensor_parallel.plain(), mesh["tp"]) for _ in range(2)
    )
    tensor_parallel.shard(ours, FsdpContext(mesh["dp"], layout=Rows()))
    for module in (*theirs.layers, theirs):
        torchs_fully_shard(module, mesh=mesh["dp"])
    check_alike(ours, theirs, beside_others=True)
    for optimizer in (partial(torch.optim.AdamW, lr=0.05, foreach=True), tensor_parallel.adamw):
        model = tensor_parallel.parallelize(tensor_parallel.plain(), mesh["tp"])
        tensor_parallel.shard(model, FsdpContext(mesh["dp"], layout=Rows()))
        tensor_parallel.train(mesh, model, tensor_parallel.plain(), optimizer)


def test_parameters_that_tensor_parallelism_cuts() -> None:
    run_ranks(beside_tensor_parallelism, 4)


# Training


def train(options: dict[str, Any]) -> None:
    Twins(deep, options.pop("shard", shard_layers), layout=Rows(), **options).train(3)


def mixed(fqn: str, spec: ParamSpec) -> Rows | Flat | Whole:
    if "up" in fqn:
        return Rows()
    return Whole() if "down" in fqn else Flat()


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "our AdamW": {"optimizer": AdamW},
    "Muon": {"optimizer": Muon, "ns_dtype": torch.double},
    "nothing ahead": {"prefetch": 0},
    "columns": {"shard": shard_columns},
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_training_equals_unsharded_training(mode: str, ranks: int) -> None:
    run_ranks(train, ranks, dict(MODES[mode]))


def train_with(**options: Any) -> None:
    def shard(model: Any, ctx: FsdpContext) -> None:
        for layer in model.layers:
            fully_shard(layer, ctx, **options)
        fully_shard(model, ctx, **options)

    Twins(deep, shard, layout=Rows()).train(2)


def train_several_ways() -> None:
    Twins(deep, shard_layers, layout=Rows(), **COPIES).train(2)
    Twins(deep, shard_layers, layout=Rows(), optimizer=Muon, ns_dtype=torch.double, **COPIES).train(
        2
    )
    Twins(deep, shard_layers, layout=mixed).train(2)
    train_with(reshard_after_forward=2)
    train_with(reshard_after_forward=False)


def test_training_with_copies_and_kept_parts_and_beside_other_layouts() -> None:
    run_ranks(train_several_ways, 4)


def train_in_place() -> None:
    """With the collectives that NCCL gets. Gloo has them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "choose_for_rows", lambda *_: InPlaceRows())
        patch.setattr(row_collectives, "AVG", dist.ReduceOp.SUM)  # gloo has no means
        patch.setattr(row_collectives, "divided", lambda total, _: total / dist.get_world_size())
        Twins(deep, shard_layers, layout=Rows()).train(2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_in_place_train_alike(ranks: int) -> None:
    run_ranks(train_in_place, ranks)


def in_low_precision() -> None:
    """Beside FSDP2, which computes the same numbers."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models = []
    ctx = FsdpContext(layout=Rows())
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


# What can be done with parameters and gradients


def with_penalties() -> None:
    """Sharded parameters that are used in the loss themselves."""
    found = []
    for shard in (partial(fully_shard, ctx=FsdpContext(layout=Rows())), torchs):
        model = deep()
        for module in (*model.layers, model):
            shard(module)
        weights = list(model.layers.parameters())  # FSDP2 shows others of its root after a forward
        for _ in range(2):
            penalty = sum((w.full_tensor() ** 2).sum() for w in weights)
            penalty += sum((w**2).sum().full_tensor() for w in weights)
            (model(tokens()).square().mean() + 0.1 * penalty).backward()
        called: list[torch.Tensor] = []
        for weight in weights:
            weight.register_post_accumulate_grad_hook(called.append)
        sum((w**2).sum().full_tensor() for w in weights).backward()
        assert len(called) == len(weights)
        found.append([weight.grad.full_tensor() for weight in weights])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its)


def test_gradients_flow_to_sharded_parameters_as_in_fsdp2() -> None:
    run_ranks(with_penalties, 2)


def steps_in_backward(layout: Any) -> None:
    """Each parameter is stepped as soon as its gradient is there, and the gradient dropped."""
    model, twin = deep(), deep()
    shard_layers(model, FsdpContext(layout=layout))
    steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    twin_steps = torch.optim.SGD(twin.parameters(), lr=0.1)

    def step(parameter: torch.Tensor) -> None:
        steps[parameter].step()
        steps[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        twin_steps.zero_grad()
        for each in (model, twin):
            each(tokens()).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        twin_steps.step()
        for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
            same(mine.full_tensor(), its.detach(), name)


@pytest.mark.parametrize("layout", [Rows(), Flat()])
def test_an_optimizer_may_step_in_backward(layout: Any) -> None:
    run_ranks(steps_in_backward, 2, layout)


def edits(p: Any) -> Iterator[Callable[[], object]]:
    whole = torch.ones(p.shape, dtype=p.dtype)
    yield lambda: p.add_(1)
    yield lambda: p.data.mul_(2)
    yield lambda: p.detach().add_(1)
    yield lambda: p.to_local().add_(1)
    yield lambda: p.view(-1).add_(3)
    yield lambda: p.copy_(distribute_tensor(whole, p.device_mesh, p.placements))
    yield lambda: p.copy_(2 * whole)
    yield lambda: nn.init.zeros_(p)
    yield lambda: torch._foreach_add_([p], [torch.ones_like(p)])
    yield lambda: torch.mul(p, 2, out=p)
    for options in ({"foreach": True}, {"fused": True}):
        yield lambda options=options: torch.optim.AdamW([p], lr=0.1, **options).step()
    yield lambda: AdamW([p], lr=0.1).step()
    yield lambda: Muon([p], lr=0.1).step()


def edited() -> None:
    model: Any = deep()
    shard_layers(model, FsdpContext(layout=Rows()))
    model(tokens()).sum().backward()
    parameter = model.layers[0].up.weight
    for number, edit in enumerate(edits(parameter)):
        for module in (*model.layers, model):
            module.unshard()
        with torch.no_grad():
            before = model(tokens())
            edit()
            after = model(tokens())
            twin = deep()
            twin.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
            assert not torch.equal(before, after), number
            same(after, twin(tokens()), f"edit {number}")


def test_full_buffers_follow_every_edit() -> None:
    run_ranks(edited, 2)


def clipped() -> None:
    for order in (2.0, 1.0, float("inf"), 0.0):
        model, twin = deep(), deep()
        shard_layers(model, FsdpContext(layout=Rows()))
        for each in (model, twin):
            each(tokens()).square().mean().backward()
        expected = nn.utils.get_total_norm([p.grad for p in twin.parameters()], order)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
        assert isinstance(norm, DTensor)
        if order:  # DTensor does not count across ranks
            same(norm.full_tensor(), expected, "torch's norm")
        same(clip_grad_norm_(model.parameters(), 0.01, order), expected, "our norm")
        clip_grad_norm_(twin.parameters(), 0.01, order)
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            same(mine.grad.full_tensor(), its.grad, "gradient")
    mesh = init_device_mesh("cpu", (2,))
    partial_sum = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    partial_sum.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="placed as Partial"):
        clip_grad_norm_([partial_sum], 1.0)


def test_norms_are_those_of_the_whole_gradients() -> None:
    run_ranks(clipped, 2)


def set_by_hand() -> None:
    model = deep()
    shard_layers(model, FsdpContext(layout=Rows()))
    weight = model.head.weight
    weight.grad = torch.ones_like(weight)
    model(tokens()).sum().backward()
    twin = deep()
    twin(tokens()).sum().backward()
    same(weight.grad.full_tensor(), twin.head.weight.grad + 1, "added to what was there")
    weight.grad = distribute_tensor(torch.ones(weight.shape).double(), weight.device_mesh)
    assert weight.grad.placements == (Replicate(),)
    model(tokens()).sum().backward()
    same(weight.grad.full_tensor(), twin.head.weight.grad + 1, "added to another placement")
    for wrong in (torch.ones(weight.shape), weight.detach()[:1]):
        with pytest.raises(TypeError, match="must be of the same kind, shape"):
            weight.grad = wrong
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        weight.data = weight.detach().clone()


def test_gradients_may_be_set() -> None:
    run_ranks(set_by_hand, 2)


# State


def loaded_as_fsdp2s_tutorial_does(on_meta: bool) -> None:
    """torch's ``distribute_tensor``, and parameters that are assigned."""
    full = deep().state_dict()
    with torch.device("meta" if on_meta else "cpu"):
        model = Model(layers=3).double()
    shard_layers(model, FsdpContext(layout=Rows()))
    sharded = {}
    for name, value in full.items():
        mine = model.state_dict()[name]
        sharded[name] = nn.Parameter(distribute_tensor(value, mine.device_mesh, mine.placements))
    model.load_state_dict(sharded, assign=True)
    same(model(tokens()), deep()(tokens()), "output")
    model(tokens()).sum().backward()


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_full_state_dict_is_loaded_as_fsdp2s_tutorial_does(on_meta: bool) -> None:
    run_ranks(loaded_as_fsdp2s_tutorial_does, 3, on_meta)


def copied_and_pickled() -> None:
    model: Any = deep()
    shard_layers(model, FsdpContext(layout=Rows()))
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(tokens()).sum().backward()
    optimizer.step()
    duplicate, twin_optimizer = copy.deepcopy((model, optimizer))
    check_alike(duplicate, model)
    for each, step in ((model, optimizer), (duplicate, twin_optimizer)):
        each(tokens()).sum().backward()
        step.step()
    check_alike(duplicate, model)
    loose = copy.deepcopy(model.head.weight)
    assert type(loose) is DTensor
    assert torch.equal(loose.grad.full_tensor(), model.head.weight.grad.full_tensor())
    file = io.BytesIO()
    torch.save(dict(model.state_dict()), file)
    file.seek(0)
    for name, value in torch.load(file).items():
        assert type(value) is DTensor
        assert torch.equal(value.full_tensor(), model.state_dict()[name].full_tensor())


def test_models_are_copied_and_parameters_pickled() -> None:
    run_ranks(copied_and_pickled, 2)


# What is refused


def refused() -> None:
    class WithScalar(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(ValueError, match="'scale' of WithScalar is a scalar"):
        fully_shard(WithScalar(), FsdpContext(layout=Rows()))
    model = Model()
    with pytest.raises(ValueError, match=r"other dimensions are cut under FsdpContext\(layout=Row"):
        fully_shard(model, FsdpContext(), shard_placement_fn=columns)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    with pytest.raises(ValueError, match="which copies cannot divide"):
        fully_shard(model, FsdpContext(mesh, layout=Rows(), divide_copies=True))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_what_cannot_be_cut_into_rows_is_refused_before_anything_changes() -> None:
    run_ranks(refused, 2)
