"""Losses that read what ``unshard()`` shows, and pass the forward of its unit by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from fsdp_overlap import FsdpContext, fully_shard
from support.ranks import run_ranks
from support.twins import same

STEPS = 2


class Scorer(nn.Linear):
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Net(nn.Module):
    """Its forward runs neither the head nor the tail."""

    makes_gradients = False

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.tail = nn.Linear(4, 4), Scorer(4, 4), Scorer(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        if self.makes_gradients:
            for chunk in hidden.detach().split(1):
                unshard(self, "head")
                self.head.score(chunk).square().sum().backward()
        return hidden


def unshard(net: Any, *names: str) -> None:
    """Unshard modules of ``net``, or the net where it owns what they have. Do nothing in the
    twin."""
    for module in (getattr(net, name) for name in names):
        if owner := next((of for of in (module, net) if hasattr(of, "unshard")), None):
            owner.unshard()


class Fused(torch.autograd.Function):
    """Makes the gradients in forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scores = x @ weight.T
        ctx.save_for_backward(2 * scores @ weight, 2 * scores.T @ x)
        return scores.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return tuple(gradient * saved for saved in ctx.saved_tensors)


# Ways to make gradients


def reads(net: Net, x: torch.Tensor) -> None:
    hidden = net(x)
    unshard(net, "head")
    linear(hidden, net.head.weight, net.head.bias).square().sum().backward()


def calls_a_method(net: Net, x: torch.Tensor) -> None:
    hidden = net(x)
    unshard(net, "head")
    net.head.score(hidden).square().sum().backward()


def calls_a_fused_loss(net: Net, x: torch.Tensor) -> None:
    hidden = net(x)
    unshard(net, "head")
    Fused.apply(hidden, net.head.weight).backward()  # type: ignore[no-untyped-call]


def logs_before(net: Net, x: torch.Tensor) -> None:
    with torch.no_grad():
        net.head(net.body(x))
    calls_a_method(net, x)


def penalizes(net: Net, x: torch.Tensor) -> None:
    unshard(net, "head")
    (net.head.weight.square().sum() * x.mean()).backward()


def penalizes_after_forward(net: Net, x: torch.Tensor) -> None:
    net(x)
    penalizes(net, x)


def penalizes_before_backward(net: Net, x: torch.Tensor) -> None:
    hidden = net(x)
    penalizes(net, x)
    hidden.square().sum().backward()


def runs_backward_in_forward(net: Net, x: torch.Tensor) -> None:
    net.makes_gradients = True
    net(x)
    net.makes_gradients = False


def goes_by_chunks(net: Net, x: torch.Tensor) -> None:
    """One weight is read by all chunks, each with a backward of its own."""
    hidden = net(x)
    leaf = hidden.detach().requires_grad_()
    unshard(net, "head")
    weight = net.head.weight
    for chunk in leaf.split(1):
        (chunk @ weight.T).square().sum().backward()
    assert leaf.grad is not None
    hidden.backward(leaf.grad)


def keeps_its_graph(net: Net, x: torch.Tensor) -> None:
    hidden = net(x)
    unshard(net, "head")
    loss = net.head.score(hidden).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def makes_two_graphs(net: Net, x: torch.Tensor) -> None:
    first, second = net(x), net(-x)
    unshard(net, "head")
    losses = [net.head.score(hidden).square().sum() for hidden in (first, second)]
    for loss in losses:
        loss.backward()


def reads_several(net: Net, x: torch.Tensor) -> None:
    hidden = net(x)
    unshard(net, "head", "tail")
    net.tail.score(net.head.score(hidden)).square().sum().backward()


def runs_one_of_a_list(net: Net, x: torch.Tensor) -> None:
    hidden = net.tail(net(x))
    unshard(net, "head")
    net.head.score(hidden).square().sum().backward()


def is_passed_by_as_a_whole(net: Net, x: torch.Tensor) -> None:
    unshard(net, "body", "head")
    linear(x, net.body.weight, net.body.bias).square().sum().backward()
    unshard(net, "body", "head")
    net.head.score(x).square().sum().backward()


def gets_none_in_the_last(net: Net, x: torch.Tensor) -> None:
    """The last backward has no gradient for what is unsharded, which has one from before."""
    calls_a_method(net, x)
    hidden = net(x)
    unshard(net, "head")
    hidden.square().sum().backward()


def reads_frozen(net: Net, x: torch.Tensor) -> None:
    net.head.requires_grad_(False)
    reads(net, x)


