"""``torch.autograd`` beyond ``loss.backward()``: gradients of inputs, and of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, fully_shard
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import same
from support.zoo import WIDTH, Block

UNITS = 3


class Stack(nn.Sequential):
    """Rows ``[n, WIDTH]`` to scores ``[n, 1]``, by units that are linear and units that are not."""

    def __init__(self) -> None:
        super().__init__(Block(), nn.Linear(WIDTH, WIDTH), Block(), nn.Tanh(), nn.Linear(WIDTH, 1))


class Recomputed(Stack):
    """All of it, from its first parameter to its last, is recomputed in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = checkpoint(module, x, use_reentrant=self.reentrant)
        return x


class RecomputedReentrant(Recomputed):
    reentrant = True


class Pair:
    """A sharded model and an unsharded one, each on this rank's rows alone."""

    def __init__(self, build: Callable[[], nn.Sequential] = Stack, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = build().double()
        self.twin = copy.deepcopy(self.model)
        self.ctx = FsdpContext()
        for unit in list(self.model)[:UNITS]:
            fully_shard(unit, self.ctx, **options)
        fully_shard(self.model[-1], self.ctx, **options)
        fully_shard(self.model, self.ctx, **options)

    def inputs(self, count: int = 2) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(5 + dist.get_rank())
        for _ in range(count):
            x = torch.randn(4, WIDTH, generator=generator).double()
            yield x.clone().requires_grad_(), x.clone().requires_grad_()

    def check_gradients(self) -> None:
        """Those of parameters, the mean over ranks."""
        for (name, parameter), twin in zip(
            self.model.named_parameters(), self.twin.parameters(), strict=True
        ):
            assert (parameter.grad is None) == (twin.grad is None), name
            if twin.grad is not None:
                mean = twin.grad.detach().clone()
                dist.all_reduce(mean)
                same(parameter.grad.full_tensor(), mean / dist.get_world_size(), name)

    def step(self) -> None:
        with torch.no_grad():
            for model in (self.model, self.twin):
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(
                            parameter.grad if model is self.model else self.mean(parameter)
                        )
                        parameter.grad = None

    @staticmethod
    def mean(parameter: torch.Tensor) -> torch.Tensor:
        mean = parameter.grad.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    def check_rest(self) -> None:
        """Once the weights changed and a pass ran, nothing is kept for graphs of the old ones."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(2)
            self.model(torch.zeros(1, WIDTH).double())
        assert self.ctx.stats.current_full_buffers == 0
        assert self.ctx.stats.current_reduce_inputs == 0


Derive = Callable[[nn.Module, torch.Tensor], Any]


def of_inputs(model: nn.Module, x: torch.Tensor) -> Any:
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
    return gradient


def of_inputs_by_backward(model: nn.Module, x: torch.Tensor) -> Any:
    model(x).square().mean().backward(inputs=[x])
    return x.grad


def of_inputs_then_all(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return gradient


def batched(model: nn.Module, x: torch.Tensor) -> Any:
    scores = model(x)
    directions = torch.eye(len(scores)).double().unsqueeze(-1)
    (rows,) = torch.autograd.grad(scores, x, directions, is_grads_batched=True)
    return rows


def forward_mode(model: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        return forward_ad.unpack_dual(model(dual)).tangent.detach()


def penalty(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return gradient


def penalty_of_scores(model: nn.Module, x: torch.Tensor) -> Any:
    """The gradient that arrives at the model's output is constant: nothing flows back to it."""
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return gradient


def penalty_between(model: nn.Module, x: torch.Tensor) -> Any:
    """Other passes run between a gradient and its use."""
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x.detach() + 1).square().sum().backward()
    with torch.no_grad():
        model(x)
    (gradient.square().sum() + model(x).sum()).backward()
    return gradient


def penalty_twice(model: nn.Module, x: torch.Tensor) -> Any:
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    loss = gradient.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradient


def third_order(model: nn.Module, x: torch.Tensor) -> Any:
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    second.square().sum().backward()
    return second


def through_backward(model: nn.Module, x: torch.Tensor) -> Any:
    model(x).square().mean().backward(create_graph=True)
    gradient = x.grad
    x.grad = None
    gradient.square().sum().backward()
    return gradient


def hessian(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x[:1].detach())


def derive(build: Callable[[], nn.Sequential], how: Derive, reshard: bool | None) -> None:
    pair = Pair(build, reshard_after_forward=reshard)
    for x, twin_x in pair.inputs():
        result, expected = how(pair.model, x), how(pair.twin, twin_x)
        same(result, expected, "result")
        if x.grad is not None:
            same(x.grad, twin_x.grad, "gradient of the input")
        pair.check_gradients()
        pair.step()
    if reshard is not False:
        pair.check_rest()


FIRST_ORDER = [of_inputs, of_inputs_by_backward, of_inputs_then_all, batched, forward_mode]
HIGHER_ORDER = [
    penalty,
    penalty_of_scores,
    penalty_between,
    penalty_twice,
    third_order,
    through_backward,
    hessian,
]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("how", FIRST_ORDER)
def test_gradients_of_inputs(how: Derive) -> None:
    run_ranks(derive, 2, Stack, how, None)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("how", HIGHER_ORDER)
