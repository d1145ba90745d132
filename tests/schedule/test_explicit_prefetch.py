"""What the user says about gathering: what comes next, and what backward does not need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap import (
    FsdpContext,
    fully_shard,
)
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.recorded import GATHER, REDUCE, Recorded, RecordingCommStream, layer, position
from support.twins import Twins
from support.zoo import Checkpointed, CheckpointedReentrant, Model, SharedLayer, shard_layers


class FiveLayers(Model):
    def __init__(self) -> None:
        super().__init__(layers=5)


# Explicit prefetch


def gathered_ahead(log: list[Any], index: int) -> list[str]:
    """Units that are gathered and not waited for while layer ``index`` computes."""
    before = log[: position(log, "wait", layer(index)) + 1]
    enqueued = [
        entry.label for entry in before if (entry.comm_stream, entry.action) == (GATHER, "enqueue")
    ]
    waited = [
        entry.label for entry in before if (entry.comm_stream, entry.action) == (GATHER, "wait")
    ]
    return [label for label in enqueued if label not in waited]


def two_ahead(prefetch: int) -> None:
    recorded = Recorded(prefetch, FiveLayers)
    layers = recorded.model.layers
    for index in range(3):
        layers[index].set_modules_to_forward_prefetch([layers[index + 1], layers[index + 2]])
        layers[4 - index].set_modules_to_backward_prefetch([layers[3 - index], layers[2 - index]])
    forward, backward = recorded.passes()
    assert gathered_ahead(forward, 1) == [layer(2), layer(3)]
    assert gathered_ahead(forward, 2) == [layer(3), layer(4)]
    assert gathered_ahead(forward, 3) == [layer(4)]  # it has no list, and loses nothing
    assert gathered_ahead(backward, 2) == [layer(1), layer(0)]
    for log in (forward, backward):
        enqueued = [
            entry.label for entry in log if (entry.comm_stream, entry.action) == (GATHER, "enqueue")
        ]
        assert len(enqueued) == len(set(enqueued))
    assert recorded.ctx.stats.prefetches_unused == 0
    assert recorded.ctx.stats.current_full_buffers == 0


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_listed_modules_are_gathered_ahead_instead(prefetch: int) -> None:
    run_on_fake_group(two_ahead, 2, prefetch)


def back_to_the_order() -> None:
    recorded = Recorded(1, FiveLayers)
    layers = recorded.model.layers
    layers[0].set_modules_to_forward_prefetch([layers[1], layers[2], layers[3]])
    layers[0].set_modules_to_forward_prefetch([])
    forward, _ = recorded.passes()
    assert gathered_ahead(forward, 0) == [layer(1)]


def test_an_empty_list_leaves_prefetch_to_the_order() -> None:
    run_on_fake_group(back_to_the_order, 2)


def train_with_lists(build: Callable[[], nn.Module], in_vain: bool) -> None:
    twins = Twins(build, shard_layers)
    layers = twins.model.layers
    for module in (twins.model, *layers):
        # As soon as anything runs, all are gathered; or those that have run.
        wanted = [layers[0]] if in_vain else list(layers)
        module.set_modules_to_forward_prefetch(wanted)
        module.set_modules_to_backward_prefetch([layers[-1]] if in_vain else list(layers)[::-1])
    twins.train(3)


@pytest.mark.parametrize("in_vain", [False, True])
@pytest.mark.parametrize("build", [Model, SharedLayer, Checkpointed, CheckpointedReentrant])
def test_any_lists_train_like_the_twin_and_leave_nothing(
    build: Callable[[], nn.Module], in_vain: bool
) -> None:
    run_ranks(train_with_lists, 2, build, in_vain)


def bad_lists() -> None:
    first, second = Model(), Model()
    for model in (first, second):
        shard_layers(model, FsdpContext())
    with pytest.raises(ValueError, match="can prefetch units only, got a Linear"):
        first.set_modules_to_forward_prefetch([first.head])
    with pytest.raises(ValueError, match="another FsdpContext"):
        first.set_modules_to_backward_prefetch([second.layers[0]])


def test_lists_are_of_units_of_one_context() -> None:
    run_on_fake_group(bad_lists, 2)


# No unshard in backward


def embedding_unit(model: Model, ctx: FsdpContext) -> None:
    fully_shard(model.embedding, ctx)
    shard_layers(model, ctx)


def embedding_stays_sharded() -> None:
    twins = Twins(Model, embedding_unit)
    log: list[Any] = []
    twins.ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, log)
    twins.model.embedding.set_unshard_in_backward(False)
    twins.train(2)
    loss, _ = twins.losses(*next(twins.batches(1)))
    log.clear()
    loss.backward()
    assert not [
        entry for entry in log if entry.comm_stream == GATHER and entry.label == "embedding"
    ]
    position(log, "enqueue", "embedding", REDUCE)  # its gradient is reduced all the same
    twins.check_rest()


def test_an_embedding_need_not_be_gathered_for_backward() -> None:
    run_ranks(embedding_stays_sharded, 2)


def read_after_all(build: Callable[[], nn.Module], also_root: bool) -> None:
    twins = Twins(build, shard_layers)
    twins.train(1)
    twins.model.layers[1].set_unshard_in_backward(False)
    if also_root:
        twins.model.set_unshard_in_backward(False)
    loss, _ = twins.losses(*next(twins.batches(1)))
    with pytest.raises(RuntimeError, match=r"reads a parameter of shape.*unshard_in_backward"):
        loss.backward()
    twins.ctx.reset()
    twins.check_rest()
    twins.optimizer.zero_grad()
    for module in (twins.model, twins.model.layers[1]):
        module.set_unshard_in_backward(True)
    twins.train(1)


@pytest.mark.parametrize("also_root", [False, True])
def test_a_backward_that_reads_parameters_after_all_is_an_error(also_root: bool) -> None:
    run_ranks(read_after_all, 2, Model, also_root)


def recomputed_after_all(build: Callable[[], nn.Module]) -> None:
    twins = Twins(build, shard_layers)
    for module in twins.model.layers:
        module.set_unshard_in_backward(False)
    twins.train(2)


class SavedElsewhere(Model):
    """Somebody else's hooks see what autograd saves in the layers."""

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            return super().run(layer, x)


@pytest.mark.parametrize("build", [Checkpointed, CheckpointedReentrant, SavedElsewhere])
def test_what_cannot_be_watched_is_gathered_for_backward(build: Callable[[], nn.Module]) -> None:
    run_ranks(recomputed_after_all, 2, build)


def kept_anyway() -> None:
    """Where the full buffer is there, nothing is wrong with reading it."""
    twins = Twins(Model, shard_layers)
    twins.model.layers[1].set_unshard_in_backward(False)
    twins.model.layers[1].set_reshard_after_forward(False)
    twins.train(2)


def test_a_unit_that_is_kept_may_be_read() -> None:
    run_ranks(kept_anyway, 2)
