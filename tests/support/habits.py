"""What people do with optimizers, beside torch's own optimizer of the unsharded model.

    PYTHONPATH=tests torchrun --nproc-per-node 2 -m support.habits

prints the table, a row for each habit and a column for each optimizer.
"""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import lr_scheduler

from fsdp_overlap import BlockAtomic, Flat, FsdpContext, PerTensor, TensorAtomic, fully_shard
from fsdp_overlap.optim import AdamW, LayerWise, Muon, OverlapPolicy

STEPS = 4
EDITED = 2
"""The step at which a habit shows."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Have torch's Muon compute in float64 instead of bfloat16, as ours does here."""
    with (
        patch.object(torch.Tensor, "bfloat16", torch.Tensor.double),  # of torch 2.13
        patch.object(torch, "bfloat16", torch.float64),  # of torch 2.15
    ):
        yield


class Run:
    """A model that is trained: sharded, or its unsharded twin, which sees all ranks' batches."""

    def __init__(self, column: Column, is_twin: bool) -> None:
        torch.manual_seed(0)
        self.column = column
        self.is_twin = is_twin
        layers = (nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(3))
        self.model = nn.Sequential(*layers)
        if not is_twin:
            shape = column.mesh or (dist.get_world_size(),)
            names = ("replicate", "shard")[-len(shape) :]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            ctx = FsdpContext(
                mesh, layout=column.layout, shard_optimizer_over_replicas=len(shape) > 1
            )
            offload = {"offload_policy": CPUOffloadPolicy()} if column.is_offloaded else {}
            for unit in (*self.model, self.model):
                fully_shard(unit, ctx, **offload)
        self.make = column.twin if is_twin else column.make
        weights = self.weights
        self.optimizer = self.make([self.group(weights[:2], 0.1), self.group(weights[2:], 0.01)])
        self.scheduler: Any = None
        self.scaler: Any = None
        self.kept: Any = None

    @property
    def weights(self) -> list[nn.Parameter]:
        return [layer.weight for layer in self.model]

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def group(self, weights: list[nn.Parameter], lr: float) -> dict[str, Any]:
        options = {} if self.is_twin else self.column.group_options
        return {"params": weights, "lr": lr, **options}

    def loss(self, index: int, scale: Callable[[int], float] = lambda rank: 1.0) -> torch.Tensor:
        size = dist.get_world_size()
        ranks = range(size) if self.is_twin else [dist.get_rank()]
        losses = []
        for rank in ranks:
            batch = torch.linspace(-1, 1 + rank + index, 32, dtype=torch.float64).sin().view(4, 8)
            losses.append(self.model(batch).square().mean() * scale(rank))
        return torch.stack(losses).mean()

    def backward(self, index: int) -> None:
        self.loss(index).backward()

    def step(self) -> None:
        with in_float64():
            self.optimizer.step()
        if self.is_twin and self.column.frees_gradients:
            self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        weights = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in self.weights]
        return [weight.detach().clone() for weight in weights]


class Habit(NamedTuple):
    """``place``: "start" of the training, before "backward", "step" or the "end" of iterations, or
    "instead" of one."""

    place: str
    act: Callable[..., None]
    always: bool
    """Whether it shows in each iteration, and not in that of :data:`EDITED` alone."""
    matters: bool
    """Whether weights are other ones than without it."""


HABITS: dict[str, Habit] = {}


