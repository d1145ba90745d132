"""What can be done with parameters in rows, and with their gradients: what FSDP2 lets users do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_overlap import FsdpContext, PerTensor, RaggedDTensor, fully_shard
from fsdp_overlap import distribute_tensor as ours
from fsdp_overlap.layout import Flat, TensorAtomic
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from support.ranks import run_ranks
from support.rows import check_alike, deep, tokens, torchs
from support.twins import same
from support.zoo import Model, shard_layers


def with_penalties() -> None:
    """Sharded parameters that are used in the loss themselves."""
    found = []
    for shard in (partial(fully_shard, ctx=FsdpContext(layout=PerTensor())), torchs):
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


@pytest.mark.parametrize("layout", [PerTensor(), Flat()])
def test_an_optimizer_may_step_in_backward(layout: Any) -> None:
    run_ranks(steps_in_backward, 2, layout)


def with_gradient_hooks(layout: Any) -> None:
    """Hooks see the mean over ranks, and what they return is the gradient, also in accumulation."""
    model, twin = deep(), deep()
    shard_layers(model, FsdpContext(layout=layout))
    seen: list[Any] = []
    for each in (model, twin):
        weight, bias = each.layers[0].up.weight, each.layers[1].down.bias
        weight.register_hook(lambda gradient: gradient * 2)
        handle = bias.register_hook(lambda gradient: seen.append(gradient.sum()))
        bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
        for _ in range(2):
            each(tokens()).square().mean().backward()
        handle.remove()
        each(tokens()).square().mean().backward()
    half = len(seen) // 2
    for mine, its in zip(seen[:half], seen[half:], strict=True):
        assert float(mine) == pytest.approx(float(its))
    assert half == 5
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        same(mine.grad.full_tensor(), its.grad, name)


@pytest.mark.parametrize("layout", [PerTensor(), Flat()])
def test_hooks_of_gradients_see_reduced_ones(layout: Any) -> None:
    run_ranks(with_gradient_hooks, 2, layout)


def with_odd_gradient_hooks(layout: Any) -> None:
    """Hooks may return whole tensors and keep what they see. What they raise is undone by reset."""
    model, twin = deep(), deep()
    ctx = FsdpContext(layout=layout)
    shard_layers(model, ctx)
    kept: list[Any] = []
    for each in (model, twin):
        weight, bias = each.layers[0].up.weight, each.layers[1].down.bias
        values = torch.arange(float(weight.numel()), dtype=torch.float64).view(weight.shape)
        handle = weight.register_hook(lambda _, values=values: values)
        bias.register_hook(kept.append)
        each(tokens()).square().mean().backward()
        handle.remove()
        bias.grad.zero_()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    same(kept[0].full_tensor(), kept[1], "kept")
    same_outputs(model, twin, "of a whole gradient")

    def fail(_: object) -> NoReturn:
        raise KeyError("the user's own")

    weight = model.layers[0].up.weight
    for register, hook, error in (
        (weight.register_hook, fail, KeyError),
        (weight.register_post_accumulate_grad_hook, fail, KeyError),
        (weight.register_hook, lambda g: g.sum(), RuntimeError),
    ):
        handle = register(hook)
        with pytest.raises(error, match=r"user|returned a gradient of shape"):
            model(tokens()).square().mean().backward()
        handle.remove()
        with pytest.raises(RuntimeError, match="the last backward did not finish"):
            model(tokens())
        ctx.reset()
        for each in (model, twin):
            each.zero_grad()
            each(tokens()).square().mean().backward()
        for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
            same(mine.grad.full_tensor(), its.grad, name)


@pytest.mark.parametrize("layout", [PerTensor(), Flat()])
def test_hooks_of_gradients_may_keep_replace_or_raise(layout: Any) -> None:
    run_ranks(with_odd_gradient_hooks, 2, layout)


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
    shard_layers(model, FsdpContext(layout=PerTensor()))
    model(tokens()).sum().backward()
    parameter = model.layers[0].up.weight
    for number, edit in enumerate(edits(parameter)):
        with torch.no_grad():
            before = model(tokens())
            for module in (*model.layers, model):
                module.unshard()
            edit()
            after = model(tokens())
            twin = deep()
            twin.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
            assert not torch.equal(before, after), number
            same(after, twin(tokens()), f"edit {number}")


def test_full_buffers_follow_every_edit() -> None:
    run_ranks(edited, 2)


def edits_parts() -> None:
    """A part that lies on several ranks is a copy. torch and FSDP2 lose edits of it silently."""
    layer = nn.Linear(7, 5)
    fully_shard(layer, FsdpContext(layout=PerTensor()))
    weight = layer.weight
    before = weight.full_tensor().detach()
    parts: list[Callable[[Any], Any]] = [
        lambda w: w[:1],
        lambda w: w[3],
        lambda w: w[1:3][0],
        lambda w: w.narrow(0, 0, 2),
        lambda w: w.select(0, 4),
        lambda w: w.split(2)[0],
        lambda w: w.chunk(2)[1],
        lambda w: w.diagonal(),
    ]
    for number, part in enumerate(parts):
        of_whole = part(before)
        with torch.no_grad():
            for given in (weight, weight.data, weight.detach()):
                copied = part(given)
                same(copied.full_tensor(), of_whole, f"part {number}")
                same((copied * 2).mul_(2).full_tensor(), 4 * of_whole, f"part {number}")
                for edit in ("zero_", "sqrt_"):
                    with pytest.raises(RuntimeError, match=r"would be lost.*copy_\(\)"):
                        getattr(copied, edit)()
        same(weight.full_tensor(), before, "nothing was changed")
    with torch.no_grad():
        weight[:, 1].zero_()  # each rank has its own rows' part
    before[:, 1] = 0
    same(weight.full_tensor(), before, "edited")


def test_edits_of_a_part_that_is_a_copy_raise() -> None:
    run_ranks(edits_parts, 2)


def put_together(tensor_ranks: int) -> None:
    """Of each parameter this rank holds all, or all of a tile, or all of a copy."""
    model: Any = deep()
    mesh = init_device_mesh("cpu", (1, tensor_ranks), mesh_dim_names=("data", "tensor"))
    for layer in model.layers if tensor_ranks > 1 else ():
        parallelize_module(
            layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    shard_layers(model, FsdpContext(mesh["data"], layout=PerTensor()))
    model(tokens()).sum().backward()
    saved = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    before = copy.deepcopy(saved)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, whole in saved.items():
        assert torch.equal(whole, before[name]), name
        assert not torch.equal(whole, model.get_parameter(name).full_tensor()), name
    weight = model.layers[0].down.bias
    gradient = torch.autograd.grad(weight.full_tensor().square().sum(), weight)[0]
    same(gradient.full_tensor(), 2 * weight.full_tensor().detach(), "gradient")


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_what_was_put_together_does_not_follow_the_parameter(tensor_ranks: int) -> None:
    run_ranks(put_together, tensor_ranks, tensor_ranks)


def clipped() -> None:
    for order in (2.0, 1.0, float("inf"), 0.0):
        model, twin = deep(), deep()
        shard_layers(model, FsdpContext(layout=PerTensor()))
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
    shard_layers(model, FsdpContext(layout=PerTensor()))
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


def test_gradients_may_be_set() -> None:
    run_ranks(set_by_hand, 2)


# Data


def same_outputs(model: nn.Module, twin: nn.Module, label: str) -> None:
    """Full buffers must follow what was done to parameters."""
    with torch.no_grad():
        same(model(tokens()), twin(tokens()), label)
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        same(mine.full_tensor().detach(), its.detach(), f"{label}: {name}")


def swapped(model: Any) -> Iterator[None]:
    """The common recipe of an average that is evaluated: nothing is copied, names change hands."""
    averages = {name: p.clone().mul_(0.5) for name, p in model.named_parameters()}
    backup = {}
    for name, parameter in model.named_parameters():
        backup[name], parameter.data = parameter.data, averages[name]
    yield
    for name, parameter in model.named_parameters():
        parameter.data = backup[name]
    yield
    first, second = model.layers[0].up.weight, model.layers[1].up.weight
    first.data, second.data = second.data, first.data
    yield
    old = first.detach()
    view = first.data.view(-1)
    first.data = first.data.view_as(first).add(1)
    old.zero_()
    view.zero_()
    yield
    first.detach().data = second.detach()  # only the alias is another
    yield


def data_assigned(layout: Any, tensor_ranks: int) -> None:
    model, twin = deep(), deep()
    mesh = init_device_mesh(
        "cpu", (2 // tensor_ranks, tensor_ranks), mesh_dim_names=("data", "tensor")
    )
    for layer in model.layers if tensor_ranks > 1 else ():
        parallelize_module(
            layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    shard_layers(model, FsdpContext(mesh["data"], layout=layout))
    for each in (model, twin):
        each(tokens()).sum().backward()
    same_outputs(model, twin, "before")
    for each in (model, twin):
        for parameter in each.parameters():
            parameter.data += 1
            parameter.data *= 0.5
            parameter.data = parameter.data
            parameter.data -= 0.25 * parameter.grad
            parameter.data = parameter.data.sub(parameter.data.mean(dim=-1, keepdim=True))
            parameter.grad.data *= 0.5
            if not isinstance(layout, PerTensor):  # whose gradients are torch's own DTensors
                parameter.grad.data = parameter.grad.data + parameter.data
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    same_outputs(model, twin, "edited through data")
    for each in (model, twin):
        count = sum(p.numel() for p in each.parameters())
        vector = torch.linspace(-1, 1, count, dtype=torch.float64)
        nn.utils.vector_to_parameters(vector, each.parameters())
    same_outputs(model, twin, "from one vector")
    if tensor_ranks == 1:  # ranges of tiles have no views
        for number, _ in enumerate(zip(swapped(model), swapped(twin), strict=True)):
            same_outputs(model, twin, f"swapped {number}")
    weight = model.layers[0].down.bias
    before = weight.full_tensor()
    for wrong in (weight.data.float(), weight.data.new_zeros(99), torch.zeros(99)):
        with pytest.raises(
            RuntimeError, match=r"of \(shape, dtype, device\) .* cannot be replaced"
        ):
            weight.data = wrong
    assert torch.equal(weight.full_tensor(), before)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", [PerTensor(), Flat(), TensorAtomic()])
@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_data_may_be_assigned_as_without_sharding(layout: Any, tensor_ranks: int) -> None:
    run_ranks(data_assigned, 2, layout, tensor_ranks)


NUMBERS: list[Callable[[Any], Any]] = [
    lambda p: float(p.sum()),
    lambda p: p.square().sum().item(),
    lambda p: float(p.grad.norm()),
    lambda p: int((p > 0).sum()),
    lambda p: bool(torch.isnan(p).any()),
    lambda p: 1 if p.abs().max() > 0.2 else 0,
    lambda p: float(p[0, 0]),
    lambda p: float(p[-1, -1]),
    lambda p: float(p.std()),
    lambda p: float(p.clone().mean()),
    lambda p: float(p.sum(0, keepdim=True).sum(1)),
    lambda p: int(p.count_nonzero()),
    lambda p: float(torch._foreach_norm([p])[0]),
]


def numbers(layout: Any) -> None:
    model, twin = deep(), deep()
    shard_layers(model, FsdpContext(layout=layout))
    for each in (model, twin):
        each(tokens()).square().mean().backward()
    mine, its = model.layers[0].up.weight, twin.layers[0].up.weight
    for number, ask in enumerate(NUMBERS):
        assert ask(mine) == pytest.approx(ask(its), rel=1e-6), number
    # Over other meshes numbers are torch's, which takes no collective.
    other = init_device_mesh("cpu", (3,), mesh_dim_names=("other",))
    part = DTensor.from_local(torch.ones(()), other, [Partial()])
    assert part.device_mesh.get_local_rank() or float(part) == 1


@pytest.mark.parametrize("layout", [PerTensor(), Flat()])
def test_a_number_is_that_of_the_whole(layout: Any) -> None:
    run_ranks(numbers, 3, layout)


# State


def load_as_fsdp2s_tutorial_does(model: nn.Module, distribute: Callable[..., DTensor]) -> None:
    sharded = {}
    meta = model.state_dict()
    for name, value in deep().state_dict().items():
        mine: Any = meta[name]
        sharded[name] = nn.Parameter(distribute(value, mine.device_mesh, mine.placements))
    model.load_state_dict(sharded, assign=True)


def loaded_as_fsdp2s_tutorial_does(layout: Any, on_meta: bool) -> None:
    found = []
    for shard in (partial(fully_shard, ctx=FsdpContext(layout=layout)), torchs):
        with torch.device("meta" if on_meta else "cpu"):
            model = Model(layers=3).double()
        for module in (*model.layers, model):
            shard(module)
        is_in_ranges = any(isinstance(each, RaggedDTensor) for each in model.parameters())
        if is_in_ranges:
            with pytest.raises(
                RuntimeError,
                match=r"unsupported placements RaggedShard.*from fsdp_overlap import "
                r"distribute_tensor, .* or shard with FsdpContext\(layout=PerTensor\(\)\)",
            ):
                load_as_fsdp2s_tutorial_does(model, distribute_tensor)
        load_as_fsdp2s_tutorial_does(model, ours if is_in_ranges else distribute_tensor)
        found.append(model(tokens()))
        found[-1].sum().backward()
        found.extend(p.grad.full_tensor() for p in model.parameters())
    half = len(found) // 2
    for mine, its in zip(found[:half], found[half:], strict=True):
        same(mine, its, "output or gradient")


@pytest.mark.parametrize("layout", [PerTensor(), Flat()])
@pytest.mark.parametrize("on_meta", [False, True])
def test_a_full_state_dict_is_loaded_as_fsdp2s_tutorial_does(layout: Any, on_meta: bool) -> None:
    run_ranks(loaded_as_fsdp2s_tutorial_does, 3, layout, on_meta)


def copied_and_pickled() -> None:
    model: Any = deep()
    shard_layers(model, FsdpContext(layout=PerTensor()))
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
