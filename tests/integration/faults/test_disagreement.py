"""Ranks that run different units, or the same in another order: right, or an error on every rank
that names what each of them did, after which training can go on. Also where sizes differ, so that
messages would not fit."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.desync import confirmation
from fsdp_overlap.desync.confirmation import ExpectedOrder
from support.ranks import expect_rank_errors, run_ranks
from support.twins import Twins, impatient
from support.zoo import VOCABULARY, WIDTH


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Wayward(nn.Module):
    """Where the rows begin with token 1, runs its layers as :attr:`way` says."""

    way = ""

    def __init__(self, equal: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(20 if equal else hidden) for hidden in (20, 2000, 4, 300))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        way = self.way if tokens[0, 0] == 1 else ""
        x = self.embedding(tokens)
        a, b, c, d = self.layers
        layers = {
            "other order": [a, c, b, d],
            "other unit": [a, d, c, d],
            "skips one": [a, b, d],
            "skips the last": [a, b, c],
            "stops early": [a, b],
            "one twice": [a, b, b, c, d],
            "two again in backward": [a, b],
        }
        for layer in layers.get(way, self.layers):
            if way == "again in backward" and layer is c:
                x = checkpoint(layer, x, use_reentrant=True)
            elif way == "no gradient" and layer is c:
                x = x + layer(x.detach()).detach()
            else:
                x = layer(x)
        if way == "two again in backward":
            x = checkpoint(lambda x: d(c(x)), x, use_reentrant=True)
        return self.head(x)


def shard(model: Wayward, ctx: FsdpContext) -> None:
    for layer in model.layers:
        fully_shard(layer, ctx)
    fully_shard(model, ctx)


class MarkedTwins(Twins):
    """The rows of each rank begin with its number."""

    def batches(self, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for tokens, targets in super().batches(count):
            tokens[:, 0] = torch.arange(self.world).repeat_interleave(len(tokens) // self.world)
            yield tokens, targets

    def go_on(self) -> None:
        """After an error that every rank has seen."""
        self.ctx.reset()
        self.check_rest()
        self.check_parameters()
        self.optimizer.zero_grad()
        self.twin_optimizer.zero_grad()
        self.train(2)


def differ(
    way: str, equal: bool, steps_before: int, mesh: tuple[int, ...] | None = None, prefetch: int = 1
) -> str:
    """Returns what went wrong, on this rank, where something did."""
    with impatient():
        twins = MarkedTwins(lambda: Wayward(equal), shard, prefetch=prefetch, mesh=mesh)
        twins.train(steps_before)
        twins.model.way = twins.twin.way = way
        try:
            twins.train(2)
            return ""
        except RuntimeError as error:
            twins.model.way = twins.twin.way = ""
            twins.go_on()
            return str(error)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(
    "way",
    [
        "other order",
        "other unit",
        "skips one",
        "skips the last",
        "stops early",
        "two again in backward",
    ],
)
def test_ranks_that_differ_get_an_error_that_names_units_and_then_go_on(
    way: str, equal: bool, steps_before: int
) -> None:
    for message in run_ranks(differ, 2, way, equal, steps_before):
        assert "ranks ran different units: collective " in message
        assert "since the last backward was rank 0: " in message
        assert "; rank 1: " in message
        assert "unit 'layers." in message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("way", ["no gradient", "again in backward", "one twice"])
def test_ranks_that_differ_within_a_unit_train_as_unsharded(way: str, prefetch: int) -> None:
    assert run_ranks(differ, 2, way, False, 1, None, prefetch) == ["", ""]


def test_ranks_on_all_copies_hear_of_a_difference_on_one() -> None:
    for rank, message in enumerate(run_ranks(differ, 4, "other order", False, 1, (2, 2))):
        assert "rank 1: " in message, (rank, message)
        assert "ranks ran different units" in message


def leave_copies(rank: int) -> None:
    """``rank`` leaves the reduction across replicas to a later backward."""
    with impatient():
        twins = MarkedTwins(lambda: Wayward(False), shard, mesh=(2, 2))
        twins.train(1)
        twins.model.set_requires_all_reduce(twins.rank != rank)
        for tokens, targets in twins.batches(2):
            twins.losses(tokens, targets)[0].backward()


def test_a_rank_that_leaves_out_copies_alone_gets_an_error() -> None:
    messages = expect_rank_errors(leave_copies, 4, 1, match="ranks ran different units")
    assert "rank 0: reduce_scatter and all_reduce across replicas of unit 'layers.3'" in messages[0]
    assert "rank 1: reduce_scatter of unit 'layers.3'" in messages[1]


def differ_in_passes(what: str) -> str:
    """Rank 1 runs other passes than rank 0."""
    with impatient():
        twins = MarkedTwins(lambda: Wayward(False), shard)
        twins.train(2)
        (tokens, targets), (more, _) = twins.batches(2)
        try:
            if what == "an evaluation" and twins.rank == 1:
                with torch.no_grad():
                    twins.model(twins.mine(more))
            first, _ = twins.losses(tokens, targets)
            second, _ = twins.losses(more, targets)
            twins.model.way = "stops early"
            third = twins.model(twins.mine(tokens)).sum()
            twins.model.way = ""
            losses = [first, second, third] if twins.rank == 0 else [third, second, first]
            if what == "no backward" and twins.rank == 1:
                losses = []
            if what == "no synchronization" and twins.rank == 1:
                twins.model.set_requires_gradient_sync(False)
            for loss in losses:
                loss.backward()
            twins.losses(tokens, targets)
        except RuntimeError as error:
            twins.model.set_requires_gradient_sync(True)
            twins.go_on()
            return str(error)
    return ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "what", ["an evaluation", "other backwards first", "no backward", "no synchronization"]
)
def test_ranks_that_run_other_passes_get_an_error_and_then_go_on(what: str) -> None:
    for message in run_ranks(differ_in_passes, 2, what):
        assert "ranks ran different units: collective " in message, message


def build_differently(what: str) -> None:
    """Rank 1 has another model."""
    ctx = FsdpContext()
    model = Wayward(False)
    if dist.get_rank() == 1:
        if what == "a parameter":
            model.layers[2] = Layer(5)
        else:
            model.layers.append(Layer(4))
            model.layers[4].requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer, ctx)
    if what == "a unit that nobody runs":
        model.layers[-1].forward = nn.Identity().forward
    fully_shard(model, ctx)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("what", ["a parameter", "a unit that nobody runs"])
def test_ranks_with_other_models_get_an_error(what: str) -> None:
    match = {
        "a parameter": "ranks planned unit 'layers.2' differently",
        "a unit that nobody runs": r"'Wayward', which is unit 5 of 5 on rank 0, 6 of 6 on rank 1",
    }
    expect_rank_errors(build_differently, 2, what, match=match[what])


def add_a_unit_alone(steps_after: int) -> None:
    """Rank 1 has another unit from some moment on."""
    with impatient():
        twins = MarkedTwins(lambda: Wayward(False), shard)
        twins.train(2)
        fully_shard(nn.Linear(3, 3).double(), twins.ctx)
        twins.train(steps_after)
        if twins.rank == 1:
            fully_shard(nn.Linear(3, 3).double(), twins.ctx)
        twins.train(1)


@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_rank_that_adds_a_unit_alone_gets_an_error(steps_after: int) -> None:
    expect_rank_errors(add_a_unit_alone, 2, steps_after, match="rank 1: a new unit")


def confirmations_of_steps(prefetch: int, stage: int) -> list[int]:
    """Of steps of two microbatches and an evaluation."""
    twins = MarkedTwins(lambda: Wayward(False), shard, prefetch=prefetch)
    twins.model.set_zero_stage(stage)
    batch = next(twins.batches(1))
    counts = []
    for _ in range(4):
        before = twins.ctx.stats.confirmations
        for is_last in (False, True):
            twins.model.set_requires_gradient_sync(is_last)
            twins.losses(*batch)[0].backward()
        twins.optimizer.step()
        with torch.no_grad():
            twins.model(twins.mine(batch[0]))
        counts.append(twins.ctx.stats.confirmations - before)
    return counts


@pytest.mark.parametrize(("prefetch", "stage"), [(0, 3), (1, 3), (2, 3), (1, 2)])
def test_a_step_like_the_last_one_takes_no_confirmation(prefetch: int, stage: int) -> None:
    first, *_, last = run_ranks(confirmations_of_steps, 2, prefetch, stage)[0]
    assert first > 0
    assert last == 0


@settings(derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=16), st.lists(st.integers(0, 9)))
def test_what_repeats_is_expected_in_the_end(period: list[int], before: list[int]) -> None:
    """Where two codes tell what follows, as in the order of units."""
    follows: dict[tuple[int, int], int] = {}
    for index in range(len(period)):
        first, second, third = (3 * period)[index : index + 3]
        assume(follows.setdefault((first, second), third) == third)
    expectation = ExpectedOrder()
    with patch.object(confirmation, "REMEMBERED", 400):  # also while it forgets
        for code in before + 20 * period:
            expectation.observe(code)
        assert all(expectation.observe(code) for code in 30 * period)