def habit(
    name: str, place: str, always: bool = False, matters: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(act: Callable[..., None]) -> Callable[..., None]:
        HABITS[name] = Habit(place, act, always, matters)
        return act

    return add


def _call(habit: Habit, run: Run, index: int) -> None:
    habit.act(*[run, index][: len(signature(habit.act).parameters)])


def iterate(run: Run, habit: Habit | None, index: int) -> None:
    is_now = habit is not None and (habit.always or index == EDITED)

    def at(place: str) -> bool:
        if habit is not None and is_now and habit.place == place:
            _call(habit, run, index)
            return True
        return False

    if index == 0 and habit is not None and habit.place == "start":
        _call(habit, run, index)
    if not at("instead"):
        at("backward")
        run.backward(index)
        at("step")
        run.step()
        run.optimizer.zero_grad()
    if run.scheduler is not None:
        plateau = isinstance(run.scheduler, lr_scheduler.ReduceLROnPlateau)
        run.scheduler.step(*([1.0] if plateau else []))
    at("end")


# ---- groups ----


@habit("a parameter moved to another group", "end")
def _(run: Run) -> None:
    one, other = run.groups
    one["params"], other["params"] = one["params"][1:], [*other["params"], one["params"][0]]


@habit("the same in place", "end")
def _(run: Run) -> None:
    one, other = run.groups
    other["params"].append(one["params"].pop(0))


@habit("moved before backward", "backward")
def _(run: Run) -> None:
    one, other = run.groups
    other["params"].append(one["params"].pop(0))


@habit("moved between backward and step", "step")
def _(run: Run) -> None:
    one, other = run.groups
    other["params"].append(one["params"].pop(0))


@habit("moved to a group of rate 0", "end")
def _(run: Run) -> None:
    one, other = run.groups
    other["lr"] = 0.0
    other["params"].append(one["params"].pop(0))


@habit("moved, and back after a step", "end", always=True)
def _(run: Run, index: int) -> None:
    one, other = run.groups
    if index == 1:
        other["params"].append(one["params"].pop())
    if index == 2:
        one["params"].append(other["params"].pop())


@habit("groups reversed", "end", matters=False)
def _(run: Run) -> None:
    run.groups.reverse()


@habit("groups reversed, and an option edited", "end")
def _(run: Run) -> None:
    run.groups.reverse()
    run.groups[0]["lr"] = 0.5


@habit("parameters of a group reversed", "end", matters=False)
def _(run: Run) -> None:
    run.groups[0]["params"].reverse()


@habit("groups rebuilt as new dicts", "end")
def _(run: Run) -> None:
    run.optimizer.param_groups = [{**group, "lr": group["lr"] / 10} for group in run.groups]


@habit("groups merged", "end")
def _(run: Run) -> None:
    first, *rest = run.groups
    first["params"] += chain.from_iterable(group["params"] for group in rest)
    del run.groups[1:]


@habit("a group split", "end")
def _(run: Run) -> None:
    first = run.groups[0]
    run.groups.append({**first, "params": [first["params"].pop()], "lr": 0.03})


@habit("a group removed", "end")
def _(run: Run) -> None:
    del run.groups[0]


@habit("a group removed before backward", "backward")
def _(run: Run) -> None:
    del run.groups[0]


@habit("a group removed between backward and step", "step")
def _(run: Run) -> None:
    del run.groups[0]


@habit("a parameter removed, and added by add_param_group()", "end", always=True)
def _(run: Run, index: int) -> None:
    if index == 1:
        run.kept = run.groups[0]["params"].pop()
    if index == 2:
        for weight in run.weights:
            weight.grad = None
        run.optimizer.add_param_group(run.group([run.kept], 0.05))


@habit("a group added after two steps", "start")
def _(run: Run) -> None:
    run.optimizer = run.make([run.group(run.weights[:2], 0.1)])
    step = run.optimizer.step

    def add_late(*args: Any) -> None:
        run.kept = (run.kept or 0) + 1
        step(*args)
        if run.kept == 2:
            run.weights[2].grad = None
            run.optimizer.add_param_group(run.group(run.weights[2:], 0.05))

    run.optimizer.step = add_late


@habit("a group of no parameters", "end", matters=False)
def _(run: Run) -> None:
    run.groups.append({**run.groups[0], "params": []})


# ---- options and schedulers ----


@habit("a rate edited", "end")
def _(run: Run) -> None:
    run.groups[0]["lr"] = 0.01


@habit("a rate edited before backward", "backward")
def _(run: Run) -> None:
    run.groups[0]["lr"] = 0.01


@habit("a rate edited between backward and step", "step")
def _(run: Run) -> None:
    run.groups[0]["lr"] = 0.01


@habit("a rate of 0", "end")
def _(run: Run) -> None:
    run.groups[0]["lr"] = 0.0


@habit("weight decay edited", "end")
def _(run: Run) -> None:
    run.groups[1]["weight_decay"] = 0.7


@habit("betas or momentum edited", "end")
def _(run: Run) -> None:
    name = "betas" if "betas" in run.groups[0] else "momentum"
    run.groups[0][name] = (0.5, 0.6) if name == "betas" else 0.5


@habit("rates as tensors, edited in place", "end", always=True)
def _(run: Run, index: int) -> None:
    for group in run.groups:
        if index == 0:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        if index == EDITED:
            group["lr"].mul_(0.1)


@habit("rates as tensors, edited between backward and step", "step", always=True)
def _(run: Run, index: int) -> None:
    for group in run.groups:
        if index == EDITED:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        if index == EDITED + 1:
            group["lr"].mul_(0.1)


@habit("an option of one's own, an array", "start", matters=False)
def _(run: Run) -> None:
    for group in run.groups:
        group["ranges"] = torch.ones(3).numpy()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.5**epoch),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda epoch: 0.7),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=3),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=9, cycle_momentum=False),
    "OneCycleLR with momentum": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=9),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    ),
}


