"""Steps in a thread, while backward and the next forward run: the same bits as without it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp_overlap import PerTensor
from fsdp_overlap.checkpoint import ShardStager
from fsdp_overlap.engine.mesh import ParamGroupEdits
from fsdp_overlap.layout import BlockAtomic, Flat, LayoutRule, TensorAtomic
from fsdp_overlap.optim import AdamW, LayerWise, Muon, OverlapPolicy, clip_grad_norm_
from fsdp_overlap.optim.adamw import KernelCall
from fsdp_overlap.optim.host_thread import Call, HostThread
from fsdp_overlap.optim.layer_wise_batches import GroupOptimizer, OwnBatch
from fsdp_overlap.optim.states import different_option
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.weights import WeightResharder, export_weights
from support.ranks import run_ranks
from support.twins import COPIES, Twins, layer_wise

LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "blocks": BlockAtomic(rows=2),
    "whole": TensorAtomic(),
    "rows": PerTensor(),
}
POLICIES = {
    "in backward": OverlapPolicy(),
    "in little memory": OverlapPolicy(buffer_bytes=0),
    "clipped": OverlapPolicy(max_norm=0.1),
}
ADAMW: dict[str, Any] = {"optimizer": AdamW}
MUON: dict[str, Any] = {"optimizer": Muon, "ns_dtype": torch.double}


class Counting(torch.optim.Optimizer):
    """Steps by means, which it replaces in each step, as it does the data of parameters, and by
    counts in its states and its group."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "steps": torch.tensor(0.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            group["late"] = group.get("late", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = [0.5 * state.get("mean", [0.0])[0] + parameter.grad]
                    state["steps"] = state.get("steps", 0) + 1
                    rate = group["lr"] / (float(group["steps"]) + group["late"] + state["steps"])
                    parameter.data = parameter.data - rate * state["mean"][0]


LAYER_WISE: dict[str, Any] = {"optimizer": layer_wise}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "muon": MUON,
    "layer-wise": LAYER_WISE,
    "layer-wise, counting": {**LAYER_WISE, "factory": Counting},
}
WHOLE: dict[str, Any] = {**LAYER_WISE, "factory": Counting, "layout": TensorAtomic()}


def pair(policy: OverlapPolicy, name: str = "layers", **options: Any) -> tuple[Twins, Twins]:
    """Return the same model twice. The optimizer of the second overlaps."""
    options = {"optimizer": AdamW} | options
    return Twins.of(name, **options), Twins.of(name, overlap=policy, **options)


def same(plain: Twins, overlapped: Twins) -> None:
    pairs = zip(plain.model.named_parameters(), overlapped.model.parameters(), strict=True)
    for (name, parameter), other in pairs:
        assert torch.equal(parameter.to_local(), other.to_local()), name  # type: ignore[operator]
    states = (tree_leaves(list(each.optimizer.state.values())) for each in (plain, overlapped))
    for both in zip(*states, strict=True):
        mine, its = (x.to_local() if isinstance(x, DTensor) else x for x in both)
        assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
    for mine, its in zip(
        *(each.optimizer.param_groups for each in (plain, overlapped)), strict=True
    ):
        assert different_option(mine, its) is None, (mine, its)


def train(
    policy: OverlapPolicy,
    name: str = "layers",
    steps: int = 4,
    backward: Callable[[Twins, Any], None] | None = None,
    **options: Any,
) -> None:
    twins = pair(policy, name, **options)
    for batches in zip(*[twins[0].batches(2 * steps)] * 2, strict=True):
        for each in twins:
            (backward or plain_backward)(each, batches)
            step(each, policy)
    assert is_overlapped(twins[1])
    same(*twins)


def step(twins: Twins, policy: OverlapPolicy) -> None:
    optimizer: Any = twins.optimizer
    if optimizer.overlapped is None and policy.max_norm is not None:
        # In the optimizer's order, because the order of sums has a part in the last bit.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip_grad_norm_(parameters, policy.max_norm)
    optimizer.step()
    optimizer.zero_grad()


def is_overlapped(twins: Twins) -> bool:
    """Return whether steps were handed over."""
    optimizer: Any = twins.optimizer
    return optimizer.overlapped is not None and optimizer.overlapped._thread._thread is not None


