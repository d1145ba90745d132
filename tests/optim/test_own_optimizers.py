"""``fsdp_overlap.optim``: the same numbers and the same state as torch's."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_overlap import FsdpContext, RaggedDTensor, fully_shard, optim
from fsdp_overlap.optim import adamw
from fsdp_overlap.optim.contiguous import find_runs, flatten
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins, same
from support.zoo import Model, shard_layers

OPTIONS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True, "maximize": True},
    {"weight_decay": 0.0, "betas": (0.5, 0.7), "eps": 1e-4},
]


def step_both(names: list[str]) -> None:
    for name in names:
        for options in OPTIONS:
            twins = Twins.of(name, optimizer=optim.AdamW, **options)
            for batch in twins.batches(3):
                twins.backward(*batch)
                twins.step()
                twins.check_parameters()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [1, 3])
def test_adamw_steps_as_on_the_whole_model(world_size: int) -> None:
    run_ranks(
        step_both,
        world_size,
        ["layers", "frozen and partly frozen units", "unused parameters", "odd parameters"],
    )


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": torch.tensor(0.03)},
    ]


def models(count: int, dtype: torch.dtype = torch.float32) -> list[Model]:
    found = []
    for _ in range(count):
        torch.manual_seed(2)
        model = Model().to(dtype)
        shard_layers(model, FsdpContext())
        found.append(model)
    return found


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randint(13, (2, 4), generator=generator)).square().mean().backward()


def check_same(ours: Any, theirs: Any, models: list[Model]) -> None:
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first.to_local(), second.to_local())
        mine, its = ours.state.get(first, {}), theirs.state.get(second, {})
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            assert value.shape == its[key].shape, key
            assert value.dtype == its[key].dtype, key
            assert type(value) is type(its[key]), key
            assert torch.equal(value, its[key]), key


def as_fused(dtype: torch.dtype) -> None:
    """Bit by bit torch's fused AdamW, with parameters that come, go and have a past."""
    pair = models(2, dtype)
    ours = optim.AdamW(groups(pair[0]))
    theirs = torch.optim.AdamW(groups(pair[1]), fused=True)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, theirs)]
    for step in range(6):
        for model in pair:
            # The first two steps without one layer: its steps stay behind.
            model.layers[1].requires_grad_(step > 1)
            model.layers[2].up.bias.requires_grad_(step % 2 == 0)
            model.zero_grad()
            backward(model, step)
        if step == 3:
            ours.zero_grad(set_to_none=False)
            theirs.zero_grad(set_to_none=False)
        for optimizer in (ours, theirs):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        check_same(ours, theirs, pair)
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_adamw_is_torchs_fused_adamw_bit_by_bit(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(as_fused, world_size, dtype)


def exchange(fused: bool | None) -> None:
    """States move from torch's to ours and back, and training goes on as if nothing happened."""
    pair = models(2)
    ours: torch.optim.Optimizer = optim.AdamW(pair[0].parameters())
    theirs: torch.optim.Optimizer = torch.optim.AdamW(pair[1].parameters(), fused=True)
    for step in range(4):
        for model, optimizer in zip(pair, (ours, theirs), strict=True):
            model.zero_grad()
            backward(model, step)
            optimizer.step()
        check_same(ours, theirs, pair)
        if step == 1:
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, theirs)]
            states[1]["param_groups"][0]["fused"] = fused
            # Fresh optimizers, each with the state of the other's kind.
            ours = optim.AdamW(pair[0].parameters())
            theirs = torch.optim.AdamW(pair[1].parameters(), fused=True)
            ours.load_state_dict(states[1])
            theirs.load_state_dict(states[0])
    assert len(spans_of(ours)) < len(list(pair[0].parameters()))


def spans_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    states = [s["exp_avg"].to_local() for s in optimizer.state.values()]
    states = [state for state in states if state.numel()]
    return find_runs([states], [0] * len(states))


@pytest.mark.parametrize("fused", [True, None])
def test_states_move_to_torchs_adamw_and_back(fused: bool | None) -> None:
    run_ranks(exchange, 2, fused)