WAYS: list[Callable[[Net, torch.Tensor], None]] = [
    *(reads, calls_a_method, calls_a_fused_loss, logs_before),
    *(penalizes, penalizes_after_forward, penalizes_before_backward),
    *(runs_backward_in_forward, goes_by_chunks, keeps_its_graph, makes_two_graphs),
    *(reads_several, runs_one_of_a_list, is_passed_by_as_a_whole),
    *(gets_none_in_the_last, reads_frozen),
]
HOLD_ON = [*WAYS[4:6], runs_backward_in_forward, is_passed_by_as_a_whole]
"""No backward of theirs comes back to a forward, so what is unsharded may still be read."""
RUN_THE_ROOT_BETWEEN = [logs_before, keeps_its_graph, makes_two_graphs, runs_one_of_a_list]
"""They read what the root's own forward or backward has freed, if all is one unit."""


# Ways to shard


def each(net: Net, **options: Any) -> FsdpContext:
    ctx = FsdpContext()
    for module in (net.body, net.head, net.tail):
        fully_shard(module, ctx, **options)
    return ctx


def with_root(net: Net, **options: Any) -> FsdpContext:
    ctx = each(net, **options)
    fully_shard(net, ctx, **options)
    return ctx


def as_one(net: Net, **options: Any) -> FsdpContext:
    """The root's own parameters are read."""
    ctx = FsdpContext()
    fully_shard(net, ctx, **options)
    return ctx


def with_list(net: Net, **options: Any) -> FsdpContext:
    ctx = FsdpContext()
    fully_shard(net.body, ctx, **options)
    fully_shard([net.head, net.tail], ctx, **options)
    fully_shard(net, ctx, **options)
    return ctx


def in_stage(stage: int) -> Callable[[Net], FsdpContext]:
    def shard(net: Any) -> FsdpContext:
        ctx = with_root(net)
        net.set_zero_stage(stage)
        return ctx

    return shard


def kept(net: Net) -> FsdpContext:
    return with_root(net, reshard_after_forward=False)


def check(way: Callable[[Any, torch.Tensor], None], shard: Any, accumulates: bool) -> None:
    torch.manual_seed(0)
    net: Any = Net().double()
    twin = copy.deepcopy(net)
    ctx = shard(net)
    if way is reads_frozen:
        net.head.requires_grad_(False)
    optimizers = [torch.optim.AdamW(of.parameters(), lr=0.1) for of in (net, twin)]
    for step, x in enumerate(batches()):
        for number in range(1 + accumulates):
            for unit in ctx.units:
                for module in unit.modules:
                    module.set_requires_gradient_sync(number == accumulates, recurse=False)
                    module.set_is_last_backward(number == accumulates)
            way(net, x[dist.get_rank()] + number)
            for rows in x:
                way(twin, rows + number)
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(x)
        for (name, parameter), whole in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert isinstance(parameter, DTensor), name
            assert (parameter.grad is None) == (whole.grad is None), name
            if parameter.grad is not None:
                same(parameter.grad.full_tensor(), whole.grad, name)
        norms = [nn.utils.clip_grad_norm_(of.parameters(), 1.0) for of in (net, twin)]
        same(norms[0], norms[1], "norm")
        if way not in HOLD_ON and shard not in STAGES:
            assert ctx.stats.current_full_buffers == 0
        for optimizer, model in zip(optimizers, (net, twin), strict=True):
            optimizer.step()
            (model if step % 2 else optimizer).zero_grad()
        assert all(parameter.grad is None for parameter in net.parameters())
    for (name, parameter), whole in zip(net.named_parameters(), twin.parameters(), strict=True):
        same(parameter.full_tensor().detach(), whole.detach(), name)


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.rand(dist.get_world_size(), 2, 4, generator=generator, dtype=torch.double)


STAGES = [in_stage(1), in_stage(2)]
SHARDS = [with_root, each, as_one, with_list, kept, *STAGES]


def all_ways() -> None:
    for number, (way, shard) in enumerate(product(WAYS, SHARDS)):
        if shard is as_one and way in RUN_THE_ROOT_BETWEEN:
            continue
        try:
            check(way, shard, accumulates=number % 2 == 1)
        except BaseException as error:
            error.add_note(f"case {number}: {way.__name__}, shard {SHARDS.index(shard)}")
            raise


@pytest.mark.slow
def test_parameters_are_sharded_after_a_backward_that_passed_the_forward_by() -> None:
    run_ranks(all_ways, 2, timeout=150)