def plain_backward(twins: Twins, batches: Any) -> None:
    tokens, targets = batches[0]
    twins.losses(tokens, targets)[0].backward()


@pytest.mark.pairs
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_gives_the_same_bits(optimizer: str, layout: str, policy: str) -> None:
    options = OPTIMIZERS[optimizer]
    run_ranks(partial(train, layout=LAYOUTS[layout], **options), 2, POLICIES[policy])


@contextmanager
def late(seconds: float = 0.02) -> Iterator[None]:
    """Have the thread begin each step late."""

    def slow(run: Callable[..., None]) -> Callable[..., None]:
        def slowly(*args: Any, **options: Any) -> None:
            if threading.current_thread().name == "host step":
                time.sleep(seconds)
            run(*args, **options)

        return slowly

    with (
        patch.object(KernelCall, "run", slow(KernelCall.run)),
        patch.object(GroupOptimizer, "step", slow(GroupOptimizer.step)),
    ):
        yield


def train_late(policy: OverlapPolicy, name: str = "layers", **options: Any) -> None:
    with late():
        train(policy, name, **options)


KINDS: dict[str, dict[str, Any]] = {"adamw": ADAMW, "layer-wise": WHOLE}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "options",
    [{"layout": Flat()}, {"layout": PerTensor()}, WHOLE],
    ids=["flat", "rows", "layer-wise"],
)
def test_a_gather_waits_for_a_late_step(options: dict[str, Any], policy: str) -> None:
    run_ranks(partial(train_late, **options), 2, POLICIES[policy])


def train_without_waiting(options: dict[str, Any]) -> None:
    with late(0.05), patch.object(ParamGroupEdits, "finish_step", lambda edits: None):
        for policy in (POLICIES["in backward"], POLICIES["clipped"]):
            with pytest.raises(AssertionError):
                train(policy, steps=3, **options)


@pytest.mark.parametrize("optimizer", KINDS)
def test_without_that_wait_other_values_are_gathered(optimizer: str) -> None:
    run_ranks(train_without_waiting, 2, KINDS[optimizer])