def from_unsharded() -> None:
    """The state dict of an unsharded AdamW: each rank takes its range."""
    twins = Twins.of("layers", optimizer=optim.AdamW)
    for step, batch in enumerate(twins.batches(4)):
        if step == 2:
            state = copy.deepcopy(twins.twin_optimizer.state_dict())
            twins.optimizer = optim.AdamW(twins.model.parameters(), lr=1.0)
            twins.optimizer.load_state_dict(state)
        twins.backward(*batch)
        twins.step()
        twins.check_parameters()
    wrong = copy.deepcopy(state)
    wrong["state"][0]["exp_avg"] = torch.zeros(5)
    with pytest.raises(RuntimeError, match=r"of shape .* does not broadcast"):
        optim.AdamW(twins.model.parameters()).load_state_dict(wrong)


def test_the_state_of_unsharded_training_is_taken_over() -> None:
    run_ranks(from_unsharded, 2)


def checkpointed(folder: str) -> None:
    """Through torch.distributed.checkpoint, which loads in place, with unequal step counts."""
    pair = models(2)
    optimizers = [optim.AdamW(model.parameters()) for model in pair]
    for step in range(3):
        pair[0].layers[0].requires_grad_(step != 1)
        pair[0].zero_grad()
        backward(pair[0], step)
        optimizers[0].step()
    pair[0].requires_grad_(True)
    state = {"optimizer": get_optimizer_state_dict(pair[0], optimizers[0])}
    dcp.save(state, checkpoint_id=folder)
    fresh = {"optimizer": get_optimizer_state_dict(pair[1], optimizers[1])}
    dcp.load(fresh, checkpoint_id=folder)
    set_optimizer_state_dict(pair[1], optimizers[1], fresh["optimizer"])
    pair[1].load_state_dict(pair[0].state_dict())
    for model, optimizer in zip(pair, optimizers, strict=True):
        model.zero_grad()
        backward(model, 9)
        optimizer.step()
    check_same(*optimizers, pair)


def test_checkpoints_keep_each_parameters_step(tmp_path: Any) -> None:
    run_ranks(checkpointed, 2, str(tmp_path / "checkpoint"))


def pickled() -> None:
    (model,) = models(1)
    optimizer = optim.AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    optimizer.load_state_dict(torch.load(stream))
    model.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_the_state_dict_can_be_saved_locally() -> None:
    run_on_fake_group(pickled, 2)


def steps_written() -> None:
    """Steps that somebody else writes count, although all of them share one memory."""
    pair = models(2)
    ours = optim.AdamW(pair[0].parameters())
    theirs = torch.optim.AdamW(pair[1].parameters(), fused=True)
    for step in range(3):
        for model, optimizer in zip(pair, (ours, theirs), strict=True):
            model.zero_grad()
            backward(model, step)
            optimizer.step()
            if step == 0:
                optimizer.state[model.layers[1].up.weight]["step"].fill_(40)
            if step == 1:
                moment = optimizer.state[model.head.bias]["exp_avg"]
                optimizer.state[model.head.bias]["exp_avg"] = moment * 2
        check_same(ours, theirs, pair)


def test_edits_of_the_state_count() -> None:
    run_ranks(steps_written, 2)


