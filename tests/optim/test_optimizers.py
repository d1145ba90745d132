"""torch's optimizers, scalers and averages on sharded parameters. All as without sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import swa_utils

from fsdp_overlap import Flat, FsdpContext, RaggedDTensor, TensorAtomic, fully_shard
from support.optimizers import FORMS, OPTIMIZERS
from support.ranks import run_ranks
from support.twins import Twins, same
from support.zoo import ZOO, Model, shard_layers

FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}


def optimize(name: str, forms: list[str], reshard: bool) -> None:
    for options in OPTIMIZERS[name]:
        for form in forms:
            twins = Twins(
                *ZOO["frozen and partly frozen units"],
                optimizer=getattr(torch.optim, name),
                **options,
                **FORMS[form],
            )
            twins.model.set_reshard_after_forward(reshard)
            twins.model.set_reshard_after_backward(reshard)
            for batch in twins.batches(3):
                twins.backward(*batch)
                twins.step()
                twins.check_parameters()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_the_whole_model(name: str) -> None:
    forms = [form for form in FORMS if form != "fused" or name in FUSED]
    run_ranks(optimize, 2, name, forms, True)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "reshard"), [(1, True), (3, False), (4, True)])
def test_optimizers_step_at_other_world_sizes(world_size: int, reshard: bool) -> None:
    for name in ("AdamW", "Adafactor", "Rprop"):
        run_ranks(optimize, world_size, name, ["default", "foreach"], reshard)


def capturable() -> None:
    for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "ASGD"):
        twins = Twins.of("layers", optimizer=getattr(torch.optim, name), capturable=True)
        twins.backward(*next(twins.batches(1)))
        for optimizer in (twins.optimizer, twins.twin_optimizer):
            with pytest.raises(AssertionError, match="capturable=True"):
                optimizer.step()


def test_capturable_is_refused_on_a_cpu_as_by_torch() -> None:
    run_ranks(capturable, 1)


def clip(foreach: bool | None) -> None:
    for norm_type in (1.0, 2.0, 3.0, float("inf"), 0.0, float("-inf"), -1.0):
        twins = Twins.of("layers")
        twins.backward(*next(twins.batches(1)))
        for _ in range(2):
            norm, expected = (
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)
                for model in (twins.model, twins.twin)
            )
            assert type(norm) is torch.Tensor
            same(norm, expected, f"norm {norm_type}")
            twins.check_gradients()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("foreach", "world_size"), [(True, 3), (False, 2), (None, 4)])
def test_gradient_norms_are_of_the_whole_model(foreach: bool | None, world_size: int) -> None:
    run_ranks(clip, world_size, foreach)


def clip_some_plain(order: float) -> None:
    """Some parameters are not sharded, and trained alike on every rank."""
    model, twin = Model(layers=2).double(), Model(layers=2).double()
    twin.load_state_dict(model.state_dict())
    plain = set(model.head.parameters())
    ctx = FsdpContext()
    for module in (*model.layers, model):
        fully_shard(module, ctx, ignored_params=plain)
    tokens = torch.arange(10).view(2, 5)
    for each in (model, twin):
        each(tokens).square().mean().backward()
    norms = [clip_grad_norm_(each.parameters(), 0.1, order) for each in (model, twin)]
    same(*norms, "norm")
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        gradient = mine.grad if mine in plain else mine.grad.full_tensor()
        same(gradient, its.grad, name)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_gradients_that_are_not_sharded_count_in_the_norm(order: float) -> None:
    run_ranks(clip_some_plain, 2, order)


def clip_by_value(foreach: bool) -> None:
    twins = Twins.of("layers")
    twins.backward(*next(twins.batches(1)))
    for model in (twins.model, twins.twin):
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
    twins.check_gradients()


@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped_by_value(foreach: bool) -> None:
    run_ranks(clip_by_value, 2, foreach)


def nonfinite(value: float, norm_type: float) -> None:
    """Only the last rank's range has the bad element."""
    twins = Twins.of("layers")
    twins.backward(*next(twins.batches(1)))
    gradient = twins.model.head.weight.grad
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient.to_local()[-1] = value
    norm = nn.utils.clip_grad_norm_(twins.model.parameters(), 1e9, norm_type)
    assert not torch.isfinite(norm)
    assert norm.isnan() == (value != value)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0, norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_on_one_rank_is_seen_on_all(value: float, norm_type: float) -> None:
    run_ranks(nonfinite, 2, value, norm_type)


