"""Whole weights, exported one by one: equal to those of the unsharded twin, in every layout."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import (
    CPUOffloadPolicy,
    FsdpContext,
    FsdpModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from fsdp_overlap.optim import AdamW
from fsdp_overlap.weights import export_weights, plan_cache
from fsdp_overlap.weights.exchange import WeightExchange
from fsdp_overlap.weights.plan_cache import plan_cache_of
from support import experts
from support import tensor_parallel as tp
from support.fake_group import run_on_fake_group
from support.layouts import LAYOUTS, Giant
from support.ranks import run_ranks
from support.twins import COPIES, Twins, impatient
from support.zoo import ZOO, Model, shard_layers, shard_root_only

SMALL = 256  # bytes of a piece, so that there are many


def expected(twin: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by their first names, in order."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in twin.state_dict(keep_vars=True).items():
        if all(tensor is not other for other in found.values()):
            found[name] = tensor
    return {
        name: tensor.detach().to(dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in found.items()
    }


def check(model: nn.Module, twin: nn.Module, **options: Any) -> None:
    """What each asked rank gets is the twin's, name by name. Others get nothing."""
    ranks = options.get("ranks")
    exported = list(export_weights(model, **options))
    if ranks is not None and dist.get_rank() not in ranks:
        assert exported == []
        return
    wanted = expected(twin, options.get("dtype"))
    assert [name for name, _ in exported] == list(wanted)
    for name, weight in exported:  # after the last came, so that no memory was used twice
        assert type(weight) is torch.Tensor
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=0, msg=name)


def train_and_check(twins: Twins, **options: Any) -> None:
    check(twins.model, twins.twin, **options)
    for batch in twins.batches(2):
        twins.backward(*batch)
        twins.step()
    check_close(twins, **options)


def check_close(twins: Twins, **options: Any) -> None:
    """After training, which rounds otherwise."""
    ranks = options.get("ranks")
    exported = dict(export_weights(twins.model, **options))
    if ranks is None or dist.get_rank() in ranks:
        for name, weight in expected(twins.twin).items():
            torch.testing.assert_close(exported[name], weight, msg=name)


def _of_zoo(name: str) -> None:
    twins = Twins.of(name)
    train_and_check(twins, piece_bytes=SMALL)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ZOO)
def test_every_kind_of_model(name: str) -> None:
    run_ranks(_of_zoo, 2, name)


RANKS: list[list[int] | None] = [None, [1], [0, 2]]
PIECES: list[dict[str, Any]] = [
    {},
    {"piece_bytes": SMALL, "prefetch": 0},
    {"piece_bytes": SMALL, "prefetch": 3},
]


def _layout(name: str) -> None:
    ways = [{**options, "ranks": ranks} for ranks, options in product(RANKS, PIECES)]
    for build in (Model, Giant):
        shard = shard_layers if build is Model else shard_root_only
        twins = Twins(build, shard, layout=LAYOUTS[name])
        for way in ways:
            check(twins.model, twins.twin, **way)
        for batch in twins.batches(2):
            twins.backward(*batch)
            twins.step()
        for way in ways:
            check_close(twins, **way)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_on_all_ranks_or_some(name: str) -> None:
    run_ranks(_layout, 3, name)


def _reads_late() -> None:
    twins = Twins(Model, shard_layers)

    def step() -> None:
        for batch in twins.batches(1):
            twins.backward(*batch)
            twins.step()

    before = {name: weight.clone() for name, weight in expected(twins.twin).items()}
    weights = export_weights(twins.model, piece_bytes=SMALL, prefetch=0)
    step()
    for name, weight in weights:
        torch.testing.assert_close(weight, expected(twins.twin)[name], msg=name)
        assert not torch.equal(weight, before[name])
    # A step within the loop: what has travelled is of before, and what has not of after.
    before = {name: weight.clone() for name, weight in expected(twins.twin).items()}
    weights = export_weights(twins.model, piece_bytes=SMALL, prefetch=0)
    name, first = next(weights)
    step()
    torch.testing.assert_close(first, before[name])
    *_, (name, last) = weights
    torch.testing.assert_close(last, expected(twins.twin)[name])


def test_weights_are_read_in_the_loop_and_not_by_the_call() -> None:
    run_ranks(_reads_late, 2)


def _copies(divide: bool, ranks: list[int] | None) -> None:
    twins = Twins(Model, shard_layers, shard_optimizer_over_replicas=divide, **COPIES)
    train_and_check(twins, ranks=ranks, piece_bytes=SMALL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [None, [3]], ids=["all", "one"])
@pytest.mark.parametrize("divide", [False, True])
def test_copies_of_shards_and_divided_ones(divide: bool, ranks: list[int] | None) -> None:
    run_ranks(_copies, 4, divide, ranks)


def _copies_without_me() -> None:
    """A set of shards whose ranks nobody asks sends nothing, and waits for nobody."""
    twins = Twins(Model, shard_layers, **COPIES)
    if twins.rank < 2:
        check(twins.model, twins.twin, ranks=[0])
    dist.barrier()
    if twins.rank >= 2:
        check(twins.model, twins.twin, ranks=[0])