def lined_up() -> nn.Sequential:
    """A model of sizes that leave no gaps in memory between the parameters of a unit."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)))
    ctx = FsdpContext()
    for block in model:
        fully_shard(block, ctx)
    fully_shard(model, ctx)
    return model


def rearranged(change: str) -> None:
    """What users change between two steps counts in the next, although steps look alike."""
    pair = [lined_up(), lined_up()]
    halves = [
        [{"params": list(half.parameters())} for half in (model[:2], model[2:])] for model in pair
    ]
    ours = optim.AdamW(halves[0])
    theirs = torch.optim.AdamW(halves[1], fused=True)
    for step in range(4):
        for model, optimizer in zip(pair, (ours, theirs), strict=True):
            model.zero_grad()
            model(torch.full((2, 8), 0.1 * step + 0.1)).square().mean().backward()
            weights = optimizer.param_groups[0]["params"]
            if step == 2 and change == "a parameter leaves":
                del weights[1]
            elif step == 2 and change == "another takes its place":
                weights[1] = optimizer.param_groups[1]["params"].pop(1)
            elif step == 2 and change == "the order":
                weights.reverse()
            elif step == 2 and change == "no gradient":
                weights[1].grad = None
            elif step == 2 and change == "a gradient elsewhere":
                weights[1].grad = weights[1].grad * 2
            elif step == 2 and change == "a gradient's local tensor elsewhere":
                weights[1].grad._local_tensor = weights[1].grad._local_tensor * 2
            elif step == 2 and change == "a gradient's memory elsewhere":
                local = weights[1].grad.to_local()
                local.data = local * 2
            elif step == 2 and change == "a gradient scaled":
                weights[1].grad.mul_(2)
            elif step == 2 and change == "a sum of gradients":
                model(torch.full((2, 8), 0.5)).sum().backward()
            elif step == 2 and change == "gradients of another pass":
                model.zero_grad()
                model(torch.full((2, 8), 0.5)).sum().backward()
            elif step == 2 and change == "gradients swapped":
                weights[1].grad, weights[5].grad = weights[5].grad, weights[1].grad
            elif step == 2 and change == "a moment elsewhere":
                optimizer.state[weights[1]]["exp_avg"] = optimizer.state[weights[1]]["exp_avg"] * 2
            elif step == 2 and change == "the states of two":
                first, second = (optimizer.state[weights[n]] for n in (1, 2))
                first["step"], second["step"] = torch.tensor(9.0), torch.tensor(7.0)
            elif step == 2 and change == "no states":
                optimizer.state.clear()
            optimizer.step()
        check_same(ours, theirs, pair)


CHANGES = [
    "a parameter leaves",
    "another takes its place",
    "the order",
    "no gradient",
    "a gradient elsewhere",
    "a gradient's local tensor elsewhere",
    "a gradient's memory elsewhere",
    "a gradient scaled",
    "a sum of gradients",
    "gradients of another pass",
    "gradients swapped",
    "a moment elsewhere",
    "the states of two",
    "no states",
]


def each_rearranged() -> None:
    for change in CHANGES:
        rearranged(change)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_remembers_nothing_that_users_changed(world_size: int) -> None:
    run_ranks(each_rearranged, world_size)


def let_go() -> None:
    """What a step remembers keeps no memory, without the cyclic collector."""
    model = lined_up()
    for way in ("moved", "cleared", "deleted"):
        optimizer = optim.AdamW(model.parameters())
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert len(spans_of(optimizer)) == 4
        states = [its["exp_avg"] for its in optimizer.state.values()]
        gradients = [parameter.grad for parameter in model.parameters()]
        memory = [
            StorageWeakRef(each.to_local().untyped_storage())
            for each in [*states, *gradients]
            if each.to_local().numel()
        ]
        assert not any(each.expired() for each in memory)
        del states, gradients
        model.zero_grad()
        gc.disable()
        if way == "moved":
            for parameter in model.parameters():
                its = optimizer.state[parameter]
                its["exp_avg"] = its["exp_avg"].clone()
            del its
        elif way == "cleared":
            optimizer.state.clear()
        else:
            del optimizer
        gc.enable()
        assert all(each.expired() for each in memory), way


@pytest.mark.parametrize("world_size", [1, 3])
def test_states_and_gradients_are_freed_when_they_are_let_go(world_size: int) -> None:
    run_on_fake_group(let_go, world_size)


def not_sharded() -> None:
    """Ignored parameters, other dtypes and plain models are stepped as well."""
    pair = models(2)
    for model in pair:
        plain, narrow = torch.linspace(0, 1, 12).view(3, 4).t(), torch.ones(3, dtype=torch.bfloat16)
        # Given gradients by hand. What requires grad must belong to a unit.
        model.register_parameter("plain", nn.Parameter(plain, requires_grad=False))
        model.register_parameter("narrow", nn.Parameter(narrow, requires_grad=False))
    ours = optim.AdamW(pair[0].parameters())
    theirs = torch.optim.AdamW(pair[1].parameters(), fused=True)
    step_counts = Mock(wraps=adamw.StepCounts)
    for step in range(3):
        for model, optimizer in zip(pair, (ours, theirs), strict=True):
            model.zero_grad()
            backward(model, step)
            model.plain.grad = torch.linspace(-1, 1, 12).view(4, 3)
            model.narrow.grad = torch.ones(3, dtype=torch.bfloat16)
            with patch.object(adamw, "StepCounts", step_counts):
                optimizer.step()
        for name in ("plain", "narrow"):
            assert torch.equal(getattr(pair[0], name), getattr(pair[1], name)), name
    assert torch.equal(pair[0].head.weight.to_local(), pair[1].head.weight.to_local())
    assert step_counts.call_count == 2  # the host reads them once for each dtype


def test_other_parameters_are_stepped_too() -> None:
    run_ranks(not_sharded, 2)


def scaled() -> None:
    twins = Twins.of("layers", optimizer=optim.AdamW)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step, batch in enumerate(twins.batches(3)):
        for scaler, loss in zip(scalers, twins.losses(*batch), strict=True):
            scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 0:
            twins.model.layers[0].up.weight.grad.to_local()[0] = float("nan")
        if step == 1:
            twins.twin.layers[0].up.weight.grad[0, 0] = float("nan")
        for scaler, optimizer in zip(scalers, (twins.optimizer, twins.twin_optimizer), strict=True):
            scaler.step(optimizer)  # which unscales within the fused step
            scaler.update()
            optimizer.zero_grad()
        twins.check_parameters()
    assert {float(s["step"]) for s in twins.optimizer.state.values()} == {2.0}


def test_a_skipped_step_does_not_count() -> None:
    run_ranks(scaled, 2)


def closed() -> None:
    (model,) = models(1)
    optimizer = optim.AdamW(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.zeros(1, 2, dtype=torch.int64)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    plain = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    plain.grad = torch.zeros_like(plain)
    with pytest.raises(RuntimeError, match=r"floating-point parameters, not torch\.complex64"):
        optim.AdamW([plain]).step()


def test_closures_and_refused_parameters() -> None:
    run_ranks(closed, 1)


def clip(world_size: int) -> None:
    for norm_type in (2.0, 1.0, 3.5, float("inf"), 0.0, float("-inf")):
        for name in ("layers", "frozen and partly frozen units", "unused parameters"):
            twins = Twins.of(name)
            twins.backward(*next(twins.batches(1)))
            twins.model.register_parameter("plain", nn.Parameter(torch.ones(2, 2).double()))
            twins.twin.register_parameter("plain", nn.Parameter(torch.ones(2, 2).double()))
            for model in (twins.model, twins.twin):
                model.plain.grad = torch.full((2, 2), 0.3).double()
            for max_norm in (0.1, 1e9):
                norm = optim.clip_grad_norm_(twins.model.parameters(), max_norm, norm_type)
                expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), max_norm, norm_type)
                assert type(norm) is torch.Tensor
                same(norm, expected, f"norm {norm_type} of {name}")
                same(twins.model.plain.grad, twins.twin.plain.grad, "plain")
                for parameter, twin in zip(
                    twins.model.layers.parameters(), twins.twin.layers.parameters(), strict=True
                ):
                    if parameter.grad is not None:
                        same(parameter.grad.full_tensor(), twin.grad, name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_is_that_of_the_whole_model(world_size: int) -> None:
    run_ranks(clip, world_size, world_size)


class Lonely(nn.Module):
    """One rank holds nothing of the scalar, which is all there is of its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def lonely() -> None:
    torch.manual_seed(1)
    model, plain = Lonely(), Lonely()
    plain.load_state_dict(model.state_dict())
    fully_shard(model, FsdpContext())
    ours = optim.AdamW(model.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        for module, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            module(torch.ones(2, 4)).sum().backward()
            clip = optim.clip_grad_norm_ if module is model else nn.utils.clip_grad_norm_
            assert clip(module.parameters(), 0.5).dtype == torch.float64
            optimizer.step()
        for first, second in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(first.full_tensor(), second.detach())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_may_hold_nothing_of_a_dtype(world_size: int) -> None:
    run_ranks(lonely, world_size)


def count_collectives() -> None:
    (model,) = models(1)
    backward(model, 0)
    calls = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = counted
    try:
        optim.clip_grad_norm_(model.parameters(), 1.0)
        assert calls == [1]
    finally:
        dist.all_reduce = all_reduce


def test_clipping_takes_one_collective_of_one_number() -> None:
    run_on_fake_group(count_collectives, 2)


def nonfinite() -> None:
    (model,) = models(1)
    backward(model, 0)
    if dist.get_rank() == 0:
        model.head.weight.grad.to_local()[0] = float("nan")
    before = model.head.bias.grad.full_tensor()
    with pytest.raises(RuntimeError, match="is nan, not finite"):
        optim.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert torch.equal(model.head.bias.grad.full_tensor(), before)
    assert optim.clip_grad_norm_(model.head.bias, 1e9).isfinite()
    assert optim.clip_grad_norm_([], 1.0) == 0


def test_a_bad_norm_raises_on_every_rank_and_scales_nothing() -> None:
    run_ranks(nonfinite, 2)


def test_spans_lie_end_to_end_in_one_storage() -> None:
    whole, other = torch.arange(10.0), torch.arange(10.0)
    parts = [whole[0:3], whole[3:4], whole[5:7], whole[7:10], other[0:2]]
    assert find_runs([parts], [0] * 5) == [(0, 4), (2, 5), (4, 2)]
    assert find_runs([parts], [0, 1, 1, 1, 1]) == [(0, 3), (1, 1), (2, 5), (4, 2)]
    apart = [torch.empty(3), torch.empty(1), other[5:7], other[7:10], torch.empty(2)]
    assert find_runs([parts, apart], [0] * 5)[-2:] == [(2, 5), (4, 2)]
    assert torch.equal(flatten(parts, [(2, 5)])[0], whole[5:])
    assert find_runs([[]], []) == []


def test_a_model_of_many_parameters_is_stepped_in_few_spans() -> None:
    """450 parameters cost tens of kernels: one run a unit."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(8, 8) for _ in range(7))) for _ in range(32))
        )
        ctx = FsdpContext()
        for block in model:
            fully_shard(block, ctx)
        fully_shard(model, ctx)
        optimizer = optim.AdamW(model.parameters())
        for parameter in model.parameters():
            assert isinstance(parameter, RaggedDTensor)
        backward_of = model(torch.ones(2, 8)).sum()
        backward_of.backward()
        optimizer.step()
        assert len(list(model.parameters())) == 448
        assert len(spans_of(optimizer)) == 32
    finally:
        dist.destroy_process_group()


def moments_of_another_dtype(dtype: torch.dtype, moment_dtype: torch.dtype) -> None:
    """Widened, stepped by torch and rounded again, whatever runs and chunks are stepped."""
    chunk, adamw._CPU_CHUNK = adamw._CPU_CHUNK, 10
    (model,) = models(1, dtype)
    values = torch.linspace(0, 1, 12).view(3, 4).t().to(dtype)
    plain = nn.Parameter(values, requires_grad=False)  # given gradients by hand
    model.register_parameter("plain", plain)
    options: dict[str, Any] = {"betas": (0.8, 0.9), "lr": 0.05}
    optimizer = optim.AdamW(model.parameters(), **options, moment_dtype=moment_dtype)
    expected = [p.detach().clone() for p in model.parameters()]
    moments = [[torch.zeros_like(p, dtype=moment_dtype) for p in expected] for _ in range(2)]
    for step in range(4):
        model.zero_grad()
        backward(model, step)
        plain.grad = torch.linspace(-1, 1, 12).view(4, 3).to(dtype)
        if step == 2:  # torch casts a loaded state to the parameter's dtype
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        for index, parameter in enumerate(model.parameters()):
            row = [expected[index], parameter.grad, moments[0][index], moments[1][index]]
            kept = [t.to_local() if isinstance(t, RaggedDTensor) else t for t in row]
            wide = [t.to(torch.float32) for t in kept]
            torch._fused_adamw_(
                *([t] for t in wide),
                [],
                [torch.tensor(step + 1.0)],
                amsgrad=False,
                lr=0.05,
                beta1=0.8,
                beta2=0.9,
                weight_decay=0.01,
                eps=1e-8,
                maximize=False,
            )
            for old, new in zip(kept, wide, strict=True):
                old.copy_(new)
            state = optimizer.state[parameter]
            assert state["exp_avg"].dtype == moment_dtype
            stepped = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
            for mine, theirs in zip(stepped, (kept[0], *kept[2:]), strict=True):
                local = mine.to_local() if isinstance(mine, RaggedDTensor) else mine
                # Where a run begins decides which elements the kernel steps in vectors.
                torch.testing.assert_close(local, theirs, rtol=1e-2, atol=5e-4)
    adamw._CPU_CHUNK = chunk


@pytest.mark.parametrize(
    ("dtype", "moment_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_moments_may_have_a_dtype_of_their_own(
    dtype: torch.dtype, moment_dtype: torch.dtype
) -> None:
    run_ranks(moments_of_another_dtype, 2, dtype, moment_dtype)


def loaded_wide(dtype: torch.dtype) -> None:
    """torch's ``load_state_dict`` casts states to the parameter's dtype: to bf16, here."""
    pair = models(2, torch.bfloat16)
    options: dict[str, Any] = {"lr": 0.05, "moment_dtype": dtype}
    optimizers = [optim.AdamW(model.parameters(), **options) for model in pair]
    for step in range(4):
        for model, optimizer in zip(pair, optimizers, strict=True):
            model.zero_grad()
            backward(model, step)
            optimizer.step()
        if step == 1:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    check_same(*optimizers, pair)


def test_moments_of_another_dtype_are_loaded_unrounded() -> None:
    run_ranks(loaded_wide, 2, torch.float32)
