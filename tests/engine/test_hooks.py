"""Users' own hooks run where they run without sharding, and see what they see under FSDP2."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.desync.order_check import OrderCheck
from fsdp_overlap.engine.param_group import ParamGroup
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import Model, shard_layers


class Events:
    """What hooks saw, in order: their name, and whether the unit's weight was whole."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self.seen: list[tuple[str, bool]] = []

    def note(self, name: str) -> Callable[..., None]:
        def hook(*_: Any, **__: Any) -> None:
            self.seen.append((name, not isinstance(self.unit.up.weight, DTensor)))

        return hook

    def register(self, when: str) -> None:
        for name, module in (("unit", self.unit), ("inner", self.unit.up)):
            for prepend in (False, True):
                label = f"{name}, {when}{', prepended' if prepend else ''}"
                module.register_forward_pre_hook(self.note(f"pre {label}"), prepend=prepend)
                module.register_forward_hook(self.note(f"post {label}"), prepend=prepend)
                module.register_full_backward_pre_hook(
                    self.note(f"backward pre {label}"), prepend=prepend
                )
                module.register_full_backward_hook(self.note(f"backward {label}"), prepend=prepend)
            module.register_forward_hook(
                self.note(f"always {name}, {when}"), with_kwargs=True, always_call=True
            )


def events_of(shard: Callable[[nn.Module], None]) -> list[tuple[str, bool]]:
    torch.manual_seed(0)
    model = Model()
    events = Events(model.layers[1])
    events.register("before")
    shard(model)
    events.register("after")
    for _ in range(2):
        scores = model(torch.arange(10).view(2, 5))
        scores.register_hook(events.note("output"))
        scores.sum().backward()
    return events.seen


def order_of_hooks() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard_by_fsdp2(model: nn.Module) -> None:
        for module in (*model.layers, model):
            fsdp2.fully_shard(module, mesh=mesh)

    plain, theirs, ours = map(
        events_of,
        (lambda model: None, shard_by_fsdp2, lambda model: shard_layers(model, FsdpContext())),
    )
    assert ours == theirs
    assert [name for name, _ in ours] == [name for name, _ in plain]
    seen = dict(ours)
    assert not seen["pre unit, after, prepended"]
    assert seen["pre unit, before"]
    assert seen["pre unit, after"]
    assert seen["post unit, before"]
    assert not seen["post unit, after"]
    assert seen["backward unit, after"]


@pytest.mark.filterwarnings("ignore")
def test_hooks_keep_their_order_and_see_what_they_see_under_fsdp2() -> None:
    run_on_fake_group(order_of_hooks, 2)


def add_hooks(model: Any) -> None:
    """Hooks that change what they get."""
    first, second, third = model.layers
    first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    first.up.register_forward_hook(lambda module, args, output: output * 3)
    second.register_forward_hook(lambda module, args, output: output.tanh())
    second.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 2,))
    third.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 5,))

    def scale_gradient(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 0.5)

    third.register_forward_hook(scale_gradient)


def hooks_that_change(when: str) -> None:
    def shard(model: Any, ctx: FsdpContext) -> None:
        if when == "before":
            add_hooks(model)
        shard_layers(model, ctx)
        if when == "after":
            add_hooks(model)

    twins = Twins(Model, shard)
    add_hooks(twins.twin)
    twins.train(2)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_may_change_inputs_outputs_and_gradients(when: str) -> None:
    run_ranks(hooks_that_change, 2, when)


def raising_hook() -> None:
    twins = Twins.of("layers")

    def fail(*_: Any) -> None:
        raise ValueError("the user's own")

    handle = twins.model.layers[1].register_forward_pre_hook(fail)
    batch = next(twins.batches(1))
    with pytest.raises(ValueError, match="the user's own"):
        twins.losses(*batch)
    twins.ctx.reset()
    handle.remove()
    twins.train(1)


def test_a_hook_that_raises_leaves_nothing_behind() -> None:
    run_ranks(raising_hook, 2)


INTERRUPTED: dict[str, tuple[type, str, bool]] = {
    "before record": (OrderCheck, "record", False),
    "before record_gather": (ParamGroup, "record_gather", False),
    "after record_gather": (ParamGroup, "record_gather", True),
    "before free": (ParamGroup, "free", False),
}


