"""The verbs of FSDP2 that say when something happens: the numbers stay those of the twin."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_overlap
from fsdp_overlap import (
    FsdpContext,
    FSDPModule,
    RaggedDTensor,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.recorded import GATHER, RecordingCommStream
from support.twins import Twins, loss_of, same
from support.zoo import WIDTH, Block, Model, shard_layers


class FiveLayers(Model):
    def __init__(self) -> None:
        super().__init__(layers=5)


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
    assert isinstance(twins.model.out.weight, RaggedDTensor)
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
        assert isinstance(twins.model.head.weight, RaggedDTensor)
        units = twins.ctx.units
        addresses.append(
            [p.data_ptr() for u in units for b in u.param_groups for p in b.parameters]
        )
        assert twins.ctx.stats.current_full_buffers == len(units)
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
    assert 1 <= twins.ctx.stats.peak_reduce_inputs <= count
    twins.model.set_reduce_scatter_max_input_buffers(1)
    with pytest.raises(TypeError, match="takes an int, got a bool"):
        twins.model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="use 1 or more"):
        twins.model.set_reduce_scatter_max_input_buffers(0)
    twins.ctx.stats.reset()
    twins.train(1)
    assert twins.ctx.stats.peak_reduce_inputs == 1
    twins.model.set_reduce_scatter_unused_params(True)
    twins.train(1)


@pytest.mark.parametrize("count", [1, 4])
def test_the_number_of_reduce_inputs_is_what_was_asked(count: int) -> None:
    run_ranks(inputs, 2, count)


class EventCommStream(RecordingCommStream):
    """Notes what it is made to wait for, which on a CPU is nothing."""

    def after_compute(self) -> None:
        self.waits.append("compute")

    def after_event(self, event: Any) -> None:
        self.waits.append(event)

    waits: list[Any]


def post_optim_event() -> None:
    twins = Twins(Model, shard_layers)
    waits: list[Any] = []

    def make(name: str, device: torch.device) -> EventCommStream:
        comm_stream = EventCommStream(name, [])
        comm_stream.waits = waits if name == GATHER else []
        return comm_stream

    twins.ctx.comm_stream_factory = make
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
    waits.clear()
    twins.model.set_post_optim_event("event")
    with torch.no_grad():
        for model in (twins.model, twins.twin):
            model.head.weight.mul_(2)
    twins.backward(*batch)
    assert waits == ["event", "compute"]  # for the edit that the event says nothing of
    twins.step()
    waits.clear()
    twins.model.set_post_optim_event("event")
    twins.model.unshard()
    assert waits == ["event"]  # also what is gathered before the pass
    twins.model.reshard()
    twins.check_parameters()


def test_all_gathers_wait_for_the_event_once() -> None:
    run_ranks(post_optim_event, 2)


# Several roots, and classes


def chunks() -> None:
    torch.manual_seed(0)
    models = [Model(), Model()]
    twins = copy.deepcopy(models)
    for model in models:
        shard_layers(model, FsdpContext())
    share_comm_ctx(models)
    first, second = (model._fsdp_unit.context for model in models)
    assert first.comm_context.all_gather_stream is second.comm_context.all_gather_stream
    assert first.comm_context.reduce_scatter_stream is second.comm_context.reduce_scatter_stream
    assert first.comm_context.all_reduce_stream is second.comm_context.all_reduce_stream
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
    """A unit is an instance of torch's class too, and code that reads more than verbs is told."""
    torchs = torch.distributed.fsdp
    model = nn.Sequential(fully_shard(nn.Linear(4, 4), FsdpContext()))
    theirs = torchs.fully_shard(nn.Linear(4, 4))
    assert isinstance(model[0], FSDPModule)
    assert isinstance(model[0], torchs.FSDPModule)
    assert not isinstance(theirs, FSDPModule)
    for verb in vars(torchs.FSDPModule):
        assert verb.startswith("_") or getattr(model[0], verb)
    model[0].set_reduce_scatter_divide_factor(3.0)  # deprecated, and so torch's alone
    assert model[0]._fsdp_unit.settings.reduce_options.divisor == 3.0
    insides = (model[0]._get_fsdp_state(), torchs.fully_shard.state(model[0]))
    for state in insides:
        with pytest.raises(AttributeError, match="Linear was sharded by fsdp_overlap"):
            _ = state._fsdp_param_groups
        with pytest.raises(AttributeError, match="internal to FSDP2"):
            state._lazy_init = None
    torchs.register_fsdp_forward_method(model[0], "forward")
    for misuse in (
        lambda: model[0].forward(torch.ones(1, 4)),
        lambda: torchs.share_comm_ctx([model[0], model[0]]),
        lambda: model[0]._set_unshard_async_op(True),
        lambda: torchs.FSDPModule.set_requires_gradient_sync(model[0], False),
    ):
        with pytest.raises(AttributeError, match="was sharded by fsdp_overlap"):
            misuse()
    assert torchs.fully_shard.state(theirs) is theirs._get_fsdp_state()
    assert torchs.fully_shard.state(nn.Linear(4, 4)) is None


def test_a_unit_is_an_fsdp_module_of_torch_as_far_as_its_verbs_go() -> None:
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
    assert isinstance(model.layers[0].up.weight, RaggedDTensor)


def test_verbs_take_their_arguments_as_in_fsdp2() -> None:
    run_on_fake_group(arguments, 2)