def _schedule(make: Callable[[Any], Any], run: Run) -> None:
    run.scheduler = make(run.optimizer)


for _name, _make in SCHEDULERS.items():
    habit(_name, "start")(partial(_schedule, _make))


@habit("a scheduler between backward and step", "step", always=True)
def _(run: Run, index: int) -> None:
    if index == 0:
        run.kept = lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    if index >= EDITED:
        run.kept.step()


# ---- states ----


@habit("all states cleared", "end")
def _(run: Run) -> None:
    run.optimizer.state.clear()


@habit("states cleared between backward and step", "step")
def _(run: Run) -> None:
    run.optimizer.state.clear()


@habit("a state popped", "end")
def _(run: Run) -> None:
    run.optimizer.state.pop(run.weights[0])


@habit("a state replaced by an empty one", "end")
def _(run: Run) -> None:
    run.optimizer.state[run.weights[0]] = {}


def _moments(run: Run) -> Iterator[tuple[dict[str, Any], str]]:
    def each(state: Any) -> Iterator[tuple[dict[str, Any], str]]:
        for name, value in state.items():
            if isinstance(value, dict):
                yield from each(value)
            elif name != "step":
                yield state, name

    for weight in run.weights:
        yield from each(run.optimizer.state[weight])


@habit("moments scaled", "end")
def _(run: Run) -> None:
    for state, name in _moments(run):
        state[name].mul_(0.1)


@habit("moments scaled between backward and step", "step")
def _(run: Run) -> None:
    for state, name in _moments(run):
        state[name].mul_(0.1)


@habit("moments replaced", "end")
def _(run: Run) -> None:
    for state, name in _moments(run):
        state[name] = state[name] * 0.1


@habit("a state dict loaded again", "end", always=True)
def _(run: Run, index: int) -> None:
    if index == 1:
        run.kept = copy.deepcopy(run.optimizer.state_dict())
    if index == EDITED:
        run.optimizer.load_state_dict(run.kept)


@habit("a state dict loaded between backward and step", "step", always=True)
def _(run: Run, index: int) -> None:
    if index == 1:
        run.kept = copy.deepcopy(run.optimizer.state_dict())
    if index == EDITED:
        run.optimizer.load_state_dict(run.kept)


@habit("a state dict through pickle", "end", matters=False)
def _(run: Run) -> None:
    run.optimizer.load_state_dict(pickle.loads(pickle.dumps(run.optimizer.state_dict())))


