"""The process groups of contexts: who has them, when they go, and what they are made like."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import weakref
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.comm import process_groups
from fsdp_overlap.comm.process_groups import GroupCache
from support.lagging import LaggingGroup
from support.ranks import expect_rank_errors, run_ranks
from support.twins import NAMES, Twins, impatient
from support.two_ranks import SECONDS
from support.zoo import Model, shard_layers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="counts threads and files in /proc")


def held() -> tuple[int, int, int]:
    """The threads, open files and process groups of this process."""
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return threads, files, len(c10d._world.pg_map)


def one_context_after_another() -> None:
    counts = []
    gc.disable()  # a context's groups are free at once, and not when Python looks for cycles
    try:
        for _ in range(12):
            twins = Twins.of("layers")
            twins.train(1)
            counts.append(held())
            del twins
    finally:
        gc.enable()
    # Threads of what this process ran before may end meanwhile.
    for before, after in pairwise(counts[1:]):
        assert all(now <= then for then, now in zip(before, after, strict=True)), counts


@LINUX
def test_contexts_that_follow_each_other_hold_no_more_than_one() -> None:
    run_ranks(one_context_after_another, 2)


def groups_of(twins: Twins) -> set[str]:
    return {twins.ctx.groups.gather.group_name, twins.ctx.groups.reduce.group_name}


def contexts_side_by_side() -> None:
    """Which ranks free at different moments, in another order: what others use goes on."""
    rank = dist.get_rank()
    first, second = Twins.of("layers"), Twins.of("layers")
    first.train(1)
    second.train(1)
    names = groups_of(first) | groups_of(second)
    assert len(names) == 4
    kept: list[Twins] = [first, second]
    del first, second
    del kept[rank]  # rank 0 the first, rank 1 the second
    third = Twins.of("layers")
    third.train(1)
    kept.clear()
    fourth = Twins.of("layers")
    fourth.train(1)
    third.train(1)
    names |= groups_of(third) | groups_of(fourth)
    assert len(names) == 8
    alive = {group.group_name for group in c10d._world.pg_names} & names
    assert alive == groups_of(third) | groups_of(fourth)


def left_at_different_places() -> None:
    """A context that is dropped after one rank alone issued something on one of its groups."""
    twins = Twins.of("layers")
    twins.train(1)
    names = groups_of(twins)
    gathers = twins.ctx.groups.gather
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(1), group=gathers, group_src=1, async_op=True)
    reference = weakref.ref(gathers)
    del twins, gathers
    twins = Twins.of("layers")
    twins.train(2)
    assert not groups_of(twins) & names
    assert reference() is None


def closed_by_a_fault() -> None:
    """And dropped without a reset."""
    with impatient():
        twins = Twins.of("layers")
        twins.train(1)
        names = groups_of(twins)
        twins.ctx.error_monitor._fail("planned")
        del twins
        twins = Twins.of("layers")
        twins.train(2)
        assert not groups_of(twins) & names


def collect(*_: object) -> None:
    gc.collect()


def freed_by_the_collector() -> None:
    """A context that only one rank's garbage collector has freed, in the middle of a step."""
    twins = Twins.of("layers")
    twins.train(1)
    names = groups_of(twins)
    cycle: list[Any] = [twins]
    cycle.append(cycle)
    other = Twins.of("layers")
    del twins, cycle
    if dist.get_rank() == 1:
        other.model.layers[0].register_forward_hook(collect)
    other.train(2)
    third = Twins.of("layers")
    third.train(1)
    other.train(1)
    there = {group.group_name for group in c10d._world.pg_names} & names
    assert there == (names if dist.get_rank() == 0 else set())
    gc.collect()


def independent() -> None:
    gc.disable()  # a context's groups are free at once, and not when Python looks for cycles
    try:
        contexts_side_by_side()
        left_at_different_places()
        closed_by_a_fault()
        freed_by_the_collector()
    finally:
        gc.enable()


def test_contexts_are_freed_on_each_rank_at_its_own_time() -> None:
    run_ranks(independent, 2)


