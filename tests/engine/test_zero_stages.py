"""Full buffers kept between steps (ZeRO-1 and 2), and refreshed under the next forward."""

from __future__ import annotations

import copy
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_overlap import FsdpContext, TensorAtomic, fully_shard
from fsdp_overlap.optim import AdamW, Muon
from support.fake_group import run_on_fake_group
from support.layouts import forced_shards
from support.ranks import run_ranks
from support.recorded import GATHER, Recorded, layer, position
from support.twins import Twins, same
from support.zoo import Model, shard_layers

SYNCS: dict[str, Callable[[FsdpContext], None]] = {
    "by forward": lambda ctx: None,
    "started": lambda ctx: ctx.start_param_sync(),
    "synchronous": lambda ctx: ctx.finish_param_sync(),
    "started and finished": lambda ctx: (ctx.start_param_sync(), ctx.finish_param_sync()),  # type: ignore[dict-item, return-value]
    "released": lambda ctx: (ctx.start_param_sync(), ctx.release_unsharded()),  # type: ignore[dict-item, return-value]
}


def of_stage(name: str, stage: int, optimizer: Any = Muon, **options: Any) -> Twins:
    if optimizer is Muon:
        options["ns_dtype"] = torch.float64
    twins = Twins.of(name, optimizer=optimizer, layout=TensorAtomic(), **options)
    twins.model.set_zero_stage(stage)
    return twins


def poison(twins: Twins) -> None:
    """Makes whoever uses a stale parameter known."""
    for unit in twins.ctx.units:
        for param_group in unit.param_groups:
            # A parameter without a gradient is not stepped, and stays fresh.
            if param_group.is_gathered and not param_group.is_up_to_date:
                param_group.full.flat.fill_(torch.nan)


def accumulate(twins: Twins, batches: Any, count: int) -> None:
    for index in range(count):
        twins.model.set_is_last_backward(index == count - 1)
        twins.backward(*next(batches))


def train(stage: int, name: str, microbatches: int) -> list[list[torch.Tensor]]:
    found = []
    for sync in SYNCS:
        twins = of_stage(name, stage)
        batches = twins.batches(3 * microbatches)
        for _ in range(3):
            accumulate(twins, batches, microbatches)
            twins.check_gradients()
            twins.step()
            assert not any(unit.is_up_to_date for unit in twins.ctx.units)
            poison(twins)
            SYNCS[sync](twins.ctx)
            twins.check_parameters()
        found.append([parameter.full_tensor() for parameter in twins.model.parameters()])
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("stage", "microbatches", "name"),
    [
        (1, 2, "layers"),
        (1, 3, "checkpointed"),
        (2, 1, "layers"),
        (2, 1, "tied parameters"),
        (2, 2, "nested units"),
        (3, 1, "layers"),
    ],
)
def test_every_way_to_refresh_gives_the_same_parameters(
    stage: int, microbatches: int, name: str
) -> None:
    for mine in run_ranks(train, 3, stage, name, microbatches):
        for other in mine[1:]:
            assert all(map(torch.equal, mine[0], other))


class PendingCollective(TorchDispatchMode):
    """Counts collectives. (torch's ``CommDebugMode`` cannot follow modules whose class changes.)"""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(stage: int, microbatches: int) -> tuple[int, int, set[str], int]:
    twins = of_stage("layers", stage)
    batches = twins.batches(3 * microbatches)
    for step in range(3):
        if step:
            twins.ctx.stats.reset()
        with PendingCollective() as issued:
            for index in range(microbatches):
                twins.model.set_is_last_backward(index == microbatches - 1)
                tokens, targets = next(batches)
                twins.losses(tokens, targets)[0].backward()
            twins.optimizer.step()
            twins.optimizer.zero_grad()
            twins.ctx.start_param_sync()
    stats = twins.ctx.stats
    assert issued.counts["allreduce_"] == stats.order_checks
    return stats.all_gathers, stats.reduce_scatters, set(issued.counts), stats.current_full_buffers


def test_gradients_are_reduce_scattered_once_a_step_or_once_a_backward() -> None:
    """Four units, two microbatches. No gradient is all-reduced; parameters are gathered once. At
    stage 3 the unit is left that the next forward needs first."""
    allowed = {"broadcast_", "alltoall_base_", "allreduce_"}
    for stage, gathers, reductions, kept in ((1, 4, 4, 4), (2, 4, 8, 4), (3, 12, 8, 1)):
        for result in run_ranks(counted, 2, stage, 2):
            assert result == (gathers, reductions, allowed, kept), stage


def in_order() -> None:
    recorded = Recorded()
    recorded.model.set_zero_stage(2)
    optimizer = AdamW(recorded.model.parameters())
    for _ in range(2):
        recorded.forward().backward()
        optimizer.step()
        optimizer.zero_grad()
    started = recorded.recorded(recorded.ctx.start_param_sync)
    names = ["Model", *map(layer, range(3))]
    assert [(entry.action, entry.label) for entry in started] == [("enqueue", n) for n in names]
    assert recorded.recorded(recorded.ctx.start_param_sync) == []
    forward = recorded.recorded(recorded.forward)
    assert [(entry.action, entry.label) for entry in forward] == [("wait", n) for n in names]