def interrupts(where: str) -> None:
    """An interrupt at each of the first calls, where units have several param groups, leaves
    counters and states right. Without a reset the next step is that of the twin."""
    owner, name, is_over = INTERRUPTED[where]
    method = getattr(owner, name)
    twins = Twins.of("frozen and partly frozen units")
    twins.train(1)
    for last in (1, 2):
        count = itertools.count(1)

        def interrupt(*args: Any, last: int = last, count: Any = count) -> Any:
            is_last = next(count) == last
            if is_last and not is_over:
                raise KeyboardInterrupt
            result = method(*args)
            if is_last:
                raise KeyboardInterrupt
            return result

        tokens, _ = next(twins.batches(1))
        with patch.object(owner, name, interrupt), pytest.raises(KeyboardInterrupt):
            twins.model(twins.mine(tokens))
        param_groups = [group for unit in twins.ctx.units for group in unit.param_groups]
        held = sum(param_group.full.allocated for param_group in param_groups)
        assert twins.ctx.stats.current_full_buffers == held
        for unit in twins.ctx.units:
            assert unit.is_gathered == any(group.is_gathered for group in unit.param_groups)
        twins.train(1)
        twins.check_rest()


@pytest.mark.parametrize("where", INTERRUPTED)
def test_an_interrupt_of_a_gather_leaves_counters_right(where: str) -> None:
    run_ranks(interrupts, 2, where)


class Collects(nn.Module):
    """Returns None, and may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.error: Exception | None = None

    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> None:
        found.append(self.linear(x))
        if self.error is not None:
            raise self.error


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Collects()
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> None:
        self.inner(x, found)
        found.append(self.last(found[-1]))


def forwards_while_an_error_is_handled() -> None:
    ctx = FsdpContext()
    model = Outer()
    fully_shard(model.inner, ctx, reshard_after_forward=False)
    fully_shard(model, ctx, reshard_after_forward=False)

    def run(error: Exception | None) -> None:
        model.inner.error = error
        try:
            raise KeyError("the caller's")
        except KeyError as handled:
            model.inner.error = handled if isinstance(error, KeyError) else error
            model(torch.ones(2, 4), [])

    run(None)
    assert ctx.stats.current_full_buffers == 2  # as the user said
    assert ctx.error_monitor._event == ""
    for error in (ValueError("the forward's"), KeyError()):  # the latter raises the caller's again
        ctx.release_unsharded()
        with pytest.raises(type(error)) as raised:
            run(error)
        assert ctx.stats.current_full_buffers == 0
        assert repr(raised.value) in ctx.error_monitor._event
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_forward_that_returns_none_while_an_error_is_handled_did_not_raise() -> None:
    run_ranks(forwards_while_an_error_is_handled, 2)


class Fragile:
    """A class of the user's, registered with pytree, in which nobody can look once it is broken."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.is_broken = x, False

    def parts(self) -> tuple[list[torch.Tensor], None]:
        if self.is_broken:
            raise ArithmeticError("of the user's class")
        return [self.x], None


torch.utils._pytree.register_pytree_node(Fragile, Fragile.parts, lambda parts, _: Fragile(*parts))


class BreaksWhatItGets(nn.Module):
    breaks: str = ""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, fragile: Fragile) -> Any:
        out = Fragile(self.linear(fragile.x))
        fragile.is_broken = self.breaks == "argument"
        out.is_broken = self.breaks == "output"
        return out


