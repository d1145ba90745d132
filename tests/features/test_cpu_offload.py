"""Shards, gradients and optimizer states on the host. Without a GPU there is nothing to offload, so
most tests here pretend that there is: what rests is copied as if from and to a device.
test_cuda_offload does the same for real."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap import CPUOffloadPolicy, FsdpContext, RaggedDTensor, fully_shard
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from support.pretended_offload import pretending
from support.ranks import run_ranks
from support.recorded import Entry, RecordingCommStream
from support.twins import Twins
from support.zoo import Model, shard_layers


def on_a_cpu() -> None:
    twins = Twins(Model, partial(shard_layers, offload_policy=CPUOffloadPolicy()))
    twins.train(3)
    assert not any(unit.rests_on_host for unit in twins.ctx.units)


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_cpu_the_policy_changes_nothing(world_size: int) -> None:
    run_ranks(on_a_cpu, world_size)


def train(name: str, optimizer: type[torch.optim.Optimizer] = AdamW) -> None:
    with pretending():
        twins = Twins.of(name, optimizer=optimizer)
        assert all(unit.rests_on_host for unit in twins.ctx.units if unit.param_groups)
        twins.train(3)


MODELS = ["layers", "nested units", "tied parameters", "unused on some ranks", "checkpointed"]


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_unsharded_training(name: str) -> None:
    run_ranks(train, 2, name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_number_of_ranks(world_size: int) -> None:
    run_ranks(train, world_size, "layers")


def test_muon_orthogonalizes_what_is_on_the_host() -> None:
    run_ranks(train, 2, "layers", Muon)


def clip() -> None:
    with pretending():
        twins = Twins.of("layers")
        for clip_ours in (clip_grad_norm_, nn.utils.clip_grad_norm_):
            twins.backward(*next(twins.batches(1)))
            norm = clip_ours(twins.model.parameters(), 0.1)
            expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
            torch.testing.assert_close(norm, expected)
            twins.check_gradients()
            twins.step()


def test_norms_are_reduced_on_the_mesh() -> None:
    run_ranks(clip, 2)


def train_copies() -> None:
    with pretending():
        twins = Twins.of("layers", mesh=(2, 2))
    for _ in range(2):
        for index, batch in enumerate(twins.batches(3)):
            twins.model.set_requires_all_reduce(index == 2)
            twins.backward(*batch)
        twins.check_gradients()
        twins.step()
        twins.check_parameters()


def test_gradients_land_after_the_reduction_across_copies() -> None:
    run_ranks(train_copies, 4)


def accumulate() -> None:
    """Added on the host to the memory that the first one has; a new one has memory of its own."""
    with pretending():
        twins = Twins.of("layers")
    parameter, *_ = twins.model.parameters()
    first, second = twins.batches(2)
    twins.backward(*first)
    gradient = parameter.grad
    assert isinstance(gradient, RaggedDTensor)
    local = gradient.to_local()
    twins.backward(*second)
    assert parameter.grad is gradient
    assert gradient.to_local().data_ptr() == local.data_ptr()
    twins.check_gradients()
    held = local.clone()
    twins.step()
    twins.backward(*first)
    assert torch.equal(local, held)
    twins.check_gradients()


def test_gradients_accumulate_in_memory_that_stays_the_users() -> None:
    run_ranks(accumulate, 2)


def landing() -> None:
    with pretending():
        twins = Twins.of("layers", prefetch=0)  # where reductions end soonest
    sharded = list(twins.model.parameters())
    found: list[int] = []

    def count(*_: object) -> None:
        found.append(sum(parameter.grad is not None for parameter in sharded))

    def look(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(count)

    twins.model.embedding.register_forward_hook(look)
    twins.backward(*next(twins.batches(1)))
    count()
    assert found == [0, len(sharded)]


def test_gradients_are_given_at_the_end_of_backward() -> None:
    run_ranks(landing, 1)


def shard_all(model: Any, ctx: FsdpContext, **options: Any) -> None:
    for child in (model.embedding, *model.layers, model.head, model):
        fully_shard(child, ctx, **options)


def edits(root_has_parameters: bool) -> None:
    """Wherever the user may edit shards next, nothing on a comm stream still reads them."""
    with pretending():
        twins = Twins.of("layers") if root_has_parameters else Twins(Model, shard_all)
    log: list[Entry] = []
    twins.ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, log)
    [mesh_info] = twins.ctx.mesh_infos
    tokens, targets = next(twins.batches(1))
    with torch.no_grad():
        twins.model(tokens)
        assert mesh_info.reading is None
    loss, _ = twins.losses(tokens, targets)
    assert mesh_info.reading is not None, "forward waited on the host"
    loss.backward()
    assert mesh_info.reading is None
    owner = twins.model if root_has_parameters else twins.model.head
    owner.unshard(async_op=True)
    assert mesh_info.reading is not None
    owner.reshard()
    assert mesh_info.reading is None


@pytest.mark.parametrize("root_has_parameters", [True, False])
def test_the_host_waits_for_copies_of_shards_only_where_they_may_be_edited(
    root_has_parameters: bool,
) -> None:
    run_ranks(edits, 2, root_has_parameters)


def recover() -> None:
    with pretending():
        twins = Twins.of("layers")
    batch = next(twins.batches(1))
    twins.model.layers[0].register_full_backward_hook(refuse)
    with pytest.raises(RuntimeError, match="refused"):
        twins.backward(*batch)
    twins.ctx.reset()
    assert not any(g.offloads for unit in twins.ctx.units for g in unit.gradients)
    assert twins.ctx.mesh_infos[0].reading is None


def refuse(*_: object) -> None:
    raise RuntimeError("refused")


def test_a_reset_drops_what_is_on_its_way() -> None:
    run_ranks(recover, 2)


def copied() -> None:
    with pretending():
        twins = Twins.of("layers")
        twins.backward(*next(twins.batches(1)))
        twins.model = copy.deepcopy(twins.model)
    assert all(unit.rests_on_host for unit in twins.model._fsdp_unit.context.units)
    twins.check_gradients()
    twins.check_parameters()


def test_a_copy_is_offloaded_likewise() -> None:
    run_ranks(copied, 2)


class Counts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))


def start_on_meta() -> None:
    with torch.device("meta"):
        model = Counts()
    with pretending():
        shard_layers(model, FsdpContext())
    model.to_empty(device="cpu")
    assert model.count.device.type == "cpu"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model(torch.ones(1, 1, dtype=torch.int64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_that_started_on_meta_gets_memory_on_the_host() -> None:
    run_ranks(start_on_meta, 2)