MODELS = (
    "nested units",
    "tied parameters",
    "frozen and partly frozen units",
    "unused parameters",
    "unused on some ranks",
    "a layer that runs several times",
    "checkpointed",
    "checkpointed, reentrant",
    "odd parameters",
    "dynamic order",
)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("policy", ["in backward", "clipped"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_kinds(name: str, policy: str, optimizer: str) -> None:
    run_ranks(partial(train_late, **KINDS[optimizer]), 2, POLICIES[policy], name)


MESHES: dict[str, dict[str, Any]] = {
    "copies": COPIES,
    "divided copies": {**COPIES, "shard_optimizer_over_replicas": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["in backward", "clipped"])
@pytest.mark.parametrize("mesh", MESHES)
def test_replicas(mesh: str, policy: str) -> None:
    run_ranks(partial(train_late, **MESHES[mesh]), 4, POLICIES[policy])


def accumulate(verb: str, twins: Twins, batches: Any) -> None:
    for index in range(3):
        if verb:
            getattr(twins.model, verb)(index == 2)
        plain_backward(twins, batches)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["in backward", "clipped"])
@pytest.mark.parametrize("verb", ["set_is_last_backward", "set_requires_gradient_sync"])
def test_accumulation(verb: str, policy: str) -> None:
    run_ranks(partial(train_late, backward=partial(accumulate, verb)), 2, POLICIES[policy])


def test_accumulation_of_clipped_gradients_needs_no_verb() -> None:
    run_ranks(partial(train_late, backward=partial(accumulate, "")), 2, POLICIES["clipped"])


def accumulate_unsaid() -> None:
    _, twins = pair(POLICIES["in backward"])
    batches = list(zip(twins.batches(2), strict=True))
    plain_backward(twins, batches[0])
    twins.step()
    plain_backward(twins, batches[0])
    with pytest.raises(RuntimeError, match=r"call set_is_last_backward\(False\)"):
        plain_backward(twins, batches[1])


def test_backwards_that_nobody_said_are_not_the_last_are_an_error() -> None:
    run_ranks(accumulate_unsaid, 1)


def read_gradients() -> None:
    _, twins = pair(POLICIES["in backward"])
    batch = next(zip(twins.batches(1), strict=True))
    plain_backward(twins, batch)
    twins.step()
    plain_backward(twins, batch)
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match=r"OverlapPolicy\(max_norm=...\)"):
            clip(twins.model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="used in backward"):
        next(twins.model.parameters()).grad.norm()
    twins.step()
    assert all(parameter.grad is None for parameter in twins.model.parameters())


def test_a_gradient_that_was_used_cannot_be_read_or_clipped() -> None:
    run_ranks(read_gradients, 1)


def replaces_a_state() -> None:
    _, twins = pair(POLICIES["in backward"], layout=TensorAtomic(), **MUON)
    for batch in zip(twins.batches(2), strict=True):
        twins.step()
        plain_backward(twins, batch)
    finish_pending_steps()
    state = next(value for value in twins.optimizer.state.values() if "momentum_buffer" in value)
    moment = state["momentum_buffer"]
    address, version = id(moment._local_tensor), moment._local_tensor._version
    value = moment._local_tensor.clone()
    del moment._local_tensor
    others = []
    while id(new := value.clone()) != address and len(others) < 100:
        others.append(new)
    while new._version < version:
        new.zero_()
    moment._local_tensor = new
    with pytest.raises(RuntimeError, match=r"optimizer states of unit '.*' were edited"):
        twins.step()


def test_a_state_that_takes_the_address_of_another_is_a_new_one() -> None:
    run_ranks(replaces_a_state, 1)


def groups_and_schedule(policy: OverlapPolicy, rate: str) -> None:
    twins = pair(policy)
    schedules = []
    for each in twins:
        names = dict(each.model.named_parameters())
        lr = torch.tensor(0.05) if rate == "tensor" else 0.05
        groups = [
            {"params": [p for name, p in names.items() if "norm" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in names.items() if "norm" in name], "weight_decay": 0.0},
        ]
        options = {"overlap": policy} if each is twins[1] else {}
        each.optimizer = AdamW(groups, lr=lr, betas=(0.8, 0.9), **options)
        schedules.append(torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda i: 0.7**i))
    for batches in zip(*[twins[0].batches(8)] * 2, strict=True):
        for each, schedule in zip(twins, schedules, strict=True):
            plain_backward(each, batches)
            step(each, policy)
            schedule.step()
            each.optimizer.param_groups[0]["weight_decay"] += 0.01
    same(*twins)


@pytest.mark.parametrize("rate", ["number", "tensor"])
@pytest.mark.parametrize("policy", ["in backward", "clipped"])
def test_groups_and_schedules_change_between_steps(policy: str, rate: str) -> None:
    run_ranks(groups_and_schedule, 2, POLICIES[policy], rate)


# Checkpoints, and errors


def states_are_whole(policy: OverlapPolicy, options: dict[str, Any]) -> None:
    with late():
        twins = pair(policy, **options)
        for batches in zip(twins[0].batches(3), strict=True):
            for each in twins:
                plain_backward(each, batches)
                step(each, policy)
            states = [get_state_dict(each.model, each.optimizer) for each in twins]
            for mine, its in zip(*map(tree_leaves, states), strict=True):
                if isinstance(mine, DTensor):
                    mine, its = mine.to_local(), its.to_local()
                assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
            whole = [next(each.model.parameters()) for each in twins]
            assert torch.equal(*(each.full_tensor() for each in whole))  # type: ignore[attr-defined]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_state_dicts_and_reads_wait_for_all_steps(policy: str, optimizer: str) -> None:
    run_ranks(states_are_whole, 2, POLICIES[policy], KINDS[optimizer])


def resumes(policy: OverlapPolicy, options: dict[str, Any]) -> None:
    twins = pair(policy, **options)
    batches = list(zip(twins[0].batches(4), strict=True))
    for batch in batches[:2]:
        plain_backward(twins[0], batch)
        step(twins[0], policy)
    model, optimizer = copy.deepcopy(get_state_dict(twins[0].model, twins[0].optimizer))
    set_state_dict(
        twins[1].model, twins[1].optimizer, model_state_dict=model, optim_state_dict=optimizer
    )
    for batch in batches[2:]:
        for each in twins:
            plain_backward(each, batch)
            step(each, policy)
    same(*twins)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loaded_run_goes_on_as_the_other_would(policy: str, optimizer: str) -> None:
    run_ranks(resumes, 2, POLICIES[policy], KINDS[optimizer])


