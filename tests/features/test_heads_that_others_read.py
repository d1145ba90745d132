"""A list of which a module does not run, because code around it reads the module's parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, fully_shard
from support.fake_group import run_on_fake_group
from support.module_lists import Normed, shard_ends, shard_last_two
from support.ranks import run_ranks
from support.twins import LENGTH, Twins
from support.zoo import ROWS, VOCABULARY, WIDTH


class ReadsHead(Normed):
    """Its forward reads the head's parameters, and never runs the head."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.chunks = True
        return self.scores(super().forward(tokens))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.head.weight, self.head.bias)


class ReadsTiedHead(ReadsHead):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class TrainsOnlyHead(ReadsHead):
    def __init__(self) -> None:
        super().__init__()
        for parameter in [
            *self.embedding.parameters(),
            *self.layers.parameters(),
            *self.norm.parameters(),
        ]:
            parameter.requires_grad_(False)


class ReadsEither(ReadsHead):
    """In turn it reads the parameters of the head, and never runs the head, or those of the norm,
    and never runs the norm."""

    turn = 0
    runs_all = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.runs_all:
            self.chunks = False
            return Normed.forward(self, tokens)
        if self.turn % 2 == 0:
            return super().forward(tokens)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        scores: torch.Tensor = self.head(x)
        # Squares of the weight, because their backward reads it.
        return scores + scores.new_tensor(range(VOCABULARY)) * self.norm.weight.square().sum()


class Checkpointed(ReadsHead):
    """Backward runs again what reads the head."""

    is_reentrant = False

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().scores, x, use_reentrant=self.is_reentrant)


class CheckpointedReentrantly(Checkpointed):
    is_reentrant = True


class CheckpointedWithNorm(ReadsHead):
    """Backward runs the norm again, which is of the same unit, and then what reads the head."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        return checkpoint(lambda x: self.scores(self.norm(x)), x, use_reentrant=False)


class CheckpointedBetween(ReadsHead):
    """Its last module is of the same unit, and backward is done with that before."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        x = checkpoint(lambda x: x * self.head.weight.square().sum(), x, use_reentrant=False)
        for layer in self.layers:
            x = self.run(layer, x)
        scores: torch.Tensor = self.last(x)
        return scores


def shard_last_three(model: CheckpointedBetween, ctx: FsdpContext) -> None:
    for layer in model.layers:
        fully_shard(layer, ctx)
    fully_shard([model.norm, model.head, model.last], ctx)
    fully_shard(model, ctx)


class WithinNoGrad(ReadsHead):
    """Makes its graph though its caller asked for none."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return super().forward(tokens)


class ReadsApart(ReadsHead):
    """Its two outputs share no graph."""

    def forward(self, tokens: torch.Tensor) -> Any:
        self.chunks = True
        x = Normed.forward(self, tokens)
        return x, self.scores(x.detach().requires_grad_())


CASES = {
    "plain": (ReadsHead, shard_last_two),
    "kept": (ReadsHead, partial(shard_last_two, reshard_after_forward=False)),
    "freed": (ReadsHead, partial(shard_last_two, reshard_after_forward=True)),
    "tied": (ReadsTiedHead, shard_ends),
    "nothing else trained": (TrainsOnlyHead, shard_last_two),
    "checkpointed": (Checkpointed, shard_last_two),
    "checkpointed reentrantly": (CheckpointedReentrantly, shard_last_two),
    "checkpointed with its norm": (CheckpointedWithNorm, shard_last_two),
    "checkpointed before others": (CheckpointedBetween, shard_last_three),
}


def train(name: str, prefetch: int) -> None:
    Twins(*CASES[name], prefetch=prefetch).train(3)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("world_size", "prefetch"), [(2, 0), (3, 1)])
def test_it_trains_like_the_twin(world_size: int, name: str, prefetch: int) -> None:
    run_ranks(train, world_size, name, prefetch)


PROGRAMS = {
    "in order": "F0 F1 F2 B0 B1 B2",
    "the last first": "F0 F1 B1 B0",
    "one after all others": "F0 F1 B1 F2 B2 B0",
    "as pipelines do": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    "not synchronized": "F0 F1 N0 B1",
    "kept graph": "F0 K0 B0",
    "kept graph of two": "F0 K0 F1 B1 K0 B0",
    "evaluation between": "F0 F1 E0 B0 B1",
    "all of the list between": "F0 F1 A0 B0 B1",
}
"""Forwards and backwards by the number of the pass. A ``K`` is a backward that keeps its graph, an
``N`` one without synchronization. ``E`` and ``A`` run the model, or the list, without gradients."""


def run(program: str) -> None:
    for model in (ReadsHead, ReadsEither):
        twins = Twins(model, shard_last_two)
        batches = list(twins.batches(5))
        for _ in range(2):
            losses: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for action, number in program.split():
                run_action(twins, action, int(number), batches[int(number)], losses)
            twins.check_gradients()
            twins.check_rest()
            twins.step()
            twins.check_parameters()


def run_action(twins: Twins, action: str, number: int, batch: Any, losses: dict[int, Any]) -> None:
    twins.model.turn = twins.twin.turn = number
    if action == "F":
        losses[number] = twins.losses(*batch)
    elif action == "E":
        with torch.no_grad():
            twins.model(twins.mine(batch[0]))
    elif action == "A":
        with torch.no_grad():
            twins.model.head(twins.model.norm(torch.ones(1, WIDTH, dtype=torch.float64)))
    else:
        twins.model.set_requires_gradient_sync(action != "N")
        for loss in losses[number]:
            loss.backward(retain_graph=action == "K")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_graphs_that_read_it_may_all_be_alive(program: str) -> None:
    run_ranks(run, 2, program)


def dropped() -> None:
    twins = Twins(ReadsHead, shard_last_two)
    first, second = twins.batches(2)
    twins.losses(*first)
    twins.backward(*second)
    twins.step()
    twins.backward(*first)
    twins.check_gradients()
    twins.check_rest()


def test_a_graph_that_was_dropped_keeps_nothing_after_the_step() -> None:
    run_ranks(dropped, 2)


class ReturnsHidden(TrainsOnlyHead):
    """Its caller runs the head, and nothing else is trained."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return x


