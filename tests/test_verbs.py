"""The verbs of FSDP2 that say when something happens: the numbers stay those of the twin."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_cuda import RANKS, HostileLane
from test_module_lists import Normed, shard_ends
from test_schedule import GATHER, REDUCE, Recorded, layer, position
from torch import nn
from twins import Twins, loss_of, same
from zoo import WIDTH, Block, Checkpointed, CheckpointedReentrant, Model, SharedLayer, shard_layers

import fsdp_overlap
from fsdp_overlap import (
    FsdpContext,
    FSDPModule,
    ShardedTensor,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_overlap.comm.recording import RecordingLane


class FiveLayers(Model):
    def __init__(self) -> None:
        super().__init__(layers=5)


# Explicit prefetch


def gathered_ahead(log: list[Any], index: int) -> list[str]:
    """Units that are gathered and not waited for while layer ``index`` computes."""
    before = log[: position(log, "wait", layer(index)) + 1]
    enqueued = [
        entry.label for entry in before if (entry.lane, entry.action) == (GATHER, "enqueue")
    ]
    waited = [entry.label for entry in before if (entry.lane, entry.action) == (GATHER, "wait")]
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
            entry.label for entry in log if (entry.lane, entry.action) == (GATHER, "enqueue")
        ]
        assert len(enqueued) == len(set(enqueued))
    assert recorded.ctx.stats.prefetches_unused == 0
    assert recorded.ctx.stats.full_buffers_alive == 0


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_listed_modules_are_gathered_ahead_instead(prefetch: int) -> None:
    run_ranks(two_ahead, 2, prefetch)


def back_to_the_order() -> None:
    recorded = Recorded(1, FiveLayers)
    layers = recorded.model.layers
    layers[0].set_modules_to_forward_prefetch([layers[1], layers[2], layers[3]])
    layers[0].set_modules_to_forward_prefetch([])
    forward, _ = recorded.passes()
    assert gathered_ahead(forward, 0) == [layer(1)]


def test_an_empty_list_leaves_prefetch_to_the_order() -> None:
    run_ranks(back_to_the_order, 2)


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
    run_ranks(bad_lists, 2)


# No unshard in backward


def embedding_unit(model: Model, ctx: FsdpContext) -> None:
    fully_shard(model.embedding, ctx)
    shard_layers(model, ctx)


def embedding_stays_sharded() -> None:
    twins = Twins(Model, embedding_unit)
    log: list[Any] = []
    twins.ctx.lane_factory = lambda name, device: RecordingLane(name, log)
    twins.model.embedding.set_unshard_in_backward(False)
    twins.train(2)
    loss, _ = twins.losses(*next(twins.batches(1)))
    log.clear()
    loss.backward()
    assert not [entry for entry in log if entry.lane == GATHER and entry.label == "embedding"]
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


# Methods that are forwards


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.out = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        if fails:
            raise ArithmeticError("planned")
        return self.out(self.block(x))

    def decode(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.block(self.out(x)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))[0]


def shard_coder(model: Coder, ctx: FsdpContext) -> None:
    fully_shard(model.block, ctx)
    fully_shard(model, ctx)
    for name in ("encode", "decode"):
        register_fsdp_forward_method(model, name)


def methods() -> None:
    twins = Twins(Coder, shard_coder)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(twins.world * 2, WIDTH, generator=generator, dtype=torch.double)
        mine = x[2 * twins.rank : 2 * twins.rank + 2]
        calls = ("encode", "decode", "forward")
        loss, twin_loss = (
            sum(
                run.pow(2).mean() if isinstance(run, torch.Tensor) else run[0].mean()
                for run in (getattr(model, name)(rows) for name in calls if name != "forward")
            )
            + model(rows).mean()
            for model, rows in ((twins.model, mine), (twins.twin, x))
        )
        loss.backward()
        twin_loss.backward()
        twins.check_gradients()
        twins.check_rest()
        twins.step()
        twins.check_parameters()
    with pytest.raises(ArithmeticError):
        twins.model.encode(x, fails=True)
    twins.check_rest()
    assert isinstance(twins.model.out.weight, ShardedTensor)
    duplicate = copy.deepcopy(twins.model)
    with torch.no_grad():
        expected = twins.model.encode(x)
        twins.model.out.weight.zero_()
        same(duplicate.encode(x), expected, "the copy's own method")
    plain = Coder()
    register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)
    with pytest.raises(ValueError, match="no method 'decipher'"):
        register_fsdp_forward_method(twins.model, "decipher")
    gc.disable()
    try:
        alive = weakref.ref(duplicate)
        del duplicate
        assert alive() is None
    finally:
        gc.enable()


def test_registered_methods_run_like_forward() -> None:
    run_ranks(methods, 2)


# Storage, inputs and events


def same_addresses() -> None:
    twins = Twins(Model, shard_layers)
    twins.model.set_keep_unsharded_storage(True)
    addresses = []
    for batch in twins.batches(3):
        twins.backward(*batch)
        twins.check_gradients()
        twins.step()
        twins.check_parameters()
        assert isinstance(twins.model.head.weight, ShardedTensor)
        units = twins.ctx.units
        addresses.append([p.data_ptr() for u in units for b in u.buckets for p in b.parameters])
        assert twins.ctx.stats.full_buffers_alive == len(units)
    assert addresses[0] == addresses[1] == addresses[2]
    assert 0 not in addresses[0]
    twins.model.set_keep_unsharded_storage(False)
    twins.check_rest()
    twins.train(1)


def test_kept_storage_keeps_its_addresses() -> None:
    run_ranks(same_addresses, 2)


def inputs(count: int) -> None:
    twins = Twins(FiveLayers, shard_layers, prefetch=1)
    twins.model.layers[2].set_reduce_scatter_max_input_buffers(count, recurse=False)
    twins.train(2)
    assert 1 <= twins.ctx.stats.reduce_inputs_most <= count
    twins.model.set_reduce_scatter_max_input_buffers(1)
    with pytest.raises(TypeError, match="takes an int, got a bool"):
        twins.model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="use 1 or more"):
        twins.model.set_reduce_scatter_max_input_buffers(0)
    twins.ctx.stats.reset()
    twins.train(1)
    assert twins.ctx.stats.reduce_inputs_most == 1
    twins.model.set_reduce_scatter_unused_params(True)
    twins.train(1)


@pytest.mark.parametrize("count", [1, 4])
def test_the_number_of_reduce_inputs_is_what_was_asked(count: int) -> None:
    run_ranks(inputs, 2, count)


class EventLane(RecordingLane):
    """Notes what it is made to wait for, which on a CPU is nothing."""

    def after_compute(self) -> None:
        self.waits.append("compute")

    def after_event(self, event: Any) -> None:
        self.waits.append(event)

    waits: list[Any]


def post_optim_event() -> None:
    twins = Twins(Model, shard_layers)
    waits: list[Any] = []

    def make(name: str, device: torch.device) -> EventLane:
        lane = EventLane(name, [])
        lane.waits = waits if name == GATHER else []
        return lane

    twins.ctx.lane_factory = make
    twins.train(1)
    batch = next(twins.batches(1))
    waits.clear()
    twins.model.set_post_optim_event("event")
    twins.backward(*batch)
    assert waits == ["event"]
    twins.step()
    waits.clear()
    twins.backward(*batch)
    assert waits == ["compute"]  # once
    twins.step()
    twins.model.set_post_optim_event("event")
    with torch.no_grad():
        for model in (twins.model, twins.twin):
            model.head.weight.mul_(2)
    waits.clear()
    twins.backward(*batch)
    assert waits == ["event", "compute"]  # for the edit that the event says nothing of
    twins.step()
    twins.check_parameters()


def test_all_gathers_wait_for_the_event_once() -> None:
    run_ranks(post_optim_event, 2)


# Recovery and finalization


def only_the_root() -> None:
    model = Model()
    shard_layers(model, FsdpContext())
    model.reset_iter_state()
    for verb in ("reset_iter_state", "finalize_backward"):
        with pytest.raises(RuntimeError, match="is for the root"):
            getattr(model.layers[0], verb)()
    with pytest.raises(RuntimeError, match="is for the root"):
        model.layers[0].set_manual_backward_finalization(True)


def test_what_is_for_the_root_is_refused_elsewhere() -> None:
    run_ranks(only_the_root, 1)


class Failing(Model):
    fails = False

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.fails and layer is self.layers[2]:
            x.register_hook(raise_planned)
        return super().run(layer, x)


def raise_planned(_: torch.Tensor) -> None:
    raise ArithmeticError("planned")


def reset_and_go_on() -> None:
    twins = Twins(Failing, shard_layers)
    twins.train(1)
    twins.model.fails = True
    with pytest.raises(ArithmeticError):
        twins.losses(*next(twins.batches(1)))[0].backward()
    twins.model.fails = False
    twins.model.reset_iter_state()
    twins.optimizer.zero_grad()
    twins.train(1)


def test_reset_iter_state_recovers_as_reset_does() -> None:
    run_ranks(reset_and_go_on, 2)


def finalized_by_hand(sync_each: bool, async_op: bool, build: Callable[[], nn.Module]) -> None:
    twins = Twins(build, shard_layers)
    twins.model.set_manual_backward_finalization(True)
    assert twins.model.finalize_backward() is None  # before the first forward
    for _ in range(2):
        twins.model.set_requires_gradient_sync(sync_each)
        twins.model.set_reshard_after_backward(False)
        reduced, checks = twins.ctx.stats.reduce_scatters, twins.ctx.stats.order_checks
        for batch in twins.batches(3):
            twins.backward(*batch)
        per_backward = 3 * len(twins.ctx.units) if sync_each else 0
        assert twins.ctx.stats.reduce_scatters - reduced == per_backward
        twins.model.set_requires_gradient_sync(True)
        twins.model.set_reshard_after_backward(True)
        handle = twins.model.finalize_backward(async_op=async_op)
        if async_op:
            with pytest.raises(RuntimeError, match=r"call wait\(\) on the handle"):
                twins.losses(*batch)
            handle.wait()
            handle.wait()
        assert twins.ctx.stats.order_checks - checks == 1
        twins.check_gradients()
        twins.check_rest()
        twins.step()
        twins.check_parameters()
    twins.model.set_manual_backward_finalization(False)
    twins.train(1)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("sync_each", [False, True])
def test_gradients_are_complete_once_finalized_by_hand(sync_each: bool, async_op: bool) -> None:
    run_ranks(finalized_by_hand, 2, sync_each, async_op, Model)


def large_units() -> None:
    """With gradients that leave autograd's hands at once, while the last reduction travels."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(3))).double()
    twin = copy.deepcopy(model)
    ctx = FsdpContext()
    for module in model:
        fully_shard(module, ctx)
    fully_shard(model, ctx)
    model.set_reduce_scatter_max_input_buffers(4)
    model.set_manual_backward_finalization(True)
    rank = torch.distributed.get_rank()
    x = torch.randn(3, 4, 384, dtype=torch.double)
    for piece in x:
        model(piece[2 * rank : 2 * rank + 2]).pow(2).mean().backward()
        twin(piece).pow(2).mean().backward()
    model.finalize_backward()
    for (name, parameter), expected in zip(
        model.named_parameters(), twin.parameters(), strict=True
    ):
        same(parameter.grad.full_tensor(), expected.grad, name)