def fails_in_the_thread(policy: OverlapPolicy, options: dict[str, Any], fails: Any) -> bool:
    """Return whether this rank was not told of the error by the reset of one that was faster."""
    twins = pair(policy, **options)
    batches = list(zip(twins[0].batches(4), strict=True))
    for each in twins:
        plain_backward(each, batches[0])
        step(each, policy)
    saved = copy.deepcopy(get_state_dict(twins[1].model, twins[1].optimizer))
    failing = patch.object(*fails, side_effect=MemoryError("no room"))

    def train_on() -> None:
        for batch in batches[1:3]:
            plain_backward(twins[1], batch)
            twins[1].optimizer.step()

    said = r"thread: no room.*ctx\.reset\(\)|called ctx\.reset\(\)"
    with failing, pytest.raises(RuntimeError, match=said) as raised:
        train_on()
    is_first = "no room" in str(raised.value)
    if is_first:
        with pytest.raises(RuntimeError, match="failed in its thread"):
            get_state_dict(twins[1].model, twins[1].optimizer)
    twins[1].ctx.reset()
    twins[1].optimizer.zero_grad()
    set_state_dict(
        twins[1].model, twins[1].optimizer, model_state_dict=saved[0], optim_state_dict=saved[1]
    )
    for batch in batches[1:]:
        for each in twins:
            plain_backward(each, batch)
            step(each, policy)
    same(*twins)
    return is_first


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_after_an_error_in_the_thread_a_reset_and_a_checkpoint_help(
    policy: str, optimizer: str
) -> None:
    fails = {"adamw": (KernelCall, "run"), "layer-wise": (OwnBatch, "begin")}[optimizer]
    assert any(run_ranks(fails_in_the_thread, 2, POLICIES[policy], KINDS[optimizer], fails))


def held(limit: int, is_idle: bool) -> tuple[int, list[int]]:
    """Return the most bytes of gradients at once, and those of each unit. ``is_idle``: whether the
    thread does nothing in backward."""
    _, twins = pair(OverlapPolicy(buffer_bytes=limit))
    buffers = twins.optimizer.overlapped._buffers  # type: ignore[attr-defined]
    most, copy_, run, goes = [0], buffers.copy, KernelCall.run, threading.Event()

    def watched(*args: Any) -> Any:
        result = copy_(*args)
        most[0] = max(most[0], buffers._used)
        return result

    def run_later(call: KernelCall) -> None:
        assert threading.current_thread().name != "host step" or goes.wait(30)
        run(call)

    with patch.object(KernelCall, "run", run_later), patch.object(buffers, "copy", watched):
        for batch in zip(twins.batches(3), strict=True):
            if not is_idle:
                goes.set()
            plain_backward(twins, batch)
            goes.set()
            twins.step()
            finish_pending_steps()
            goes.clear()
    groups = [each for unit in twins.ctx.units for each in unit.param_groups]
    return most[0], [each.shard.nbytes for each in groups]


def test_gradients_that_wait_take_no_more_memory_than_is_allowed() -> None:
    for most, sizes in run_ranks(held, 2, 1 << 30, True):
        assert most == sum(sizes)
    for limit in (0, 1500):
        for most, sizes in run_ranks(held, 2, limit, False):
            assert 0 < most <= max(limit, 2 * max(sizes)) < sum(sizes)


def copied() -> None:
    """While a thread has yet to step the model."""
    twins = Twins.of("layers", optimizer=AdamW, overlap=POLICIES["clipped"])
    run, goes = KernelCall.run, threading.Event()

    def run_later(call: KernelCall) -> None:
        assert threading.current_thread().name != "host step" or goes.wait(30)
        run(call)

    with patch.object(KernelCall, "run", run_later):
        for batch in zip(twins.batches(2), strict=True):  # the first step makes states
            plain_backward(twins, batch)
            twins.step()
        threading.Timer(0.3, goes.set).start()
        model, optimizer = copy.deepcopy((twins.model, twins.optimizer))
    finish_pending_steps()
    for mine, its in zip(twins.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), its.to_local())  # type: ignore[operator]
        states = twins.optimizer.state[mine], optimizer.state[its]
        for one, other in zip(*map(tree_leaves, states), strict=True):
            assert torch.equal(one, other)