def in_another_order_on_each_rank() -> None:
    """Two models of one shape. On shared groups each would take half of the other's weights."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    models = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    for value, model in enumerate(models):
        torch.nn.init.constant_(model.weight, value)
        fully_shard(model, FsdpContext(mesh))
    with torch.no_grad():
        for _ in range(4):  # until nothing is confirmed
            for model in models:
                model(torch.ones(1, 8))
        with impatient(), pytest.raises(RuntimeError, match="all_gather of unit 'Linear'"):
            models[dist.get_rank()](torch.ones(1, 8))


def test_a_context_takes_no_data_of_another_that_ranks_run_in_another_order() -> None:
    run_ranks(in_another_order_on_each_rank, 2)


def destroyed_before_the_end() -> None:
    before = held()[0]
    twins = Twins.of("layers")
    twins.train(1)
    groups = [weakref.ref(group) for group in (twins.ctx.groups.gather, twins.ctx.groups.reduce)]
    twins.model.head.weight.full_tensor()
    during = held()[0]
    dist.destroy_process_group()
    assert [group() for group in groups] == [None, None]
    process_groups._end_threads()
    # The model, which a program still has when it ends, keeps none: those of the default group were
    # there before.
    assert held()[0] < before < during
    with pytest.raises(RuntimeError, match="destroyed by destroy_process_group"):
        twins.ctx.groups.gather.size()


@LINUX
def test_no_thread_of_a_destroyed_group_is_left_when_python_ends() -> None:
    run_ranks(destroyed_before_the_end, 2)


# ---- a backend that is not gloo by name, and does not make the host wait ----


class Stopping(Model):
    """Raises behind the layer that it is told, in forward or in backward."""

    stops: tuple[str, int] | None = None

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = super().run(layer, x)
        index = list(self.layers).index(layer)
        self.stop("forward", index)
        if x.requires_grad:
            x.register_hook(lambda _: self.stop("backward", index))
        return x

    def stop(self, where: str, index: int) -> None:
        if self.stops == (where, index):
            raise ArithmeticError(f"planned at {index}")


def stop_at(*places: tuple[str, int], device: str = "cpu") -> None:
    """Each rank at its own, twice; then training must be right."""
    twins = Twins(Stopping, shard_layers, device=device)
    twins.train(2)
    assert twins.ctx.groups.gather is twins.ctx.mesh.get_group()
    for _ in range(2):
        reduce = twins.ctx.groups.reduce
        twins.model.stops = places[twins.rank]
        LaggingGroup.patience = timedelta(seconds=0.3)
        try:
            twins.losses(*next(twins.batches(1)))[0].backward()
            raise AssertionError("nobody stopped")
        except ArithmeticError:
            twins.model.stops = LaggingGroup.patience = None
            twins.ctx.reset()
        twins.optimizer.zero_grad()
        twins.twin_optimizer.zero_grad()
        twins.train(2)
        # New ones where they must be, for with this backend they are dear.
        assert (twins.ctx.groups.reduce is reduce) == (len(set(places)) == 1)
        if device == "cpu":
            assert reduce.aborted == (len(set(places)) > 1)
        del reduce


def test_ranks_without_gloo_that_fail_at_different_layers_train_right_after_a_reset() -> None:
    both = ("forward", 1)
    run_ranks(stop_at, 2, both, both, backend="lagging")
    # All gathers were issued, and one reduction more on rank 1.
    run_ranks(stop_at, 2, ("backward", 1), ("backward", 0), backend="lagging")


@pytest.mark.gpu
@pytest.mark.two_ranks
@pytest.mark.parametrize("layer", [1, 0])
def test_ranks_of_nccl_that_fail_at_different_layers_train_right_after_a_reset(layer: int) -> None:
    places = ("backward", 1), ("backward", layer)
    run_ranks(partial(stop_at, *places, device="cuda"), 2, backend="nccl", timeout=SECONDS)


def test_reset_refuses_what_it_cannot_mend() -> None:
    """Ranks are gathers apart, on the group of the mesh, and equal sizes would hide it."""
    messages = expect_rank_errors(
        stop_at,
        2,
        ("forward", 0),
        ("forward", 1),
        backend="lagging",
        match="ctx.reset.. cannot bring the ranks together: ranks .[01]. and this one",
    )
    assert "planned at 0" in messages[0]
    assert "planned at 1" in messages[1]


# ---- what they are made like ----


def as_the_meshes() -> None:
    group = dist.group.WORLD
    assert isinstance(group, LaggingGroup)
    group.options.is_high_priority_stream = True
    cache = GroupCache(separate=True)
    groups = cache.get(init_device_mesh("cpu", (2,)))
    own = groups.reduce
    assert isinstance(own, LaggingGroup)
    assert own.given is not group.options
    assert own.given.is_high_priority_stream
    assert own.options._timeout == group.options._timeout


def test_groups_have_the_options_of_the_meshes() -> None:
    run_ranks(as_the_meshes, 2, backend="lagging")


def in_another_order() -> None:
    """A mesh of a group whose first rank is 1."""
    own = dist.new_group([1, 0], sort_ranks=False)
    mesh = DeviceMesh.from_group(own, "cpu")
    torch.manual_seed(3)
    model = Model()
    whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    expected = model(tokens)
    ctx = FsdpContext(mesh)
    shard_layers(model, ctx)
    torch.testing.assert_close(model(tokens), expected)
    assert ctx.groups.gather.rank() == 1 - dist.get_rank() == mesh.get_local_rank()
    assert dist.get_process_group_ranks(ctx.groups.reduce) == [1, 0]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), whole[name])


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of every group",
)
def test_a_mesh_keeps_the_order_of_its_ranks() -> None:
    run_ranks(in_another_order, 2)


def transposed(shard_optimizer_over_replicas: bool) -> None:
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NAMES)
    with patch("support.twins.init_device_mesh", lambda *_, **__: mesh):
        twins = Twins.of(
            "layers", mesh=(2, 2), shard_optimizer_over_replicas=shard_optimizer_over_replicas
        )
    twins.train(2)


def refused() -> None:
    with pytest.raises(ValueError, match="order the ranks of every row alike"):
        FsdpContext(DeviceMesh("cpu", [[1, 0], [2, 3]]))


def on_meshes_of_two_dimensions() -> None:
    for shard_optimizer_over_replicas in (False, True):
        transposed(shard_optimizer_over_replicas)
    refused()


def test_a_mesh_may_be_transposed_and_a_tangled_one_is_refused() -> None:
    run_ranks(on_meshes_of_two_dimensions, 4)


def many_ranks() -> None:
    names = []

    def helper(*args: Any, **options: Any) -> Any:
        names.append(args[5])
        return c10d.GroupMember.WORLD, None

    like = dist.group.WORLD
    assert like is not None
    with patch.object(c10d, "_new_process_group_helper", helper):
        ranks = c10d._world.pg_group_ranks[like]
        process_groups.own_group("all_gather", like, range(4096), "cpu")
        c10d._world.pg_group_ranks[like] = ranks
    assert len(names[0]) < 64


def test_names_of_groups_are_short() -> None:
    run_ranks(many_ranks, 1)