def test_a_set_of_shards_is_exported_alone() -> None:
    run_ranks(_copies_without_me, 4)


def _tensor_parallel(ranks: list[int] | None, layout: str) -> None:
    mesh = tp.make_mesh()
    twin = tp.plain()
    model = tp.parallelize(tp.plain(), mesh["tp"])
    tp.shard(model, FsdpContext(mesh["dp"], layout=LAYOUTS[layout]))
    check(model, twin, ranks=ranks, piece_bytes=SMALL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [None, [1, 2]], ids=["all", "two"])
@pytest.mark.parametrize("layout", ["flat", "whole", "rows"])
def test_tensor_parallel_weights_are_put_together(ranks: list[int] | None, layout: str) -> None:
    run_ranks(_tensor_parallel, 4, ranks, layout)


def _experts(with_dtensors: bool) -> None:
    whole, shards, ep = experts.meshes()
    model, twin = experts.Moe(ep, with_dtensors), experts.Moe(None)
    experts.shard(model, whole, shards, FsdpContext(whole))
    if not with_dtensors:
        # Each rank gets the experts of its own mesh, as full_tensor() gives them.
        for layer in twin:
            mine = layer.experts.weight.detach().chunk(2)[ep.get_local_rank()]
            layer.experts.weight = nn.Parameter(mine)
    check(model, twin, piece_bytes=SMALL)


@pytest.mark.parametrize("with_dtensors", [False, True])
def test_experts(with_dtensors: bool) -> None:
    run_ranks(_experts, 4, with_dtensors)


