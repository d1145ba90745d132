"""``FsdpContext(mesh, shard_optimizer_over_replicas=True)``: optimizer states over both dimensions
of a mesh."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.optim import AdamW, Muon
from support.ranks import run_ranks
from support.recorded import Entry, RecordingCommStream
from support.twins import Twins, same
from support.zoo import Model, shard_layers

# The other models of the zoo differ in what has nothing to do with meshes.
NAMES = ["layers", "tied parameters", "frozen and partly frozen units", "unused on some ranks"]
OPTIONS: dict[str, Any] = {"mesh": (2, 2), "shard_optimizer_over_replicas": True}


def train(name: str, options: dict[str, Any]) -> None:
    Twins.of(name, **OPTIONS | options).train(iterations=7 if "dynamic" in name else 3)


@pytest.mark.parametrize("name", NAMES)
def test_training_equals_unsharded_training(name: str) -> None:
    run_ranks(train, 4, name, {})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": (4, 1)},
        {"mesh": (1, 4)},
        {"prefetch": 0},
        {"layout": TensorAtomic(), "optimizer": Muon, "ns_dtype": torch.float64},
        {"optimizer": AdamW},
    ],
    ids=str,
)
def test_nothing_changes_what_is_computed(options: dict[str, Any]) -> None:
    run_ranks(train, 4, "layers", options)


def keeps_parts() -> None:
    Twins(Model, partial(shard_layers, reshard_after_forward=2), mesh=(1, 4)).train(2)


def test_with_parts_kept_until_backward() -> None:
    run_ranks(keeps_parts, 4)


def memory() -> None:
    twins = Twins.of("layers", **OPTIONS)
    twins.train(2)
    held = sum(state["exp_avg"].to_local().numel() for state in twins.optimizer.state.values())
    total = sum(parameter.numel() for parameter in twins.twin.parameters())
    padding = sum(
        param_group.plan.padding for unit in twins.ctx.units for param_group in unit.param_groups
    )
    assert held <= (total + padding) / 4
    for parameter in twins.model.parameters():
        assert parameter.device_mesh.size() == 4


def test_each_rank_steps_a_part_of_its_shard() -> None:
    run_ranks(memory, 4)


def once_a_step() -> None:
    """However many microbatches there are, and with either way to accumulate."""
    twins = Twins.of("layers", **OPTIONS)
    log: list[Entry] = []
    twins.ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, log)
    units = len(twins.ctx.units)
    for verb in ("set_requires_all_reduce", "set_requires_gradient_sync"):
        log.clear()
        for index, (tokens, targets) in enumerate(twins.batches(3)):
            getattr(twins.model, verb)(index == 2)
            twins.backward(tokens, targets)
        issued = [(entry.kind, entry.comm_stream) for entry in log if entry.action == "enqueue"]
        assert issued.count(("copies_all_gather", "all_reduce")) == units
        assert issued.count(("copies_reduce_scatter", "all_reduce")) == units
        assert issued.count(("all_gather", "all_gather")) == 3 * (2 * units - 2)
        twins.check_gradients()
        twins.step()
    twins.check_parameters()
    # All shards are put together at the beginning, in the order of their use.
    twins.backward(*next(twins.batches(1)))
    log.clear()
    twins.step()
    twins.backward(*next(twins.batches(1)))
    kinds = [entry.kind for entry in log if entry.action == "enqueue"]
    assert kinds[: units + 1] == ["copies_all_gather"] * units + ["all_gather"]


def test_copies_exchange_shards_and_gradients_once_a_step() -> None:
    run_ranks(once_a_step, 4)


def save_and_load(path: str) -> None:
    """A checkpoint of divided copies loads without, and the other way round."""
    trained = Twins.of("layers", **OPTIONS)
    trained.train(2)
    plain = Twins.of("layers", mesh=(2, 2))
    plain.train(1)
    whole = Twins.of("layers", **OPTIONS)
    for index, (source, target) in enumerate([(trained, plain), (plain, whole)]):
        model, optimizer = get_state_dict(source.model, source.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{path}/{index}")
        wanted = dict(zip(("model", "optimizer"), states_of(target), strict=True))
        dcp.load(wanted, checkpoint_id=f"{path}/{index}")
        set_state_dict(
            target.model,
            target.optimizer,
            model_state_dict=wanted["model"],
            optim_state_dict=wanted["optimizer"],
        )
    for batch in trained.batches(2):
        trained.backward(*batch)
        trained.step()
        loss, _ = whole.losses(*batch)
        loss.backward()
        whole.optimizer.step()
        whole.optimizer.zero_grad()
    for (name, parameter), other in zip(
        trained.model.named_parameters(), whole.model.parameters(), strict=True
    ):
        same(other.full_tensor().detach(), parameter.full_tensor().detach(), name)


def states_of(twins: Twins) -> Any:
    if not twins.optimizer.state:
        loss, _ = twins.losses(*next(twins.batches(1)))
        loss.backward()
        twins.optimizer.step()
        twins.optimizer.zero_grad()
    return get_state_dict(twins.model, twins.optimizer)


def test_checkpoints_load_with_and_without(tmp_path: Any) -> None:
    run_ranks(save_and_load, 4, str(tmp_path))


def recovers() -> None:
    twins = Twins.of("layers", **OPTIONS)
    twins.train(1)
    twins.model(torch.zeros(1, 1, dtype=torch.int64))
    twins.ctx.reset()
    twins.train(2)


def test_a_reset_in_the_middle_changes_nothing() -> None:
    run_ranks(recovers, 4)


class EventCommStream(RecordingCommStream):
    def after_event(self, event: Any) -> None:
        self.log.append(event)


def waits_for_the_event() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    ctx = FsdpContext(mesh, shard_optimizer_over_replicas=True)
    log: list[Any] = []
    ctx.comm_stream_factory = lambda name, device: EventCommStream(
        name, log if name == "all_reduce" else []
    )
    model = Model()
    shard_layers(model, ctx)
    model.set_post_optim_event("event")
    model(torch.zeros(1, 1, dtype=torch.int64))
    assert log[0] == "event"
    assert log[2].kind == "copies_all_gather"


def test_shards_are_put_together_after_the_event_of_the_optimizer() -> None:
    run_ranks(waits_for_the_event, 2)


def without_memory() -> None:
    log: list[Entry] = []
    ctx = FsdpContext(
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s")),
        shard_optimizer_over_replicas=True,
    )
    ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, log)
    with torch.device("meta"):
        model = Model()
    shard_layers(model, ctx)
    with pytest.raises(RuntimeError, match="is on the meta device"):
        model(torch.zeros(1, 1, dtype=torch.int64))
    assert log == []


def test_a_model_without_memory_exchanges_nothing() -> None:
    run_ranks(without_memory, 2)


def freed() -> None:
    options: dict[str, Any] = {"mesh": (2, 1), "shard_optimizer_over_replicas": True}
    kept, dropped, other = (Twins.of("layers", **options) for _ in range(3))
    dropped.train(1)
    gc.disable()
    try:
        param_group = weakref.ref(dropped.ctx.units[0].param_groups[0])
        del dropped
        assert param_group() is None  # at once, and not when Python looks for cycles
    finally:
        gc.enable()
    error_monitor = kept.ctx.error_monitor
    del kept
    assert not list(error_monitor._rank_groups())
    other.ctx.reset()
    other.train(1)


def test_a_model_that_is_freed_leaves_nothing_to_the_reset_of_another() -> None:
    run_ranks(freed, 2)


def nameless() -> None:
    with pytest.raises(
        ValueError, match="shard_optimizer_over_replicas needs a mesh with names, as init_device"
    ):
        FsdpContext(init_device_mesh("cpu", (1, 1)), shard_optimizer_over_replicas=True)


def test_a_mesh_without_names_is_refused() -> None:
    run_ranks(nameless, 1)