def test_a_reduce_input_that_travels_is_not_written_to() -> None:
    run_ranks(large_units, 2)


def misused() -> None:
    twins = Twins(Model, shard_layers)
    batch = next(twins.batches(1))
    twins.backward(*batch)
    with pytest.raises(RuntimeError, match="without manual finalization"):
        twins.model.finalize_backward()
    twins.step()
    twins.model.set_manual_backward_finalization(True)
    twins.losses(*batch)[0].backward()
    with pytest.raises(RuntimeError, match="not finalized"):
        twins.model.set_manual_backward_finalization(False)
    handle = twins.model.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match="last gradient reduction"):
        twins.model.finalize_backward()
    twins.model.reset_iter_state()
    with pytest.raises(RuntimeError, match="was dropped"):
        handle.wait()
    twins.model.set_manual_backward_finalization(False)
    twins.optimizer.zero_grad()
    twins.check_rest()
    twins.train(1)


def test_finalization_out_of_turn_is_an_error() -> None:
    run_ranks(misused, 2)


# On a GPU, where lanes are late with all they do


def on_hostile_lanes(how: str) -> None:
    build, shard = (Normed, shard_ends) if how == "list" else (Model, shard_layers)
    twins = Twins(build, shard, device="cuda")
    twins.ctx.lane_factory = lambda lane, device: HostileLane(device)
    layers = twins.model.layers
    if how == "prefetch":
        twins.model.set_modules_to_forward_prefetch(list(layers))
        layers[-1].set_modules_to_backward_prefetch([layers[1], layers[0]])
    twins.model.set_keep_unsharded_storage(how == "storage")
    twins.model.set_manual_backward_finalization(how == "finalization")
    for batch in twins.batches(4):
        twins.backward(*batch)
        if how == "finalization":
            twins.model.finalize_backward(async_op=True).wait()
        twins.check_gradients()
        twins.step()
        if how == "event":
            twins.model.set_post_optim_event(torch.cuda.current_stream().record_event())
        twins.check_parameters()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["list", "prefetch", "storage", "finalization", "event"])