def test_gradients_of_gradients(how: Derive, reshard: bool | None) -> None:
    run_ranks(derive, 2, Stack, how, reshard)


def whole_though_not_needed() -> None:
    pair = Pair(reshard_after_forward=False)
    pair.model[-1].set_unshard_in_backward(False)
    for x, twin_x in pair.inputs():
        same(penalty(pair.model, x), penalty(pair.twin, twin_x), "result")
        pair.check_gradients()
        pair.step()


def test_what_a_graph_of_gradients_reads_unasked_stays_too() -> None:
    run_ranks(whole_though_not_needed, 2)


@pytest.mark.parametrize("how", [of_inputs, penalty])
def test_gradients_under_activation_checkpointing(how: Derive) -> None:
    run_ranks(derive, 2, Recomputed, how, None)


def no_reductions() -> None:
    """FSDP2 does as little."""
    pair = Pair()
    for x, _ in pair.inputs():
        of_inputs(pair.model, x)
        of_inputs_by_backward(pair.model, x)
        scores = pair.model(x)
        torch.autograd.grad(scores.square().sum(), scores)
    assert pair.ctx.stats.reduce_scatters == 0
    assert pair.ctx.stats.order_checks == 0
    pair.model.set_requires_gradient_sync(False)
    model_and_twin = [(pair.model, 0), (pair.twin, 1)]
    xs = next(pair.inputs(1))
    for model, index in model_and_twin:
        model(xs[index]).sum().backward()
    pair.model.set_requires_gradient_sync(True)
    for model, index in model_and_twin:
        of_inputs(model, xs[index])
        model(xs[index]).sum().backward()
    pair.check_gradients()


def test_gradients_of_inputs_reduce_nothing() -> None:
    run_ranks(no_reductions, 2)


class Skipping(Stack):
    """On some ranks the gradient of the input alone flows back, through frozen units."""

    def __init__(self) -> None:
        super().__init__()
        for module in list(self)[1:]:
            module.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self[0](x)  # on every rank
        x = x if dist.get_rank() else used
        for module in list(self)[1:]:
            x = module(x)
        return x


def nothing_to_accumulate() -> None:
    pair = Pair(Skipping)
    for x, twin_x in pair.inputs():
        pair.model(x).square().sum().backward()
        unused = sum(parameter.sum() for parameter in pair.twin[0].parameters())
        (pair.twin(twin_x).square().sum() + 0 * unused).backward()
        same(x.grad, twin_x.grad, "gradient of the input")
        pair.check_gradients()
        pair.step()
    pair.check_rest()


def test_a_rank_whose_backward_reaches_no_parameter_takes_part_in_reductions() -> None:
    run_ranks(nothing_to_accumulate, 2)


def nothing_but_recomputed() -> None:
    """No parameter is in the outer graph, only in those that backward makes within itself."""
    pair = Pair(RecomputedReentrant)
    for x, twin_x in pair.inputs():
        pair.model(x).square().sum().backward()
        pair.twin(twin_x).square().sum().backward()
        same(x.grad, twin_x.grad, "gradient of the input")
        pair.check_gradients()
        pair.step()
    assert pair.ctx.stats.reduce_scatters == 2 * (UNITS + 1)
    pair.check_rest()


def test_parameters_that_are_only_in_recomputed_graphs_are_reduced() -> None:
    run_ranks(nothing_but_recomputed, 2)


def late_penalty(how: str) -> None:
    pair = Pair()
    x, _ = next(pair.inputs(1))
    (gradient,) = torch.autograd.grad(pair.model(x).sum(), x, create_graph=True)
    if how == "edit":
        with torch.no_grad():
            for parameter in pair.model.parameters():
                parameter.mul_(2)
            pair.model(x)
    elif how == "reshard":
        for unit in pair.ctx.units:
            unit.modules[0].reshard()
    elif how == "release":
        pair.ctx.release_unsharded()
    else:
        pair.ctx.reset()
    gradient.square().sum().backward()


@pytest.mark.parametrize("how", ["edit", "reshard", "release", "reset"])
def test_a_gradient_of_weights_that_are_gone_is_an_error(how: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_on_fake_group(late_penalty, 2, how)


def sharded_as_inputs(by: str) -> None:
    pair = Pair()
    x, _ = next(pair.inputs(1))
    loss = pair.model(x).sum()
    if by == "grad":
        torch.autograd.grad(loss, list(pair.model.parameters()))
    else:
        loss.backward(inputs=list(pair.model.parameters()))


@pytest.mark.parametrize("by", ["grad", "backward"])
def test_gradients_of_sharded_parameters_come_by_backward_alone(by: str) -> None:
    with pytest.raises(RuntimeError, match=r"call loss\.backward\(\)"):
        run_on_fake_group(sharded_as_inputs, 2, by)