def _offloaded(dtype: torch.dtype) -> None:
    model = Model()
    model.register_buffer("steps", torch.arange(3))
    twin = copy.deepcopy(model)
    ctx = FsdpContext()
    for layer in model.layers:
        fully_shard(layer, ctx, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, ctx, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    check(model, twin, dtype=dtype)
    assert dict(export_weights(model, dtype=dtype))["steps"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_are_cast_on_the_way_down_and_at_the_end_up(dtype: torch.dtype) -> None:
    run_ranks(_offloaded, 2, dtype)


def _left_early() -> None:
    twins = Twins(Model, shard_layers)
    for prefetch in (0, 2):
        for _ in export_weights(twins.model, piece_bytes=SMALL, prefetch=prefetch):
            break
    train_and_check(twins)
    for number, _ in enumerate(export_weights(twins.model, piece_bytes=SMALL, prefetch=3)):
        if number == 2:
            break
    twins.train(1)
    check_close(twins)


def test_a_loop_that_all_ranks_leave_early_leaves_nothing_behind() -> None:
    run_ranks(_left_early, 2)


def _kept() -> None:
    twins = Twins(Model, shard_layers)
    kept = dict(export_weights(twins.model))
    before = {name: weight.clone() for name, weight in kept.items()}
    for weight in kept.values():
        weight.add_(1)  # is the reader's alone
    check(twins.model, twins.twin)
    twins.train(2)
    for name, weight in kept.items():
        torch.testing.assert_close(weight, before[name] + 1)


@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_the_readers_own(world: int) -> None:
    run_ranks(_kept, world)


def exchanged(model: nn.Module, twin: nn.Module, **options: Any) -> int:
    """How often ranks told each other more than one number for an export, which is right."""
    told = WeightExchange.gather
    calls: list[object] = []

    def counted(exchange: WeightExchange, mine: Any) -> list[Any]:
        calls.append(mine)
        return told(exchange, mine)

    with patch.object(WeightExchange, "gather", counted):
        check(model, twin, **options)
    return len(calls)


def _again() -> None:
    twins = Twins(Model, shard_layers)
    model, twin = twins.model, twins.twin
    assert exchanged(model, twin) == 1
    assert exchanged(model, twin) == 0
    assert exchanged(model, twin, dtype=torch.float32) == 1
    assert exchanged(model, twin, ranks=[1], piece_bytes=SMALL) == 1
    for parameter in twin.parameters():
        parameter.data.mul_(0.5)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
    assert exchanged(model, twin) == exchanged(model, twin, ranks=[1], piece_bytes=SMALL) == 0
    if twins.rank:  # one rank alone has none
        plan_cache_of(twins.ctx).clear()
    assert exchanged(model, twin) == 1
    assert exchanged(model, twin) == 0
    for each in (model, twin):
        each.register_buffer("steps", torch.arange(3))
    assert exchanged(model, twin) == 1
    for each in (model, twin):
        each.steps = torch.arange(4)  # the same names, and they lie otherwise
    assert exchanged(model, twin) == 1
    for number in range(2 * plan_cache._MAX_PLANS):
        assert exchanged(model, twin, piece_bytes=1000 + number) == 1
    assert len(plan_cache_of(twins.ctx)._kept) == plan_cache._MAX_PLANS


def test_ranks_plan_an_export_once() -> None:
    run_ranks(_again, 2)


def _freed() -> None:
    twins = Twins(Model, shard_layers)
    check(twins.model, twins.twin)
    alive = weakref.ref(twins.model), weakref.ref(twins.ctx)
    gc.collect()
    gc.disable()
    try:
        del twins
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_a_plan_keeps_no_model() -> None:
    run_ranks(_freed, 2)


def _renamed() -> None:
    model, ctx = Model(), FsdpContext()
    twin = copy.deepcopy(model)
    shard_layers(model, ctx)

    def names(name: str) -> str | None:
        return None if "bias" in name else f"model.{name}"

    exported = dict(export_weights(model, names=names))
    wanted = {f"model.{name}": w for name, w in expected(twin).items() if "bias" not in name}
    assert list(exported) == list(wanted)
    for name, weight in wanted.items():
        assert torch.equal(exported[name], weight)
    with pytest.raises(ValueError, match=r"two weights the name 'same', the second is 'layers.0"):
        export_weights(model, names=lambda _: "same")
    with pytest.raises(ValueError, match="prefetch=-1"):
        export_weights(model, prefetch=-1)


def test_names_are_the_readers() -> None:
    run_ranks(_renamed, 2)


def _other_arguments() -> None:
    twins = Twins(Model, shard_layers)
    dtype = torch.bfloat16 if twins.rank else None
    with pytest.raises(
        ValueError, match=r"rank 0 gave dtype=None.*, and rank 1 dtype=torch.bfloat16"
    ):
        export_weights(twins.model, dtype=dtype)
    check(twins.model, twins.twin)  # nothing was begun
    twins.train(1)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    run_ranks(_other_arguments, 2)


def _leaves_out() -> str:
    with impatient():
        twins = Twins(Model, shard_layers)
        twins.train(1)
        try:
            if twins.rank == 0:
                list(export_weights(twins.model))
            twins.train(1)
            raise AssertionError("nobody noticed")
        except RuntimeError as error:
            said = str(error)
        twins.ctx.reset()
        twins.optimizer.zero_grad()
        check_close(twins)
        return said


def test_a_rank_that_leaves_an_export_out_is_named() -> None:
    told = r"rank 1 went on without export_weights that this rank has begun with it: call it on"
    said = run_ranks(_leaves_out, 2)
    assert re.search(told, said[0]), said
    assert "rank 0" in said[1], said


def _fails_in_the_loop() -> str:
    with impatient():
        twins = Twins(Model, shard_layers)
        twins.train(1)
        try:
            for number, _ in enumerate(export_weights(twins.model, piece_bytes=SMALL)):
                if number == 2 and twins.rank:
                    raise ArithmeticError("planned")
            raise AssertionError("nobody noticed")
        except (ArithmeticError, RuntimeError) as error:
            said = str(error)
        twins.ctx.reset()
        check_close(twins)
        twins.optimizer.zero_grad()
        twins.twin_optimizer.zero_grad()
        twins.train(1)
        return said


def test_a_rank_that_fails_in_the_loop_is_named_once_it_resets() -> None:
    said = run_ranks(_fails_in_the_loop, 2)
    assert said[1] == "planned"
    assert "rank 1 called ctx.reset()" in said[0], said


def _on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    shard_layers(model, FsdpContext())
    with pytest.raises(RuntimeError, match=r"'embed.*is on the meta device: call to_empty"):
        export_weights(model)


def test_weights_without_values_are_refused() -> None:
    run_on_fake_group(_on_meta, 2)


def go_on(twins: Twins) -> None:
    for batch in twins.batches(2):
        twins.backward(*batch)
        twins.step()


def _between_steps(**options: Any) -> None:
    """What was gathered ahead of the next forward, or kept, stays so on all ranks alike."""
    twins = Twins(Model, shard_layers, optimizer=AdamW, prefetch_next_forward=True, **options)
    for keeps in (False, True):
        if keeps:
            twins.model.set_reshard_after_forward(False)
            twins.model.set_reshard_after_backward(False)
        go_on(twins)
        alive = twins.ctx.stats.current_full_buffers
        gathers = twins.ctx.stats.all_gathers
        if twins.rank < 2:  # of four: one copy of the model alone
            exported = dict(export_weights(twins.model))
            for name, weight in expected(twins.twin).items():
                torch.testing.assert_close(exported[name], weight, msg=name)
        assert twins.ctx.stats.current_full_buffers == alive
        assert twins.ctx.stats.all_gathers == gathers
        go_on(twins)


def _of_one_copy() -> None:
    _between_steps(**COPIES)


def test_an_export_leaves_alone_what_is_gathered() -> None:
    run_ranks(_between_steps, 2)
    run_ranks(_of_one_copy, 4)


def _unsharded_by_hand() -> None:
    twins = Twins(Model, shard_layers)
    for module in twins.model.modules():
        if isinstance(module, FsdpModule):
            module.unshard()
    check(twins.model, twins.twin)
    twins.train(1)


def test_weights_that_the_user_unsharded_are_exported_too() -> None:
    run_ranks(_unsharded_by_hand, 2)