def test_a_copy_waits_for_the_step() -> None:
    run_ranks(copied, 2)


def scaled_by(scaler: Any, twins: Twins, batch: Any) -> None:
    tokens, targets = batch[0]
    scaler.scale(twins.losses(tokens, targets)[0]).backward()
    scaler.unscale_(twins.optimizer)
    scaler._per_optimizer_states.clear()  # as update() does


def unscales() -> None:
    """By an op that no version counter tells of."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(POLICIES["clipped"], backward=partial(scaled_by, scaler))


def test_gradients_that_were_unscaled_are_clipped() -> None:
    run_ranks(unscales, 2)


def scaled() -> None:
    _, twins = pair(POLICIES["clipped"])
    plain_backward(twins, next(zip(twins.batches(1), strict=True)))
    twins.optimizer.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="unscale_"):
        twins.optimizer.step()


def test_scaled_gradients_are_not_clipped() -> None:
    run_ranks(scaled, 1)


def test_a_thread_that_collects_its_optimizer_ends() -> None:
    thread = HostThread()
    done: list[int] = []
    jobs = thread.submit([Call(lambda: done.append(1), "a unit"), Call(thread.close, "another")])
    for job in jobs:
        job.wait()
    assert done == [1]
    assert thread._thread is not None
    thread._thread.join(10)
    assert not thread._thread.is_alive()


def test_a_finalizer_does_not_wait_for_jobs() -> None:
    """It may run while this thread holds the lock that jobs end with."""
    thread, goes = HostThread(), threading.Event()

    def run() -> None:
        goes.wait(10)

    [job] = thread.submit([Call(run, "a unit")])
    with thread.changed:
        thread.close()
    goes.set()
    job.wait()


def resets_one_context_of_two() -> None:
    """The steps of the other one are done, and its model trains on."""
    policy = POLICIES["in backward"]
    first, second = Twins.of("layers", optimizer=AdamW), Twins.of("layers", optimizer=AdamW)
    both = [*first.model.parameters(), *second.model.parameters()]
    optimizer = AdamW(both, lr=0.05, overlap=policy)
    alone = Twins.of("layers", optimizer=AdamW)
    with late():
        for batch in zip(first.batches(4), strict=True):
            for each in (first, second, alone):
                plain_backward(each, batch)
            optimizer.step()
            optimizer.zero_grad()
            step(alone, policy)
            second.ctx.reset()
    pairs = zip(first.model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(mine.to_local(), its.to_local()) for mine, its in pairs)  # type: ignore[operator]


def test_a_reset_of_one_context_leaves_the_other_alone() -> None:
    run_ranks(resets_one_context_of_two, 2)


def replaces_optimizers(policy: OverlapPolicy) -> None:
    """Also by one of a part of the parameters, which no longer step in the thread."""
    twins = pair(policy)
    unused = None
    for number, batch in enumerate(zip(twins[0].batches(6), strict=True)):
        for each in twins:
            if number % 3 == 0:
                parameters = list(each.model.parameters())
                options = {"overlap": policy} if each is twins[1] else {}
                each.optimizer = AdamW(parameters, **options)
                unused = AdamW(parameters[:3], **options) if number else None
            plain_backward(each, batch)
            step(each, policy)
    del unused
    same(*twins)


@pytest.mark.parametrize("policy", ["in backward", "clipped"])
def test_optimizers_can_be_replaced(policy: str) -> None:
    run_ranks(replaces_optimizers, 2, POLICIES[policy])


def evaluates_too_early() -> None:
    _, twins = pair(POLICIES["in backward"])
    batches = list(zip(twins.batches(3), strict=True))
    for batch in batches[:2]:
        plain_backward(twins, batch)
        twins.step()
    plain_backward(twins, batches[2])
    with pytest.raises(RuntimeError, match="evaluate after step"):
        twins.model(batches[2][0][0])
    twins.ctx.reset()
    twins.model(batches[2][0][0])


@pytest.mark.filterwarnings("ignore:.*load a checkpoint")
def test_an_evaluation_before_the_step_is_an_error() -> None:
    run_ranks(evaluates_too_early, 1)


def resets_after_a_step(policy: OverlapPolicy) -> None:
    """Steps that were accepted are done."""
    twins = pair(policy)
    with late():
        for batch in zip(twins[0].batches(3), strict=True):
            for each in twins:
                plain_backward(each, batch)
                step(each, policy)
                each.ctx.reset()
    same(*twins)


@pytest.mark.parametrize("policy", ["in backward", "clipped"])
def test_a_reset_finishes_steps(policy: str) -> None:
    run_ranks(resets_after_a_step, 2, POLICIES[policy])


def drops_its_optimizer() -> None:
    twins = pair(POLICIES["in backward"])
    batches = list(zip(twins[0].batches(3), strict=True))
    with late():
        for batch in batches[:2]:
            for each in twins:
                plain_backward(each, batch)
                step(each, POLICIES["in backward"])
        del each
        twins[1].optimizer = None  # type: ignore[assignment]
    pairs = zip(twins[0].model.parameters(), twins[1].model.parameters(), strict=True)
    assert all(torch.equal(mine.to_local(), its.to_local()) for mine, its in pairs)  # type: ignore[operator]


def test_a_thread_outlives_its_optimizer() -> None:
    run_ranks(drops_its_optimizer, 1)


def keeps_its_failure() -> None:
    _, twins = pair(POLICIES["clipped"])
    batches = list(zip(twins.batches(2), strict=True))
    plain_backward(twins, batches[0])
    twins.step()
    with patch.object(KernelCall, "run", side_effect=MemoryError("no room")):
        plain_backward(twins, batches[1])
        twins.step()
        twins.optimizer = None  # type: ignore[assignment]
        # The thread may run the step only now, so what fails is still in place.
        with pytest.raises(RuntimeError, match="no room"):
            next(twins.model.parameters()).detach()
    twins.ctx.reset()
    next(twins.model.parameters()).detach()


def test_a_failure_outlives_its_optimizer() -> None:
    run_ranks(keeps_its_failure, 1)


def accumulates_with_the_norm_before() -> None:
    """All of what was added has the norm that the next step is scaled by."""
    twins = pair(OverlapPolicy(max_norm=0.1, use_previous_norm=True))
    overlapped: Any = twins[1].optimizer
    parameters: list[Any] = list(twins[0].model.parameters())
    before = None
    for batch in zip(twins[0].batches(4), strict=True):
        for each in twins:
            accumulate("set_is_last_backward", each, batch)
        norm = clip_grad_norm_(parameters, torch.inf)
        scale = (0.1 / ((norm if before is None else before) + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            parameter.grad.to_local().mul_(scale)
        before = norm
        for each in twins:
            each.step()
        torch.testing.assert_close(overlapped.overlapped.norm, norm)
        for mine, its in zip(parameters, twins[1].model.parameters(), strict=True):
            torch.testing.assert_close(mine.to_local(), its.to_local())  # type: ignore[operator]


def test_the_norm_before_is_of_all_that_was_accumulated() -> None:
    run_ranks(accumulates_with_the_norm_before, 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_norm": 0.0}, "give a positive norm"),
        ({"use_previous_norm": True}, "give max_norm too"),
        ({"buffer_bytes": -1}, "give a number of bytes"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        OverlapPolicy(**options)


@pytest.mark.parametrize("optimizer", [AdamW, Muon])
def test_gathering_ahead_is_refused_beside_it(optimizer: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ValueError, match="leave the latter out"):
        optimizer(parameters, overlap=OverlapPolicy(), prefetch_next_forward=True)


@pytest.mark.parametrize(
    ("others", "error"),
    [
        (torch.optim.AdamW, "makes AdamW of torch.optim.adamw, which a thread cannot step: let it"),
        (partial(AdamW, overlap=OverlapPolicy()), "with overlap=: give it to LayerWise alone"),
        (partial(AdamW, prefetch_next_forward=True), "leave the latter out"),
    ],
)
def test_others_that_a_thread_cannot_step_are_refused(others: Any, error: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=error):
        LayerWise(model, torch.optim.Muon, others, overlap=OverlapPolicy())


def exports(policy: OverlapPolicy) -> None:
    twins = pair(policy)
    resharder = WeightResharder(twins[1].model, destination := copy.deepcopy(twins[0].twin))
    with late():
        for batch in zip(twins[0].batches(3), strict=True):
            for each in twins:
                plain_backward(each, batch)
                step(each, policy)
            exported = {name: tensor.clone() for name, tensor in export_weights(twins[1].model)}
            for name, parameter in twins[0].model.named_parameters():
                assert torch.equal(exported[name], parameter.full_tensor()), name  # type: ignore[operator]
        for each in twins:
            plain_backward(each, batch)
            step(each, policy)
        resharder.run()
        pairs = zip(twins[0].model.named_parameters(), destination.parameters(), strict=True)
        for (name, parameter), copied in pairs:
            assert torch.equal(copied, parameter.full_tensor()), name  # type: ignore[operator]


@pytest.mark.parametrize("policy", ["in backward", "clipped"])
def test_weights_elsewhere_are_those_after_the_step(policy: str) -> None:
    run_ranks(exports, 2, POLICIES[policy])


def stages_parameters(folder: str) -> None:
    """Which were asked for before the step, by our stager and by torch's."""
    twins = pair(POLICIES["in backward"])
    kept: dict[str, Any] = dict(twins[1].model.named_parameters())
    group = dist.new_group()
    for name, options in (("ours", {"async_stager": ShardStager()}), ("torch's", {})):
        with late():
            for batch in zip(twins[0].batches(3), strict=True):
                for each in twins:
                    plain_backward(each, batch)
                    step(each, POLICIES["in backward"])
            path = f"{folder}/{name}"
            saving: Any = dcp.async_save(kept, checkpoint_id=path, process_group=group, **options)
            getattr(saving, "upload_completion", saving).result()
        loaded = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in kept.items()}
        dcp.load(loaded, checkpoint_id=path)
        for name, parameter in twins[0].model.named_parameters():
            assert torch.equal(loaded[name], parameter.full_tensor()), name  # type: ignore[operator]


