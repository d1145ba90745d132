"""The toy that docs/adding_features.md adds as a feature, and the code on that page."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

import fsdp_overlap
from fsdp_overlap.comm.collectives import CollectivePair, Transport
from fsdp_overlap.comm.comm_streams import DeviceCommStream, PendingCollective
from fsdp_overlap.schedule.prefetch import Prefetcher
from fsdp_overlap.schedule.scheduler import Schedule
from support.defects import Defect
from support.emulated import Program, kinds, run
from support.examples import EXAMPLES, load
from support.fake_group import run_on_fake_group
from support.pages import ROOT
from support.ranks import run_ranks
from support.recorded import GATHER, Entry, RecordingCommStream
from support.schedule_model import Action, Forward, Options, Rank, subsets
from support.twins import Twins
from support.zoo import Model, shard_layers

TOY = EXAMPLES / "random_order.py"
PAGE = (ROOT / "docs" / "adding_features.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CORE = ("comm", "desync", "engine", "layout", "schedule", "tensor", "torch_internals")
LAYERS, PREFETCH, STEPS = 7, 3, 3


# ---- the toy ----


def test_the_toy_is_short_and_imports_the_api_and_the_core_alone() -> None:
    text = TOY.read_text()
    assert len(text.splitlines()) <= 60
    assert f" in {len(text.splitlines())} lines and without a change" in PAGE.replace("\n", " ")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            package, _, rest = module.partition(".")
            names = {alias.name for alias in node.names}
            if package == "fsdp_overlap":
                is_public = not rest and names <= {*fsdp_overlap.__all__}
                assert is_public or rest.split(".")[0] in CORE, module
                assert not any(name.startswith("_") for name in names)


def train(seed: int | None) -> tuple[list[str], list[str]]:
    """Train beside the unsharded twin, in a random order if there is a ``seed``. Return which
    units the last forward and backward gathered, in order."""
    log: list[Entry] = []
    twins = Twins(lambda: Model(LAYERS), shard_layers, torch.optim.SGD, prefetch=PREFETCH)
    for group in (*twins.optimizer.param_groups, *twins.twin_optimizer.param_groups):
        group["lr"] = 0.125  # a power of two: steps round alike, fused or not
    twins.ctx.comm_stream_factory = lambda name, _: RecordingCommStream(name, log)
    if seed is not None:
        load(TOY).gather_in_random_order(twins.ctx, seed)
    for tokens, targets in twins.batches(STEPS):
        passes = []
        loss, twin_loss = twins.losses(tokens, targets)
        passes.append(gathered(log))
        loss.backward()
        twin_loss.backward()
        passes.append(gathered(log))
        for (name, sharded), twin in twins.pairs():
            assert torch.equal(sharded.grad.full_tensor(), twin.grad), f"gradient of {name}"
        twins.check_rest()
        twins.step()
        for (name, sharded), twin in twins.pairs():
            assert torch.equal(sharded.full_tensor(), twin), name
    stats = twins.ctx.stats
    assert stats.peak_full_buffers <= PREFETCH + 2  # the root and a block are in use
    assert not stats.prefetches_unused
    return passes[0], passes[1]


def gathered(log: list[Entry]) -> list[str]:
    """Return which units were gathered since this was last asked."""
    labels = [entry.label for entry in log if (entry.action, entry.kind) == ("enqueue", GATHER)]
    log.clear()
    return labels


def train_in_orders(*seeds: int | None) -> list[tuple[list[str], list[str]]]:
    return [train(seed) for seed in seeds]


def test_a_random_order_of_gathers_trains_to_the_bit_as_the_unsharded_model() -> None:
    here, there = run_ranks(train_in_orders, 2, None, 0, 1)
    assert here == there, "ranks gather in other orders"
    for plain, *others in zip(*here, strict=True):
        assert len({*map(tuple, (plain, *others))}) == 3, "seeds give other orders"
        assert all(sorted(other) == sorted(plain) for other in others)


def test_the_toy_refuses_a_context_that_has_run() -> None:
    def late() -> None:
        twins = Twins.of("layers")
        twins.losses(*next(twins.batches(1)))
        with pytest.raises(RuntimeError, match="before the first forward"):
            load(TOY).gather_in_random_order(twins.ctx, 0)

    run_on_fake_group(late, 2)


OPTIONS = [
    Options(prefetch, after_forward, after_backward)
    for prefetch in (0, 1, 2, 3)
    for after_forward, after_backward in ((None, True), (True, True), (False, True), (False, False))
]


def explore(*schedules: type[Schedule]) -> None:
    """Run programs on two ranks, of which the second skips calls in backward."""
    run_of_all = Forward(0, (Forward(1), Forward(2), Forward(3)))
    again = Forward(0, (Forward(1, checkpoint="reentrant"), Forward(2), Forward(3)))
    for options, run_, skipped in product(OPTIONS, (run_of_all, again), subsets(3)):
        found: list[Any] = []
        for schedule, skips in zip(schedules, (frozenset[int](), skipped), strict=True):
            rank = Rank(4, options, schedule)
            for kind in ("train", "evaluate", "train"):
                rank.act(Action(kind, run_), skips)
                rank.act(Action("step"), skips)
            found.append(rank.collectives)
        assert found[0] == found[1], "ranks issue other collectives"


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_skip_calls_gather_in_the_same_random_order(seed: int) -> None:
    explore(load(TOY).random_order(seed), load(TOY).random_order(seed))


def test_a_seed_of_each_ranks_own_is_found() -> None:
    with pytest.raises(AssertionError, match="ranks issue other collectives"):
        explore(load(TOY).random_order(0), load(TOY).random_order(1))


def train_on_streams() -> None:
    program = Program(build=lambda: Model(LAYERS), prefetch=PREFETCH)
    load(TOY).gather_in_random_order(program.ctx, 0)
    program.train()


def test_a_random_order_has_no_race_and_a_wait_that_is_missing_is_found() -> None:
    assert not run_on_fake_group(run, 4, train_on_streams).findings
    defect = Defect(DeviceCommStream, "free", "self.after_event(after)", "plain")
    with defect.plant():
        assert kinds(run_on_fake_group(run, 4, train_on_streams))


# ---- the page ----


def test_the_prefetcher_on_the_page_is_that_of_the_toy() -> None:
    def place(unit: int) -> float:
        return -unit

    toy = load(TOY)
    scope: dict[str, Any] = {"Prefetcher": Prefetcher, "place": place}
    exec(BLOCKS[0], scope)
    shown = type("Shown", (Schedule,), {"prefetcher_class": scope["RandomPrefetcher"]})
    with patch.object(toy, "Random", lambda text: Backwards(text)):
        explore(shown, toy.random_order(0))


class Backwards:
    """In place of a generator that was made of ``"0 <unit>"``."""

    def __init__(self, text: str) -> None:
        self.random = lambda: -float(text.split()[1])


def test_the_wrap_on_the_page_counts_bytes() -> None:
    counted: list[int] = []

    def counting(all_gather: Callable[..., PendingCollective]) -> Callable[..., PendingCollective]:
        def gather(full: torch.Tensor, *rest: Any) -> PendingCollective:
            counted.append(full.nbytes)
            return all_gather(full, *rest)

        return gather

    scope = {"Transport": Transport, "CollectivePair": CollectivePair, "counting": counting}
    exec(BLOCKS[1], scope)

    def train_counted() -> int:
        twins = Twins.of("layers")
        for unit in twins.ctx.units:
            unit.settings.transport = scope["Counted"]()
        for _ in range(2):
            twins.losses(*next(twins.batches(1)))[0].backward()
        return twins.ctx.stats.all_gather_bytes

    assert run_on_fake_group(train_counted, 2) == sum(counted) > 0