def test_the_verbs_on_late_lanes(how: str) -> None:
    run_ranks(on_hostile_lanes, RANKS, how, backend="nccl")


# Several roots, and classes


def chunks() -> None:
    torch.manual_seed(0)
    models = [Model(), Model()]
    twins = copy.deepcopy(models)
    for model in models:
        shard_layers(model, FsdpContext())
    share_comm_ctx(models)
    first, second = (model._fsdp_unit.context for model in models)
    assert first.gather_lane is second.gather_lane
    assert first.reduce_lane is second.reduce_lane
    assert first.schedule is not second.schedule
    tokens = torch.arange(8).view(2, 4)
    for _ in range(2):
        for models_of in (models, twins):
            losses = [loss_of(model(tokens), tokens) for model in models_of]
            for loss in losses[::-1]:
                loss.backward()
        for model, twin in zip(models, twins, strict=True):
            for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    late = Model()
    shard_layers(late, FsdpContext())
    late(tokens)
    with pytest.raises(RuntimeError, match="before the first forward"):
        share_comm_ctx([models[0], late])
    with pytest.raises(ValueError, match="takes units, got a Linear"):
        share_comm_ctx([models[0], models[0].head])


def test_several_roots_share_lanes_and_keep_their_order() -> None:
    run_ranks(chunks, 2)