def test_a_save_waits_for_steps(tmp_path: Path) -> None:
    run_ranks(stages_parameters, 2, str(tmp_path))


# Optimizers of one's own, under LayerWise


def units_ahead(layout: LayoutRule) -> list[bool]:
    """Return whether each unit was stepped in backward. Of matrices that are cut none is."""
    _, twins = pair(POLICIES["in backward"], **{**WHOLE, "layout": layout})
    overlapped: Any = twins.optimizer.overlapped  # type: ignore[attr-defined]
    for batch in zip(twins.batches(3), strict=True):
        plain_backward(twins, batch)
        ahead = list(overlapped._ahead)
        twins.step()
    return [each in ahead for unit in twins.ctx.units for each in unit.param_groups]


def test_units_of_whole_matrices_are_stepped_in_backward_on_all_ranks() -> None:
    """Also where a rank has none of a unit's."""
    for found in run_ranks(units_ahead, 3, TensorAtomic()):
        assert all(found)
    for found in run_ranks(units_ahead, 3, Flat()):
        assert any(found)
        assert not all(found)


def counts(policy: OverlapPolicy) -> None:
    """Also where a rank has no matrix, in a step whose units are stepped in part, and in a state
    dict before the thread is done."""
    twins = pair(policy, **WHOLE)
    with late(0.05):
        for index, batch in enumerate(zip(twins[0].batches(6), strict=True)):
            for each in twins:
                if index == 3:
                    each.model.layers[1].requires_grad_(False)
                each.optimizer.param_groups[0]["lr"] = 0.5 if index in (1, 4) else 0.05
                plain_backward(each, batch)
                step(each, policy)
                assert each.optimizer.param_groups[0]["late"] == index + 1
            saved = [each.optimizer.state_dict()["param_groups"] for each in twins]
            for mine, its in zip(*saved, strict=True):
                assert different_option(mine, its) is None
    same(*twins)