def class_that_raises(breaks: str) -> None:
    ctx = FsdpContext()
    model = nn.ModuleList(BreaksWhatItGets() for _ in range(2))
    for module in model:
        fully_shard(module, ctx, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for _ in range(2):
        model[0].breaks = breaks
        with pytest.raises(ArithmeticError, match="of the user's class"):
            model[0](Fragile(torch.ones(2, 4)))
        assert not ctx.schedule.is_in_forward
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        model[0].breaks = ""
        y = model[1](model[0](Fragile(torch.ones(2, 4)))).x
        y.sum().backward()
        assert model[1].linear.bias.grad.full_tensor().tolist() == [2.0] * 4
        model.zero_grad()


@pytest.mark.parametrize("breaks", ["argument", "output"])
def test_a_forward_has_ended_where_a_users_class_raises(breaks: str) -> None:
    run_ranks(class_that_raises, 2, breaks)


def forwards_of_one_backward(model: nn.Module, count: int) -> None:
    sum(model(x).square().sum() for x in inputs(count)).backward()  # type: ignore[union-attr]


def backwards_of_one_graph(model: nn.Module, count: int) -> None:
    loss = sum(model(x).square().sum() for x in inputs(count))
    for _ in range(3):
        loss.backward(retain_graph=True)  # type: ignore[union-attr]


def backwards_through_time(model: nn.Module, count: int) -> None:
    x = torch.ones(2, 4)
    for _ in range(count):
        x = model(x).tanh()
        x.square().sum().backward(retain_graph=True)


def inputs(count: int) -> Sequence[torch.Tensor]:
    return torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()


def hooks_that_are_not_linear(
    train: Callable[[nn.Module, int], None], count: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    twin = copy.deepcopy(model)
    ctx = FsdpContext(**options)
    for module in model:
        fully_shard(module, ctx)
    fully_shard(model, ctx)
    for each in (model, twin):
        for parameter in each.parameters():
            parameter.register_hook(lambda gradient: gradient.square() - 1)
        for _ in range(2):
            train(each, count)
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad, msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("train", "count"),
    [
        (forwards_of_one_backward, 64),
        (forwards_of_one_backward, 70),
        (backwards_of_one_graph, 3),
        (backwards_through_time, 4),
    ],
)
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"layout": PerTensor()}])
def test_a_hook_sees_one_whole_gradient_in_a_backward(
    train: Callable[[nn.Module, int], None], count: int, options: dict[str, Any]
) -> None:
    run_ranks(hooks_that_are_not_linear, 2, train, count, options)


# What goes around hooks.

X = torch.ones(2, 4)


def sharded() -> nn.Module:
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), FsdpContext())


def functional_call() -> None:
    model = sharded()
    weights = {name: torch.zeros(value.shape) for name, value in model.named_parameters()}
    torch.func.functional_call(model, weights, (X,))


def functional_call_of_shards() -> None:
    model = sharded()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    torch.func.functional_call(model, weights, (X,))


def functional_calls_beside_fsdp2() -> None:
    call = torch.func.functional_call
    found = []
    for shard in (fully_shard, fsdp2.fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        shard(model)
        results = []
        for _ in range(2):
            own, copies = model.state_dict(), {"1.running_mean": torch.full((4,), 3.0)}
            results.append(call(model, dict(model.named_parameters()), (X,)))
            results[-1].square().sum().backward()
            model.eval()
            results.append(call(model, copies, (X,)))
            model.train()
            assert torch.equal(copies["1.running_mean"], torch.full((4,), 3.0))
            assert model.state_dict().keys() == own.keys()
        results += [parameter.grad.full_tensor() for parameter in model.parameters()]
        if shard is fully_shard:
            others = {name: value.detach() for name, value in model.named_parameters()}
            with pytest.raises(RuntimeError, match="was replaced"):
                call(model, others, (X,))
            results += [model(X), results[0]]
        found.append(results)
    for ours, theirs in zip(*found, strict=False):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*found[0][-2:])  # what was refused left nothing behind


def test_functional_calls_take_a_models_own_parameters_and_any_buffers_as_in_fsdp2() -> None:
    run_ranks(functional_calls_beside_fsdp2, 2)


@pytest.mark.parametrize("way", [functional_call, functional_call_of_shards])
def test_a_functional_call_with_other_parameters_is_refused(way: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match=r"functional_call\(\) with an unsharded copy"):
        run_on_fake_group(way, 2)


def transform(way: Callable[[Any], Any]) -> None:
    model = sharded()
    with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func"):
        way(model)
    model(X).sum().backward()
    assert model[0].weight.grad is not None


def of_grad(model: nn.Module) -> None:
    torch.func.grad(lambda x: model(x).sum())(X)


def of_vmap(model: nn.Module) -> None:
    torch.func.vmap(model)(X)


def of_jvp(model: nn.Module) -> None:
    torch.func.jvp(model, (X,), (X,))


@pytest.mark.parametrize("way", [of_grad, of_vmap, of_jvp])
def test_transforms_are_refused_and_leave_nothing_behind(way: Callable[[Any], Any]) -> None:
    run_on_fake_group(transform, 2, way)


def capture() -> None:
    model = sharded()
    model._fsdp_unit.context.device = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        model(X)


def test_a_first_forward_in_a_captured_cuda_graph_is_refused() -> None:
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        run_on_fake_group(capture, 2)