def containers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(model, FsdpContext())
    part = model[:2]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]
    assert isinstance(model, FSDPModule)
    assert fsdp_overlap.FSDPModule is fsdp_overlap.FsdpModule
    assert not isinstance(part, FSDPModule)
    assert model(torch.ones(1, 4)).shape == (1, 4)


def test_a_slice_of_a_container_is_a_plain_container() -> None:
    run_ranks(containers, 1)


def two_libraries() -> None:
    """torch's own code asks a module that is its FSDPModule for FSDP2's state, as the pipeline
    schedules of torch 2.13 do, which a unit does not have."""
    model = fully_shard(nn.Linear(4, 4), FsdpContext())
    assert isinstance(model, FSDPModule)
    assert not isinstance(model, torch.distributed.fsdp.FSDPModule)


def test_a_unit_is_no_module_of_torchs_fsdp() -> None:
    run_ranks(two_libraries, 1)


def arguments() -> None:
    model = Model()
    shard_layers(model, FsdpContext())
    model.set_reshard_after_forward(True, False)  # both by position, as in FSDP2
    assert model._fsdp_unit.reshard_after_forward is True
    assert model.layers[0]._fsdp_unit.reshard_after_forward is None
    with pytest.raises(ValueError, match="use True or False"):
        model.set_reshard_after_forward(2)
    handle = model.layers[0].unshard(async_op=True)
    tokens = torch.zeros(1, 1, dtype=torch.long)
    model(tokens).sum().backward()  # waits by itself
    handle.wait()  # too late to do anything
    assert isinstance(model.layers[0].up.weight, ShardedTensor)


def test_verbs_take_their_arguments_as_in_fsdp2() -> None:
    run_ranks(arguments, 2)