@pytest.mark.parametrize("policy", ["in backward", "clipped"])
def test_optimizers_count_steps_in_their_groups(policy: str) -> None:
    run_ranks(counts, 3, POLICIES[policy])


def skips_units() -> None:
    """While the thread has yet to step it, its optimizer counts another step."""
    policy = POLICIES["clipped"]
    twins = pair(policy, **WHOLE)
    for each in twins:  # one after the other, so that one does not wait for the other's thread
        with late(0.2):
            for index, batch in enumerate(zip(each.batches(4), strict=True)):
                # The first one of these is gathered ahead, and so waited for.
                skipped = list(each.model.layers[1:]) if index == 2 else []
                each.model.run = partial(runs_but, skipped)
                plain_backward(each, batch)
                step(each, policy)
    same(*twins)


def runs_but(skipped: list[nn.Module], layer: nn.Module, x: torch.Tensor) -> Any:
    return x if layer in skipped else layer(x)


def test_a_unit_that_is_not_used_is_not_stepped_twice_at_once() -> None:
    run_ranks(skips_units, 1)


def saves_what_the_thread_has_counted() -> None:
    """Not what an optimizer without matrices counts, which may count otherwise."""

    class Measuring(Counting):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            [group] = self.param_groups
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            group["norm"] = sum(float(each.norm()) for each in gradients)
            super().step()

    _, twins = pair(POLICIES["in backward"], **{**WHOLE, "factory": Measuring})
    for batch in zip(twins.batches(3), strict=True):
        plain_backward(twins, batch)
        twins.step()
    assert twins.optimizer.state_dict()["param_groups"][0]["norm"] > 0
    twins.optimizer.param_groups[0]["norm"] = 0.5  # the user's comes first
    assert twins.optimizer.state_dict()["param_groups"][0]["norm"] == 0.5


