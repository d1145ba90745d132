"""A mesh ``(replicate, shard)``: parameters sharded along one dimension, copied along the other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate

from fsdp_overlap import FsdpContext, RaggedDTensor, fully_shard
from fsdp_overlap.comm.comm_streams import WorkHandle
from fsdp_overlap.engine import grads
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.optim import AdamW, clip_grad_norm_
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.recorded import Entry, RecordingCommStream
from support.twins import Twins, loss_of
from support.zoo import ZOO, Model, shard_layers

MESHES = [(2, 2), (4, 1), (1, 4)]


def train(name: str, mesh: tuple[int, int], options: dict[str, Any]) -> None:
    Twins.of(name, mesh=mesh, **options).train(iterations=7 if "dynamic" in name else 3)


# "layers" trains so in test_copies_stay_equal_to_the_bit.
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name in ZOO if name != "layers"])
def test_training_equals_unsharded_training(name: str) -> None:
    run_ranks(train, 4, name, (2, 2), {})


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_either_dimension_may_be_one(mesh: tuple[int, int]) -> None:
    run_ranks(train, 4, "layers", mesh, {})


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prefetch_changes_nothing(prefetch: int) -> None:
    run_ranks(train, 4, "layers", (2, 2), {"prefetch": prefetch})


# Muon does in tests/optim/test_muon_meshes.py.
def test_own_adamw_trains_alike() -> None:
    run_ranks(train, 4, "layers", (2, 2), {"layout": TensorAtomic(), "optimizer": AdamW})


def copies() -> None:
    twins = Twins.of("layers", mesh=(2, 2))
    twins.train(3)
    for parameter in twins.model.parameters():
        assert isinstance(parameter, RaggedDTensor)
        assert parameter.device_mesh.shape == (2, 2)
        assert isinstance(parameter.placements[0], Replicate)
        held = [torch.empty(0)] * 4
        dist.all_gather_object(held, parameter.to_local().detach().clone())
        for first, second in ((0, 2), (1, 3)):
            assert torch.equal(held[first], held[second])


def test_copies_stay_equal_to_the_bit() -> None:
    run_ranks(copies, 4)


def accumulate(verb: str) -> None:
    twins = Twins.of("layers", mesh=(2, 2))
    log: list[Entry] = []
    twins.ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, log)
    for _ in range(2):
        for index, (tokens, targets) in enumerate(twins.batches(3)):
            is_last = index == 2
            getattr(twins.model, verb)(is_last)
            log.clear()
            twins.backward(tokens, targets)
            kinds = [entry.kind for entry in log if entry.action == "enqueue"]
            units = len(twins.ctx.units)
            assert kinds.count("all_reduce") == (units if is_last else 0)
            reduces = is_last or verb == "set_requires_all_reduce"
            assert kinds.count("reduce_scatter") == (units if reduces else 0)
        twins.check_gradients()
        twins.step()
        twins.check_parameters()


@pytest.mark.parametrize("verb", ["set_requires_all_reduce", "set_requires_gradient_sync"])
def test_copies_are_reduced_once_a_step_under_accumulation(verb: str) -> None:
    run_ranks(accumulate, 4, verb)


def unused_then_used() -> None:
    """A gradient that only an earlier microbatch of one rank had is not forgotten."""
    torch.manual_seed(1)
    model = Model().double()
    ctx = FsdpContext(init_device_mesh("cpu", (2, 2)))
    shard_layers(model, ctx)
    model.set_requires_all_reduce(False)
    x = torch.ones(2, 6, dtype=torch.double)
    layer = model.layers[1]
    (layer(x).sum() * (dist.get_rank() == 3)).backward()
    assert layer.up.weight.grad is None
    model.set_requires_all_reduce(True)
    layer.up.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.up.weight.grad is not None


def test_a_gradient_of_an_earlier_microbatch_counts() -> None:
    run_ranks(unused_then_used, 4)


class Skips(Model):
    skipped: int | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = x if index == self.skipped else layer(x)
        return self.head(x)


def skipped_by_the_last(shard_optimizer_over_replicas: bool) -> None:
    twins = Twins(
        Skips,
        shard_layers,
        mesh=(2, 2),
        shard_optimizer_over_replicas=shard_optimizer_over_replicas,
    )
    for _ in range(2):
        for is_last, (tokens, targets) in enumerate(twins.batches(2)):
            twins.model.skipped = twins.twin.skipped = 1 if is_last else None
            twins.model.set_requires_all_reduce(bool(is_last))
            twins.backward(tokens, targets)
        twins.check_gradients()
        twins.step()
        twins.check_parameters()


@pytest.mark.parametrize("shard_optimizer_over_replicas", [False, True])
def test_a_unit_that_the_last_microbatch_skips_is_reduced_across_copies(
    shard_optimizer_over_replicas: bool,
) -> None:
    run_ranks(skipped_by_the_last, 4, shard_optimizer_over_replicas)


def all_reduces_on_its_own() -> None:
    log: list[Entry] = []
    ctx = FsdpContext(init_device_mesh("cpu", (2, 2)))
    ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, log)
    model = Model()
    shard_layers(model, ctx)
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    groups = ctx.groups
    assert groups.replicas is not None
    assert len({id(groups.gather), id(groups.reduce), id(groups.replicas)}) == 3
    assert {entry.comm_stream for entry in log if entry.kind == "all_reduce"} == {"all_reduce"}
    assert {entry.comm_stream for entry in log if entry.kind == "reduce_scatter"} == {
        "reduce_scatter"
    }
    # A unit's copies travel while the next is reduced among its shards: not one after the other.
    order = [entry.kind for entry in log if entry.action == "enqueue"]
    first = order.index("all_reduce")
    assert "reduce_scatter" in order[first:], order


def test_copies_are_reduced_on_a_stream_and_group_of_their_own() -> None:
    run_on_fake_group(all_reduces_on_its_own, 4)


def against_fsdp2() -> None:
    """Losses, gradients, norms and three steps of AdamW: FSDP2's, on the same mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for shard in (fully_shard, torch_fully_shard):
        torch.manual_seed(5)
        model = Model().double()
        for layer in model.layers:
            shard(layer, mesh=mesh)
        shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(dist.get_rank())
        found = []
        for _ in range(3):
            tokens, targets = torch.randint(13, (2, 3, 5), generator=generator)
            loss = loss_of(model(tokens), targets)
            loss.backward()
            gradients = [p.grad.full_tensor() for p in model.parameters()]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach(), norm, *gradients]
        results.append([*found, *(p.full_tensor().detach() for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_training_equals_fsdp2s() -> None:
    run_ranks(against_fsdp2, 4)


def clipped() -> None:
    twins = Twins.of("layers", mesh=(2, 2))
    twins.backward(*next(twins.batches(1)))
    expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(twins.model.parameters(), 0.1), expected)
    twins.check_gradients()


def test_the_gradient_norm_counts_each_copy_once() -> None:
    run_ranks(clipped, 4)


def different_units_of_copies() -> None:
    """Ranks 2 and 3 run other units than 0 and 1: within each group of shards all agree."""
    ctx = FsdpContext(init_device_mesh("cpu", (2, 2)))
    layers = [fully_shard(nn.Linear(4, 4), ctx) for _ in range(2)]
    layers[dist.get_rank() // 2](torch.ones(1, 4)).sum().backward()


def test_copies_that_run_different_units_get_an_error() -> None:
    run_ranks(expect_different_units, 4)


def expect_different_units() -> None:
    with pytest.raises(RuntimeError, match=r"rank \d: all_gather of unit 'Linear\[0\]'; rank \d: "):
        different_units_of_copies()


def recovers() -> None:
    twins = Twins.of("layers", mesh=(2, 2))
    twins.train(1)
    twins.model.set_requires_all_reduce(False)
    twins.model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    twins.ctx.reset()  # what waited for the copies is dropped
    twins.model.set_requires_all_reduce(True)
    twins.train(2)


def test_a_reset_drops_what_waits_for_copies() -> None:
    run_ranks(recovers, 4)


class SlowOnSomeRanks(RecordingCommStream):
    """What is reduced among shards is seen to be done early on ranks 0 and 1 alone."""

    def enqueue(self, *args: Any, **options: Any) -> WorkHandle:
        work = super().enqueue(*args, **options)
        if self.name == "reduce_scatter":
            work.done = lambda: dist.get_rank() < 2
        return work


def fails_in_backward() -> None:
    twins = Twins(partial(Model, layers=6), shard_layers, mesh=(2, 2))
    twins.ctx.comm_stream_factory = lambda name, device: SlowOnSomeRanks(name, [])
    twins.model.set_reduce_scatter_max_input_buffers(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grads, "LARGE_BYTES", 0)
        twins.train(1)

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("planned")

    x = torch.ones(1, 1, 6, dtype=torch.double)
    for index, layer in enumerate(twins.model.layers):
        x = layer(x)
        if index == 1:
            x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        x.sum().backward()
    twins.ctx.reset()
    twins.optimizer.zero_grad()
    twins.train(2)


def test_a_reset_waits_for_what_other_ranks_reduce_across_copies() -> None:
    run_ranks(fails_in_backward, 4, timeout=20)