def only_the_head() -> None:
    twins = Twins(ReturnsHidden, shard_last_two)
    tokens, _ = next(twins.batches(1))
    hidden = twins.model(twins.mine(tokens))
    twins.model.head(hidden).sum().backward()
    assert not twins.model.head._fsdp_unit.is_gathered


def test_a_pass_that_no_backward_can_come_to_is_not_waited_for() -> None:
    run_ranks(only_the_head, 2)


def within_no_grad() -> None:
    twins = Twins(WithinNoGrad, shard_last_two)
    tokens, _ = next(twins.batches(1))
    with torch.no_grad():
        scores = twins.model(twins.mine(tokens))
        expected = [twins.twin(rows) for rows in tokens.split(ROWS)]
    scores.square().sum().backward()
    for each in expected:
        each.square().sum().div(twins.world).backward()
    twins.check_gradients()
    twins.check_rest()


def test_a_graph_made_within_no_grad_may_read_it() -> None:
    run_ranks(within_no_grad, 2)


def freed_early() -> None:
    """Whichever pass backward comes to, and whatever the other one left out."""
    head = f"({VOCABULARY}, {WIDTH}|{WIDTH}, {VOCABULARY})"
    for turn, read in ((0, head), (1, str(WIDTH))):
        twins = Twins(ReadsEither, shard_last_two)
        losses: dict[int, Any] = {}
        for number, batch in enumerate(twins.batches(2)):
            run_action(twins, "F", number, batch, losses)
        twins.model.state_dict()
        with pytest.raises(RuntimeError, match=rf"an inplace operation: \[\S+ \[{read}\]\]"):
            losses[turn][0].backward()
    twins = Twins(Checkpointed, shard_last_two)
    loss, _ = twins.losses(*next(twins.batches(1)))
    twins.model.state_dict()
    with pytest.raises(RuntimeError, match="linear is not supported on a RaggedDTensor"):
        loss.backward()


def test_a_graph_that_reads_what_was_freed_is_an_error() -> None:
    run_on_fake_group(freed_early, 2)


def walked_again() -> None:
    twins = Twins(ReadsApart, shard_last_two)
    tokens, _ = next(twins.batches(1))
    hidden, scores = twins.model(twins.mine(tokens))
    hidden.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.square().sum().backward()


def test_a_part_of_a_graph_that_is_left_when_its_pass_is_done_is_an_error() -> None:
    run_on_fake_group(walked_again, 2)


def differentiated_again() -> None:
    """A graph of gradients reads all of a unit, and lives on when no other graph does."""
    twins = Twins(ReadsEither, shard_last_two)
    batches = list(twins.batches(2))
    penalties = []
    for model in (twins.model, twins.twin):
        model.runs_all = True
        x = torch.ones(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        model.embedding.register_forward_hook(lambda *_, x=x: x)
        output = model(batches[0][0][:1]).square().sum()
        [gradient] = torch.autograd.grad(output, x, create_graph=True)
        penalties.append(gradient.square().sum())
        model.runs_all = False
        model(batches[1][0][:1]).square().sum().backward()
    for penalty in penalties:
        penalty.backward()
    twins.check_gradients()


def test_a_graph_of_gradients_outlives_that_which_reads_the_head() -> None:
    run_ranks(differentiated_again, 2)