@habit("a state dict loaded onto other rates", "end")
def _(run: Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    for group in saved["param_groups"]:
        group["lr"] /= 10
    run.optimizer.load_state_dict(saved)


@habit("a state dict loaded into a new optimizer", "end")
def _(run: Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    weights = run.weights
    run.optimizer = run.make([run.group(weights[:2], 1.0), run.group(weights[2:], 1.0)])
    run.optimizer.load_state_dict(saved)
    run.groups[0]["lr"] = 0.03


@habit("a state dict loaded onto parameters in another order", "end")
def _(run: Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    weights = run.weights
    run.optimizer = run.make([run.group(weights[1::-1], 1.0), run.group(weights[2:], 1.0)])
    run.optimizer.load_state_dict(saved)


@habit("a new optimizer", "end")
def _(run: Run) -> None:
    run.optimizer = run.make([run.group(run.weights, 0.05)])


# ---- gradients ----


@habit("a gradient of None", "step")
def _(run: Run) -> None:
    run.weights[0].grad = None


@habit("a gradient deleted", "step")
def _(run: Run) -> None:
    del run.weights[0].grad


@habit("a gradient zeroed", "step")
def _(run: Run) -> None:
    run.weights[0].grad.zero_()  # type: ignore[union-attr]


@habit("gradients scaled", "step")
def _(run: Run) -> None:
    for weight in run.weights:
        weight.grad.mul_(-1)  # type: ignore[union-attr]


@habit("a gradient replaced", "step")
def _(run: Run) -> None:
    run.weights[0].grad = run.weights[0].grad * -2  # type: ignore[operator]


@habit("a gradient replaced by zeros", "step")
def _(run: Run) -> None:
    run.weights[0].grad = torch.zeros_like(run.weights[0])


@habit("gradients swapped", "step")
def _(run: Run) -> None:
    one, other = run.weights[:2]
    one.grad, other.grad = other.grad, one.grad


@habit("gradients clipped by torch", "step", always=True)
def _(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


@habit("gradients clipped by value", "step", always=True)
def _(run: Run) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)


@habit("gradients of two backwards", "instead", always=True)
def _(run: Run, index: int) -> None:
    for part in range(2):
        if not run.is_twin:
            run.model.set_is_last_backward(part == 1)
        run.backward(index + part)
    run.step()
    run.optimizer.zero_grad()


@habit("gradients of two backwards, without a word", "instead")
def _(run: Run, index: int) -> None:
    run.backward(index)
    run.backward(index + 1)
    run.step()
    run.optimizer.zero_grad()


def _zero(zero: Callable[[Run], None], run: Run) -> None:
    zero(run)


def _with_none(run: Run) -> None:
    for weight in run.weights:
        weight.grad = None


ZERO_GRAD: dict[str, Callable[[Run], None]] = {
    "optimizer.zero_grad()": lambda run: run.optimizer.zero_grad(),
    "optimizer.zero_grad(False)": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda run: run.model.zero_grad(),
    "model.zero_grad(False)": lambda run: run.model.zero_grad(set_to_none=False),
    "grad = None": _with_none,
}


def _step_and_zero(zero: Callable[[Run], None], run: Run, index: int) -> None:
    run.backward(index)
    run.step()
    zero(run)


def _zero_and_step(zero: Callable[[Run], None], run: Run) -> None:
    zero(run)


for _name, _how in ZERO_GRAD.items():
    HABITS[_name] = Habit("instead", partial(_step_and_zero, _how), always=True, matters=False)
    HABITS[f"{_name} between backward and step"] = Habit(
        "step", partial(_zero_and_step, _how), always=False, matters=True
    )


@habit("no zero_grad()", "instead")
def _(run: Run, index: int) -> None:
    run.backward(index)
    run.step()


# ---- weights ----


def _edit(run: Run) -> None:
    with torch.no_grad():
        run.weights[0].mul_(0.5)


habit("a weight edited after a step", "end")(_edit)
habit("a weight edited before backward", "backward")(_edit)
habit("a weight edited between backward and step", "step")(_edit)


@habit("a weight's data edited between backward and step", "step")
def _(run: Run) -> None:
    run.weights[0].data.mul_(0.5)


@habit("a state dict of the model loaded", "end", always=True)
def _(run: Run, index: int) -> None:
    if index == 0:
        run.kept = copy.deepcopy(run.model.state_dict())
    if index == EDITED:
        run.model.load_state_dict(run.kept)


@habit("a state dict of the model loaded between backward and step", "step", always=True)
def _(run: Run, index: int) -> None:
    if index == 0:
        run.kept = copy.deepcopy(run.model.state_dict())
    if index == EDITED:
        run.model.load_state_dict(run.kept)


@habit("weights frozen for a step", "backward", always=True)
def _(run: Run, index: int) -> None:
    run.weights[0].requires_grad_(index != EDITED)


# ---- steps ----


@habit("a closure", "instead", always=True, matters=False)
def _(run: Run, index: int) -> None:
    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(index)
        loss.backward()
        return loss

    with in_float64():
        run.optimizer.step(closure)
    run.optimizer.zero_grad()


@habit("a step skipped", "instead")
def _(run: Run, index: int) -> None:
    run.backward(index)
    run.optimizer.zero_grad()


@habit("two steps of one backward", "instead")
def _(run: Run, index: int) -> None:
    run.backward(index)
    run.step()
    run.step()
    run.optimizer.zero_grad()


@habit("a step without gradients", "end", matters=False)
def _(run: Run) -> None:
    run.step()


@habit("two optimizers", "start", matters=False)
def _(run: Run) -> None:
    weights = run.weights
    groups = run.group(weights[:2], 0.1), run.group(weights[2:], 0.01)
    pair = [run.make([group]) for group in groups]

    class Both:
        def step(self) -> None:
            for optimizer in pair:
                optimizer.step()

        def zero_grad(self) -> None:
            for optimizer in pair:
                optimizer.zero_grad()

    run.optimizer = Both()


def _scaled(run: Run, index: int, unscale: bool) -> None:
    if run.scaler is None:
        run.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    overflows = index == EDITED
    loss = run.loss(index, lambda rank: float("inf") if overflows and rank == 0 else 1.0)
    run.scaler.scale(loss).backward()
    if unscale:
        run.scaler.unscale_(run.optimizer)
    with in_float64():
        run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()


@habit("GradScaler, an overflow on one rank", "instead", always=True)
def _(run: Run, index: int) -> None:
    _scaled(run, index, unscale=False)


@habit("GradScaler with unscale_(), an overflow on one rank", "instead", always=True)
def _(run: Run, index: int) -> None:
    _scaled(run, index, unscale=True)


@habit("a hook before steps that scales gradients", "start")
def _(run: Run) -> None:
    def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
        for weight in run.weights:
            if weight.grad is not None:
                weight.grad.mul_(-1)

    run.optimizer.register_step_pre_hook(scale)


@habit("a hook before steps that edits options", "start")
def _(run: Run) -> None:
    def edit(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    run.optimizer.register_step_pre_hook(edit)


@habit("a hook after steps that edits weights", "start")
def _(run: Run) -> None:
    run.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: _edit(run))


@habit("a compiled step", "start", matters=False)
def _(run: Run) -> None:
    run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")


# ---- copies ----


@habit("the optimizer copied", "end", matters=False)
def _(run: Run) -> None:
    other = copy.deepcopy(run.optimizer)
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    other.step()


@habit("the optimizer pickled", "end", matters=False)
def _(run: Run) -> None:
    pickle.loads(pickle.dumps(run.optimizer))


@habit("model and optimizer copied together", "end", matters=False)
def _(run: Run) -> None:
    run.model, run.optimizer = copy.deepcopy((run.model, run.optimizer))


# ---- optimizers ----


def torch_adamw(groups: Any) -> Any:
    return torch.optim.AdamW(groups)


def torch_muon(groups: Any) -> Any:
    return torch.optim.Muon(groups)


_FLAT = Flat()


@dataclass(frozen=True)
class Column:
    """An optimizer of ours, and that of the twin. ``refuses``: what is an error, by habit."""

    make: Callable[[Any], Any]
    twin: Callable[[Any], Any] = torch_adamw
    layout: Any = _FLAT
    mesh: tuple[int, ...] = ()
    is_offloaded: bool = False
    group_options: Mapping[str, Any] = field(default_factory=dict)
    frees_gradients: bool = False
    """Whether step() leaves no gradients behind, as docs/offloading.md says."""
    refuses: Mapping[str, str] = field(default_factory=dict)


_USED = "this gradient was used in backward"
_REMOVED = "the gradient of parameter 'weight' of Linear was removed between backward and step"
_OPTION = "'lr' of the group of parameter 'weight' of Linear was"
_STATES = "optimizer states of unit '[012]' were edited"
_WEIGHTS = "parameters of unit '[02]' were edited"
_EARLY = "was stepped in backward and is needed before step"
STEPPED_IN_BACKWARD = {
    "moved between backward and step": _OPTION,
    "a group removed between backward and step": "was removed from the optimizer's groups",
    "a rate edited between backward and step": _OPTION,
    "rates as tensors, edited between backward and step": _OPTION,
    "a scheduler between backward and step": _OPTION,
    "states cleared between backward and step": _STATES,
    "moments scaled between backward and step": _STATES,
    "a state dict loaded between backward and step": _STATES,
    "a gradient of None": _REMOVED,
    "a gradient deleted": _REMOVED,
    "a gradient zeroed": _USED,
    "gradients scaled": _USED,
    "a gradient replaced": _USED,
    "a gradient replaced by zeros": "the gradient of parameter 'weight' of Linear was replaced",
    "gradients swapped": "must be of the same kind",
    "gradients clipped by torch": _USED,
    "gradients clipped by value": _USED,
    "gradients of two backwards, without a word": _EARLY,
    "optimizer.zero_grad() between backward and step": _REMOVED,
    "optimizer.zero_grad(False) between backward and step": _USED,
    "model.zero_grad() between backward and step": _REMOVED,
    "model.zero_grad(False) between backward and step": _USED,
    "grad = None between backward and step": _REMOVED,
    "a weight edited between backward and step": _WEIGHTS,
    "a weight's data edited between backward and step": _WEIGHTS,
    "a state dict of the model loaded between backward and step": _WEIGHTS,
    "a step skipped": _EARLY,
    "GradScaler, an overflow on one rank": _USED,
    "GradScaler with unscale_(), an overflow on one rank": _USED,
    "a hook before steps that scales gradients": _USED,
    "a hook before steps that edits options": _OPTION,
}
_SCALED_NORM = {"GradScaler, an overflow on one rank": "the norm of scaled gradients"}
_WHOLE = {"gradients swapped": "must be of the same kind, shape and layout"}
_OF_ANOTHER_RANK = {
    "a state dict loaded onto parameters in another order": "was saved on another rank"
}
_NO_COPY = "a LayerWise cannot be copied or pickled"
LAYER_WISE = {
    "OneCycleLR with momentum": "optimizer must support momentum",
    "the optimizer copied": _NO_COPY,
    "the optimizer pickled": _NO_COPY,
    "model and optimizer copied together": _NO_COPY,
}


def layer_wise(factory: Any, **options: Any) -> Callable[[Any], Any]:
    return partial(LayerWise, factory=factory, **options)


EXACT: dict[str, Any] = {"ns_dtype": torch.float64}
NEVER_CLIPS = OverlapPolicy(max_norm=1e9)
BY_NORM_BEFORE = OverlapPolicy(max_norm=1e9, use_previous_norm=True)
IN_LITTLE_MEMORY = OverlapPolicy(buffer_bytes=0)

COLUMNS: dict[str, Column] = {
    "torch's AdamW": Column(torch_adamw),
    "AdamW": Column(AdamW),
    "AdamW, rows": Column(AdamW, layout=PerTensor()),
    "AdamW, prefetch": Column(
        partial(AdamW, prefetch_next_forward=True), layout=BlockAtomic(rows=2)
    ),
    "AdamW, offloaded": Column(AdamW, is_offloaded=True),
    "AdamW, replicas": Column(AdamW, mesh=(2, 1)),
    "AdamW, overlap": Column(
        partial(AdamW, overlap=OverlapPolicy()), frees_gradients=True, refuses=STEPPED_IN_BACKWARD
    ),
    "AdamW, overlap, offloaded": Column(
        partial(AdamW, overlap=IN_LITTLE_MEMORY),
        is_offloaded=True,
        frees_gradients=True,
        refuses=STEPPED_IN_BACKWARD,
    ),
    "AdamW, overlap, clipped": Column(
        partial(AdamW, overlap=NEVER_CLIPS), frees_gradients=True, refuses=_SCALED_NORM
    ),
    "AdamW, overlap, norm before": Column(
        partial(AdamW, overlap=BY_NORM_BEFORE),
        frees_gradients=True,
        refuses=STEPPED_IN_BACKWARD | _SCALED_NORM,
    ),
    "Muon, whole": Column(
        partial(Muon, **EXACT), torch_muon, layout=TensorAtomic(), refuses=_WHOLE
    ),
    "Muon, cut": Column(partial(Muon, **EXACT), torch_muon),
    "Muon, prefetch": Column(partial(Muon, prefetch_next_forward=True, **EXACT), torch_muon),
    "Muon, replicas": Column(partial(Muon, **EXACT), torch_muon, mesh=(2, 1)),
    "Muon, overlap": Column(
        partial(Muon, overlap=OverlapPolicy(), **EXACT),
        torch_muon,
        layout=TensorAtomic(),
        frees_gradients=True,
        refuses=STEPPED_IN_BACKWARD,
    ),
    "LayerWise, whole": Column(
        layer_wise(torch.optim.AdamW),
        layout=TensorAtomic(),
        refuses=LAYER_WISE | _WHOLE | _OF_ANOTHER_RANK,
    ),
    "LayerWise, cut": Column(layer_wise(torch.optim.AdamW), refuses=LAYER_WISE),
    "LayerWise of Muon": Column(
        layer_wise(torch.optim.Muon), torch_muon, layout=BlockAtomic(rows=2), refuses=LAYER_WISE
    ),
    "LayerWise, replicas": Column(layer_wise(torch.optim.AdamW), mesh=(2, 1), refuses=LAYER_WISE),
    "LayerWise, others": Column(
        layer_wise(torch.optim.Muon, others=torch.optim.AdamW),
        group_options={"layer_wise": False},
        refuses=LAYER_WISE,
    ),
    "LayerWise, overlap": Column(
        layer_wise(torch.optim.AdamW, overlap=OverlapPolicy()),
        layout=TensorAtomic(),
        frees_gradients=True,
        refuses=LAYER_WISE | _OF_ANOTHER_RANK | STEPPED_IN_BACKWARD,
    ),
    "LayerWise, overlap, offloaded": Column(
        layer_wise(torch.optim.AdamW, overlap=IN_LITTLE_MEMORY),
        layout=TensorAtomic(),
        is_offloaded=True,
        frees_gradients=True,
        refuses=LAYER_WISE | _OF_ANOTHER_RANK | STEPPED_IN_BACKWARD,
    ),
    "LayerWise, overlap, clipped": Column(
        layer_wise(torch.optim.AdamW, overlap=NEVER_CLIPS),
        layout=TensorAtomic(),
        frees_gradients=True,
        refuses=LAYER_WISE | _WHOLE | _OF_ANOTHER_RANK,
    ),
    "LayerWise, overlap, others": Column(
        layer_wise(torch.optim.Muon, overlap=OverlapPolicy()),
        group_options={"layer_wise": False},
        frees_gradients=True,
        refuses=LAYER_WISE | STEPPED_IN_BACKWARD,
    ),
}

_FREED = {"no zero_grad()", "two steps of one backward"}


@cache
def _twin(make: Any, frees_gradients: bool, name: str | None) -> list[torch.Tensor]:
    """Return the weights of the twin, without a habit if ``name`` is None."""
    run = Run(Column(make, make, frees_gradients=frees_gradients), is_twin=True)
    for index in range(STEPS):
        iterate(run, HABITS[name] if name is not None else None, index)
    return run.values()


def outcome(column: str, name: str) -> str:
    """Return "right", "refused" as the column says, "freed" if step() freed gradients that would
    have been used again, or else what is wrong."""
    of = COLUMNS[column]
    usual, expected = (_twin(of.twin, of.frees_gradients, habit) for habit in (None, name))
    ours, refusal = Run(of, is_twin=False), of.refuses.get(name)
    try:
        for index in range(STEPS):
            iterate(ours, HABITS[name], index)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return "refused" if refusal is not None and re.search(refusal, text) else text
    # torch's compiled AdamW counts steps in float32.
    tolerance = 1e-3 if name == "a compiled step" else 1e-9
    if not (off := _distance(ours.values(), expected)) < tolerance:
        return f"off by {off:.1e}"
    if refusal is not None:
        return "not refused"
    if (_distance(expected, usual) > 1e-3) == HABITS[name].matters:
        return "right"
    return "freed" if of.frees_gradients and name in _FREED else "right, but it does not matter"


def _distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def outcomes(column: str) -> dict[str, str]:
    """Return the outcome of each habit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers warn of skipped steps
        return {name: outcome(column, name) for name in HABITS}


def print_table() -> None:
    dist.init_process_group("gloo")
    table = {column: outcomes(column) for column in COLUMNS}
    if dist.get_rank() == 0:
        print(*(f"{index:2} {column}" for index, column in enumerate(COLUMNS)), sep="\n")
        print(f"{'':60}", *(f"{index:7}" for index in range(len(COLUMNS))))
        for name in HABITS:
            print(f"{name:60}", *(f"{table[column][name][:7]:>7}" for column in COLUMNS))
        counts = Counter(each for of_column in table.values() for each in of_column.values())
        cells = sum(counts.values())
        print(f"{cells} cells:", *(f"{count} {each}" for each, count in counts.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    print_table()