def test_a_refresh_is_enqueued_in_the_order_of_forward_which_waits_unit_by_unit() -> None:
    run_on_fake_group(in_order, 2)


def ahead() -> None:
    """Not started, the refresh runs ahead of use all the same."""
    recorded = Recorded()
    recorded.model.set_zero_stage(2)
    optimizer = AdamW(recorded.model.parameters())
    for _ in range(2):
        recorded.forward().backward()
        optimizer.step()
    forward = recorded.recorded(recorded.forward)
    for index in range(2):
        following = position(forward, "enqueue", layer(index + 1), GATHER)
        assert following < position(forward, "wait", layer(index), GATHER)


def test_without_a_start_forward_refreshes_ahead_of_use() -> None:
    run_on_fake_group(ahead, 2)


def while_recording() -> None:
    twins = of_stage("branches", 2)
    for index, batch in enumerate(twins.batches(4)):
        losses = twins.losses(*batch)
        twins.ctx.start_param_sync()  # between forward and backward: nothing is stale
        if index % 2:
            twins.ctx.finish_param_sync()
        else:
            twins.ctx.release_unsharded()  # backward gathers again
        for loss in losses:
            loss.backward()
        twins.check_gradients()
        twins.step()
        poison(twins)
        twins.ctx.start_param_sync()
        twins.check_parameters()
    # The refresh of one unit leaves the graph of another alone.
    x = torch.ones(2, 6, dtype=torch.float64)
    for model in (twins.model, twins.twin):
        y = model.layers[0](x)
        with torch.no_grad():
            model.layers[1].up.weight.mul_(0.5)
        if model is twins.model:
            twins.ctx.finish_param_sync()
        (y + model.layers[1](y)).square().mean().backward()
    twins.check_gradients()


def test_a_refresh_while_autograd_records() -> None:
    run_ranks(while_recording, 2)


def alone(call: str | None) -> None:
    """One rank runs layers while all of them are whole, which takes no collective, in an order of
    its own."""
    twins = of_stage("layers", 2)
    batches = twins.batches(6)
    for _ in range(2):
        twins.backward(*next(batches))
        if twins.rank == 0:
            with torch.no_grad():
                x = torch.ones(1, 6, dtype=torch.float64)
                for layer in (*reversed(twins.model.layers), *twins.model.layers):
                    x = layer(x)
                twins.model.layers[2](x)
        twins.step()
        poison(twins)
        if call is not None:
            getattr(twins.ctx, call)()
        tokens, _ = next(batches)
        with torch.no_grad():
            same(twins.model(twins.mine(tokens)), twins.twin(twins.mine(tokens)), "evaluation")


@pytest.mark.parametrize("call", [None, "start_param_sync", "finish_param_sync"])
def test_what_one_rank_ran_alone_does_not_change_the_order(call: str | None) -> None:
    run_ranks(alone, 2, call)


def recomputed() -> int:
    twins = of_stage("checkpointed groups", 2)
    for batch in twins.batches(3):
        twins.ctx.stats.reset()
        twins.backward(*batch)
        twins.check_gradients()
        twins.step()
    return twins.ctx.stats.all_gathers


def test_recomputed_units_are_kept() -> None:
    """Four layers and the root, gathered once a step."""
    assert run_ranks(recomputed, 2) == [5, 5]


def everywhere() -> None:
    """All three, twice, from within forward and backward, and where there is nothing to do."""
    twins = of_stage("nested units", 2)

    def call(*_: Any) -> None:
        for _ in range(2):
            twins.ctx.start_param_sync()
            twins.ctx.release_unsharded()
            twins.ctx.finish_param_sync()
            twins.ctx.release_unsharded()

    call()
    for module in twins.model.modules():
        module.register_forward_pre_hook(call)
        module.register_forward_hook(call)
        module.register_full_backward_hook(call)
    for batch in twins.batches(3):
        twins.backward(*batch)
        twins.check_gradients()
        twins.step()
        call()
        twins.check_parameters()
    twins.check_rest()


def test_all_are_safe_at_any_time() -> None:
    run_ranks(everywhere, 2)


def evaluate(stage: int) -> None:
    twins = of_stage("layers", stage)
    batches = twins.batches(9)
    for round_ in range(3):
        twins.backward(*next(batches))
        twins.step()
        poison(twins)
        tokens, _ = next(batches)
        mine = twins.mine(tokens)
        expected = twins.twin(mine)
        with torch.no_grad():
            same(twins.model(mine), expected, "evaluation")
        # Without the root's hooks, on parameters that are whole for as long as is wished.
        twins.ctx.finish_param_sync()
        modules = [m for m in twins.model.modules() if hasattr(m, "unshard")]
        for module in modules:
            module.unshard()
        with torch.inference_mode(round_ == 1):
            same(twins.model.forward(mine).detach().clone(), expected, "without hooks")
        for module in modules:
            module.reshard()
        twins.check_parameters()


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_between_steps(stage: int) -> None:
    run_ranks(evaluate, 2, stage)