def test_a_state_dict_has_the_options_of_what_the_thread_steps() -> None:
    run_ranks(saves_what_the_thread_has_counted, 1)


def reads_states() -> None:
    _, twins = pair(POLICIES["clipped"], **WHOLE)
    for batch in zip(twins.batches(2), strict=True):
        plain_backward(twins, batch)
        with late(0.1):
            twins.step()
            steps = [leaf for leaf in tree_leaves(dict(twins.optimizer.state)) if type(leaf) is int]
    assert set(steps) == {2}


def test_reads_of_states_wait_for_the_thread() -> None:
    run_ranks(reads_states, 1)


def resets_and_goes_on() -> None:
    """Without a checkpoint, after a backward that nobody stepped. A step in step() is due then."""
    _, twins = pair(POLICIES["in backward"], **WHOLE)
    batches = list(zip(twins.batches(4), strict=True))
    for batch in batches[:3]:
        plain_backward(twins, batch)
        if batch is not batches[2]:
            twins.step()
    twins.ctx.reset()
    twins.optimizer.zero_grad()
    twins.model.set_is_last_backward(False)  # so that no unit is stepped in backward
    plain_backward(twins, batches[3])
    before = [parameter.to_local().clone() for parameter in twins.model.parameters()]  # type: ignore[operator]
    twins.step()
    for mine, its in zip(before, twins.model.parameters(), strict=True):
        assert not torch.equal(mine, its.to_local())  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:.*load a checkpoint")
def test_after_a_reset_nothing_counts_as_stepped() -> None:
    run_ranks(resets_and_goes_on, 1)


# The norm of the step before


def uses_the_norm_before(options: dict[str, Any]) -> None:
    twins = pair(OverlapPolicy(max_norm=0.1, use_previous_norm=True), **options)
    norm = None
    for batch in zip(twins[0].batches(4), strict=True):
        plain_backward(twins[0], batch)
        parameters = list(twins[0].model.parameters())
        own = clip_grad_norm_(parameters, torch.inf)
        for parameter in parameters:
            local = parameter.grad.to_local()  # type: ignore[union-attr]
            local.mul_((0.1 / ((own if norm is None else norm) + 1e-6)).clamp(max=1.0))
        norm = own
        plain_backward(twins[1], batch)
        for each in twins:
            each.step()
        torch.testing.assert_close(twins[1].optimizer.overlapped.norm, own)  # type: ignore[attr-defined]
        for parameter, other in zip(parameters, twins[1].model.parameters(), strict=True):
            torch.testing.assert_close(parameter.to_local(), other.to_local())  # type: ignore[operator]


@pytest.mark.parametrize("options", [{}, LAYER_WISE], ids=["AdamW", "LayerWise"])
def test_gradients_can_be_scaled_by_the_norm_of_the_step_before(options: dict[str, Any]) -> None:
    run_ranks(uses_the_norm_before, 2, options)