def scale(name: str, fused: bool) -> None:
    twins = Twins.of("layers", optimizer=getattr(torch.optim, name), fused=fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step, batch in enumerate(twins.batches(4)):
        for scaler, loss in zip(scalers, twins.losses(*batch), strict=True):
            scaler.scale(loss).backward()
        if step == 1:  # an overflow that one rank has
            if dist.get_rank() == 0:
                twins.model.layers[0].up.weight.grad.to_local()[0] = float("inf")
            twins.twin.layers[0].up.weight.grad[0, 0] = float("inf")
        before = [parameter.full_tensor() for parameter in twins.model.parameters()]
        for scaler, optimizer in zip(scalers, (twins.optimizer, twins.twin_optimizer), strict=True):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (8.0, 4.0, 4.0, 8.0)[step]
        twins.check_parameters()
        is_same = map(
            torch.equal, before, (parameter.full_tensor() for parameter in twins.model.parameters())
        )
        assert all(is_same) == (step == 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size: int, fused: bool) -> None:
    run_ranks(scale, world_size, "AdamW", fused)


AVERAGES: dict[str, dict[str, Callable[..., Any]]] = {
    "swa": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
}


def average(name: str) -> None:
    twins = Twins.of("layers")
    averages = [
        swa_utils.AveragedModel(model, **AVERAGES[name]) for model in (twins.model, twins.twin)
    ]
    plain = [parameter.detach().clone() for parameter in twins.model.parameters()]
    for batch in twins.batches(3):
        twins.backward(*batch)
        twins.step()
        for averaged, model in zip(averages, (twins.model, twins.twin), strict=True):
            averaged.update_parameters(model)
        with torch.no_grad():
            for mean, parameter in zip(plain, twins.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    for parameter, expected in zip(
        averages[0].module.parameters(), averages[1].module.parameters(), strict=True
    ):
        same(parameter.full_tensor(), expected.detach(), name)
    tokens = next(twins.batches(1))[0]
    with torch.no_grad():
        same(averages[0](twins.mine(tokens)), averages[1](twins.mine(tokens)), "averaged model")
    twins.train(2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_averaged_models_average_shards(world_size: int, name: str) -> None:
    run_ranks(average, world_size, name)


def zero(set_to_none: bool) -> None:
    twins = Twins.of("layers")
    for batch in twins.batches(3):
        twins.backward(*batch)
        twins.check_gradients()
        for each in (twins.model, twins.twin, twins.optimizer, twins.twin_optimizer):
            each.zero_grad(set_to_none=set_to_none)
        twins.check_gradients()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    run_ranks(zero, 2, set_to_none)


def step_by_data(parameter: Any, state: dict[str, Any]) -> None:
    """One step as optimizers outside of torch are written: through data, without no_grad(), with
    what Prodigy, also sliced, SAM and Lookahead ask of a parameter."""
    gradient = parameter.grad.data
    if not state:
        state["first"] = parameter.flatten().detach().clone()
        state["slow"] = parameter.clone().detach()
        state["old"] = parameter.data
        state["sliced"] = parameter.flatten()[::11].detach().clone()
        state["sum"] = torch.zeros_like(parameter.data.flatten()[::11]).detach()
    sliced = gradient.flatten()[::11]
    state["sum"].mul_(0.9).add_(sliced, alpha=0.5)
    difference = state["sliced"].data - parameter.data.flatten()[::11]
    rate = 0.1 + torch.dot(sliced, difference).item() + state["sum"].abs().sum().item()
    moved = parameter.data.flatten() - state["first"].data
    distance = torch.dot(gradient.flatten(), moved).item() + moved.abs().sum().item()
    ascent = parameter.data + gradient * (0.1 / (gradient.norm(p=2) + 1e-12))
    state["old"], parameter.data = parameter.data, ascent
    noise = torch.zeros_like(parameter).add_(parameter, alpha=1e-3 * float(parameter.std()))
    parameter.data = state["old"]
    parameter.data.add_(gradient, alpha=-rate / (1 + abs(distance))).sub_(noise)
    state["slow"].add_(parameter.data - state["slow"], alpha=0.5)
    parameter.data.copy_(state["slow"])


def step_without_no_grad(layout: Any) -> None:
    model, twin = Model(layers=2).double(), Model(layers=2).double()
    twin.load_state_dict(model.state_dict())
    shard_layers(model, FsdpContext(layout=layout))
    states: list[dict[str, dict[str, Any]]] = [{}, {}]
    tokens = torch.arange(10).view(2, 5)
    for step in range(3):
        for each, state in zip((model, twin), states, strict=True):
            each.zero_grad()
            each(tokens).square().mean().backward()
            for name, parameter in each.named_parameters():
                step_by_data(parameter, state.setdefault(name, {}))
        for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
            same(mine.full_tensor().detach(), its.detach(), f"{name} after step {step}")


@pytest.mark.parametrize(
    "layout", [Flat(), TensorAtomic()]
)  # DTensors of uneven rows are not flattened
def test_steps_through_data_need_no_no_grad(layout: Any) -> None:
    run_ranks(step_without_no_grad, 2, layout)


def take_every_nth() -> None:
    """Vectors of every n-th element share memory, and gather and compute as plain ones."""
    whole = torch.arange(35.0).view(5, 7)
    model = nn.Linear(7, 5, bias=False)
    model.weight.data = whole.clone()
    weight = fully_shard(model, FsdpContext()).weight.data
    assert isinstance(weight, RaggedDTensor)
    for take in (
        lambda w: w.flatten()[::11],
        lambda w: w.flatten()[3:30:4],
        lambda w: w.flatten()[34::40],  # one, on the last rank
        lambda w: w[:, 2],
        lambda w: w[1:4, -1],
        lambda w: w[:, 1][::2],
    ):
        mine, its = take(weight), take(whole)
        assert torch.equal(mine.full_tensor(), its)
        assert torch.equal((mine * 2 + mine.clone()).full_tensor(), its * 3)
        assert torch.equal(torch.dot(mine, mine + 1), torch.dot(its, its + 1))
        mine.mul_(2)
        its.mul_(2)
        assert torch.equal(weight.full_tensor(), whole)
    assert torch.equal(model(torch.eye(7)).detach(), whole.t())
    with pytest.raises(RuntimeError, match="not contiguous in the flattened tensor"):
        weight[:, 1:3]


def test_vectors_of_every_nth_element() -> None:
    run_ranks(take_every_nth, 3)