def rescheduled() -> None:
    twins = of_stage("layers", 2)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in (twins.optimizer, twins.twin_optimizer)
    ]
    for batch in twins.batches(4):
        twins.backward(*batch)
        twins.step()
        poison(twins)
        twins.ctx.start_param_sync()
        for scheduler in schedulers:
            scheduler.step()
        twins.ctx.finish_param_sync()
        twins.check_parameters()
        gathers = twins.ctx.stats.all_gathers
        mine = twins.mine(batch[0])
        with torch.no_grad():
            same(twins.model(mine), twins.twin(mine), "evaluation")
        assert twins.ctx.stats.all_gathers == gathers  # all were fresh


def test_a_scheduler_between_start_and_finish() -> None:
    run_ranks(rescheduled, 2)


def memory() -> None:
    """Kept, released, sharded again."""
    twins = of_stage("layers", 2)
    batches = twins.batches(4)
    twins.backward(*next(batches))
    assert twins.ctx.stats.current_full_buffers == 4
    twins.step()
    twins.ctx.start_param_sync()
    twins.ctx.release_unsharded()
    twins.check_rest()
    twins.backward(*next(batches))
    twins.model.set_zero_stage(3)
    twins.step()
    twins.backward(*next(batches))
    twins.check_rest()
    twins.check_gradients()
    with pytest.raises(ValueError, match=r"set_zero_stage\(0\): use 1, 2 or 3"):
        twins.model.set_zero_stage(0)


def test_memory_is_given_back() -> None:
    run_ranks(memory, 2)


def owners(padding: float, tensor_collectives: bool) -> list[torch.Tensor]:
    """Equal at any cost, or ragged as they come; ``tensor_collectives``: as on NCCL."""
    with forced_shards(padding, tensor_collectives):
        layout = TensorAtomic(split=("head.*",), max_padding=math.inf if padding > 0 else 0.0)
        twins = Twins(Model, shard_layers, optimizer=Muon, layout=layout)
        twins.model.set_zero_stage(2)
        plans = [param_group.plan for unit in twins.ctx.units for param_group in unit.param_groups]
        assert all(plan.is_equal for plan in plans) == (padding > 0)
        for batch in twins.batches(4):
            twins.losses(*batch)[0].backward()
            twins.optimizer.step()
            twins.optimizer.zero_grad()
            twins.ctx.start_param_sync()
        return [parameter.full_tensor() for parameter in twins.model.parameters()]


def test_broadcasts_of_uneven_owners_and_a_padded_all_gather_give_the_same() -> None:
    ragged = run_ranks(owners, 3, -1.0, False)
    for forced in (False, True):
        for mine, other in zip(ragged, run_ranks(owners, 3, 1e9, forced), strict=True):
            for first, second in zip(mine, other, strict=True):
                torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def long_run(steps: int) -> None:
    """Random calls, the same on every rank, at moments that differ from rank to rank."""
    # Which does not let rounding grow.
    twins = of_stage("layers", 2, optimizer=torch.optim.SGD)
    shared, own = random.Random(0), random.Random(dist.get_rank())
    generator = torch.Generator().manual_seed(0)

    def wait() -> None:
        if own.random() < 0.3:
            time.sleep(own.random() * 0.004)

    for module in twins.model.modules():
        module.register_forward_pre_hook(lambda *_: wait())
    for step in range(steps):
        twins.model.set_zero_stage(shared.choice([1, 2, 2, 3]))
        microbatches = shared.choice([1, 1, 2])
        for index in range(microbatches):
            twins.model.set_is_last_backward(index == microbatches - 1)
            tokens, targets = torch.randint(13, (2, 2 * 3, 5), generator=generator)
            losses = twins.losses(tokens, targets)
            for loss in losses:
                loss.backward()
                assert loss.isfinite(), step
            wait()
        twins.step()
        poison(twins)
        for call in shared.choices(
            ["start_param_sync", "finish_param_sync", "release_unsharded"],
            weights=[4, 1, 1],
            k=shared.choice([0, 1, 1, 2]),
        ):
            wait()
            getattr(twins.ctx, call)()
        if shared.random() < 0.1:
            with torch.no_grad():
                same(twins.model(tokens), twins.twin(tokens), "evaluation")
        if step % 50 == 49:
            twins.check_parameters()


@pytest.mark.slow
def test_hundreds_of_steps_with_random_delays_never_use_a_stale_parameter() -> None:
    run_ranks(long_run, 2, 200)


def copied() -> None:
    model: Any = fully_shard(nn.Linear(2, 2))
    model.set_zero_stage(1)
    model.set_is_last_backward(False)
    unit = copy.deepcopy(model)._fsdp_unit
    assert not unit.syncs_gradients
    assert not unit.settings.reshard_after_backward


def test_a_copy_is_of_the_same_stage() -> None:
    run_ranks(copied, 1)
