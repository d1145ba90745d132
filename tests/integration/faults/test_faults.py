"""What happens when something goes wrong: errors in a pass, ranks that differ, models that go."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import FsdpContext, RaggedDTensor, fully_shard
from fsdp_overlap.comm import store_mailbox
from fsdp_overlap.comm.comm_streams import HostWorkHandle, PendingCollective
from fsdp_overlap.desync import error_monitor
from support.ranks import RankError, expect_rank_errors, run_ranks
from support.recorded import RecordingCommStream
from support.twins import Twins, impatient
from support.zoo import WIDTH, Block, Model, shard_layers


class Failing(Model):
    """Raises where it is told to: in a hook before or after the middle layer, behind it in forward
    or in backward."""

    fails = ""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layers[1]
        layer.register_forward_pre_hook(lambda *_: self.fail("pre-hook"))
        layer.register_forward_hook(lambda *_: self.fail("hook"))

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = super().run(layer, x)
        if layer is self.layers[1]:
            self.fail("forward")
            if x.requires_grad:
                x.register_hook(lambda _: self.fail("backward"))
        return x

    def fail(self, where: str) -> None:
        if self.fails == where:
            raise ArithmeticError("planned")


WHERE = ["forward", "pre-hook", "hook", "backward"]


def fail_and_go_on(where: str, steps_before: int, failing: Sequence[int]) -> str:
    """Returns what the error said."""
    with impatient():
        twins = Twins(Failing, shard_layers)
        twins.ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, [])
        twins.train(steps_before)
        for _ in range(2):
            tokens, targets = next(twins.batches(1))
            twins.model.fails = where if twins.rank in failing else ""
            try:
                for _ in range(2):  # of which the first may need nothing of a rank that failed
                    twins.losses(tokens, targets)[0].backward()
                raise AssertionError("nobody failed")
            except (ArithmeticError, RuntimeError) as error:
                twins.model.fails = ""
                twins.ctx.reset()
                text = str(error)
            twins.check_rest()
            twins.check_parameters()
            twins.optimizer.zero_grad()
            twins.twin_optimizer.zero_grad()
            twins.train(2)
        return text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("where", WHERE)
def test_reset_after_an_error_on_all_ranks_lets_training_go_on(
    where: str, steps_before: int
) -> None:
    said = run_ranks(fail_and_go_on, 2, where, steps_before, [0, 1])
    assert said == ["planned", "planned"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("where", WHERE)
def test_reset_after_an_error_on_one_rank_lets_training_go_on(
    where: str, steps_before: int
) -> None:
    first, planned, last = run_ranks(fail_and_go_on, 3, where, steps_before, [1])
    assert planned == "planned"
    for message in (first, last):
        assert "among ranks [0, 1, 2]" in message
        assert "rank 1 called ctx.reset() after ArithmeticError('planned')" in message


def fail_before_the_first_collective() -> None:
    with impatient():
        twins = Twins(Failing, shard_layers)
        twins.model.set_separate_reduce_scatter_group(False)
        fail = twins.model.register_forward_pre_hook(
            lambda model, _: model.fail("first"), prepend=True
        )
        twins.model.fails = "first" if twins.rank == 1 else ""
        with pytest.raises((ArithmeticError, RuntimeError), match=r"planned|rank 1 called"):
            twins.model(twins.mine(next(twins.batches(1))[0]))
        fail.remove()
        twins.ctx.reset()
        twins.train(1)


def test_reset_meets_ranks_on_which_nothing_was_issued() -> None:
    run_ranks(fail_before_the_first_collective, 2)


def fail_in_one_of_two_contexts(backwards: bool) -> str:
    """Which all are reset, whichever it was."""
    with impatient():
        both = [Twins(Failing, shard_layers) for _ in range(2)]
        for twins in both:
            twins.train(1)
        both[1].model.fails = "forward" if both[1].rank == 1 else ""
        try:
            for twins in both * 2:
                twins.losses(*next(twins.batches(1)))[0].backward()
            raise AssertionError("nobody failed")
        except (ArithmeticError, RuntimeError) as error:
            said = str(error)
            for twins in both[:: -1 if backwards else 1]:
                twins.model.fails = ""
                twins.ctx.reset()
                twins.optimizer.zero_grad()
                twins.twin_optimizer.zero_grad()
        for twins in both:
            twins.train(1)
        return said


@pytest.mark.parametrize("backwards", [False, True])
def test_reset_of_all_contexts_lets_training_go_on(backwards: bool) -> None:
    said, planned = run_ranks(fail_in_one_of_two_contexts, 2, backwards)
    assert planned == "planned"
    assert "rank 1 called ctx.reset() after ArithmeticError('planned')" in said
    assert ("of another context" in said) == (not backwards)


def reset_at_odd_moments() -> None:
    """Before anything ran, and between a forward and its backward."""
    twins = Twins.of("layers")
    twins.ctx.reset()
    for tokens, targets in twins.batches(2):
        loss, twin_loss = twins.losses(tokens, targets)
        twins.ctx.reset()
        loss.backward()
        twin_loss.backward()
    twins.check_gradients()


def test_a_backward_of_a_graph_from_before_a_reset_is_right() -> None:
    run_ranks(reset_at_odd_moments, 2)


def go_on_alone() -> None:
    twins = Twins(Failing, shard_layers)
    twins.train(1)
    if twins.rank == 1:
        half = timedelta(seconds=0.5)
        with patch.object(error_monitor, "group_timeout", lambda *_: half):
            twins.ctx.reset()


def test_reset_on_one_rank_alone_says_who_did_not_come() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] did not call ctx.reset\(\) in time") as error:
        run_ranks(go_on_alone, 2)
    assert "[1]" in str(error.value)


class SilentStore(dist.Store):
    """As that of a rank which was stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def wait_for_end(self, *_: Any) -> bool:
        return self.end.wait()

    set = check = wait = get = wait_for_end


def ask_a_silent_store() -> None:
    store, second = SilentStore(), timedelta(seconds=0.1)
    with (
        patch.object(store_mailbox, "default_store", lambda: store),
        patch.object(store_mailbox, "ANSWER_SECONDS", 0.1),
    ):
        asked = store_mailbox.StoreMailbox("asked", dist.group.WORLD)
        asked.post("note")
        assert asked.read() == {}
        assert asked.barrier(second) == {}
        store.end.set()


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    run_ranks(ask_a_silent_store, 2, timeout=20)


class BusyStore(SilentStore):
    """Takes its time to answer one question."""

    notes: list[bytes]

    def set(self, key: str, note: bytes) -> None:
        self.notes.append(note)


def ask_a_busy_store() -> None:
    store = BusyStore()
    store.notes = []
    with patch.object(store_mailbox, "default_store", lambda: store):
        asked = store_mailbox.StoreMailbox("asked", dist.group.WORLD)
        asking = threading.Thread(target=asked.read)
        asking.start()
        asked.post("note")
        assert store.notes == [b"note"]
        store.end.set()
        asking.join()


def test_a_thread_that_asks_does_not_silence_another() -> None:
    run_ranks(ask_a_busy_store, 2, timeout=20)


def groups_are_freed() -> None:
    twins = Twins.of("layers")
    counts, groups = [], []
    for step in range(3):
        if step > 0:
            twins.ctx.reset()
        twins.train(1)
        groups += [weakref.ref(group) for group in twins.ctx.groups.per_dim]
        counts.append(len(os.listdir("/proc/self/task")))
    assert counts[0] == counts[1] == counts[2]
    del twins
    dist.destroy_process_group()
    gc.collect()
    assert all(group() is None for group in groups)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_groups_and_their_threads_go_with_a_reset_and_with_the_context() -> None:
    run_ranks(groups_are_freed, 2)


def fail_without_reset(where: str) -> None:
    """Rank 1 goes on after its error as if nothing had happened."""
    with impatient():
        twins = Twins(Failing, shard_layers)
        twins.train(1)
        batch = next(twins.batches(1))
        twins.model.fails = where if twins.rank == 1 else ""
        with suppress(ArithmeticError):
            twins.losses(*batch)[0].backward()
        twins.model.fails = ""
        twins.losses(*batch)[0].backward()


@pytest.mark.parametrize("where", ["forward", "hook"])
def test_an_error_that_one_rank_keeps_to_itself_is_found(where: str) -> None:
    expect_rank_errors(fail_without_reset, 2, where, match="ranks ran different units")


def die_in(where: str) -> None:
    twins = Twins(Failing, shard_layers)
    twins.train(1)
    if twins.rank == 1:
        twins.model.fail = lambda at: os.kill(os.getpid(), signal.SIGKILL) if at == where else None
    twins.losses(*next(twins.batches(1)))[0].backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_that_are_left_name_what_they_waited_for(where: str) -> None:
    waited = r"(all_gather|reduce_scatter|order_check).* of unit 'layers\.\d'"
    group = r"among ranks \[0, 1\] \(group 'fsdp_overlap_\w+'\) failed: a rank died"
    with pytest.raises(RankError, match=rf"{waited} {group}") as error:
        run_ranks(die_in, 2, where)
    assert "rank 1: died" in str(error.value)


def fail_in_forward() -> None:
    twins = Twins(Failing, shard_layers)
    twins.train(1)
    twins.model.fails = "forward"
    with pytest.raises(ArithmeticError):
        twins.losses(*next(twins.batches(1)))
    twins.model.fails = None
    # Forward hooks have run all the same, so nothing is left and no reset is needed.
    twins.check_rest()
    twins.train(1)


def test_a_forward_that_raised_leaves_nothing_behind() -> None:
    run_ranks(fail_in_forward, 2)


def fail_in_backward_then(then: str) -> None:
    twins = Twins(Failing, shard_layers)
    twins.model.fails = "backward"
    batch = next(twins.batches(1))
    loss, _ = twins.losses(*batch)
    other, _ = twins.losses(*batch)
    with pytest.raises(ArithmeticError):
        loss.backward()
    twins.model.fails = None
    if then == "forward":
        twins.losses(*batch)
    else:
        other.backward()


@pytest.mark.parametrize("then", ["forward", "backward"])
def test_without_reset_the_next_call_says_what_happened(then: str) -> None:
    expect_rank_errors(
        fail_in_backward_then, 2, then, match=r"last backward did not finish.*ctx\.reset\(\)"
    )


def different_units(in_forward_only: bool) -> None:
    """FSDP2 silently computes with the other unit's weights here."""
    # Without prefetch, which would make ranks gather different numbers of units next time.
    ctx = FsdpContext(prefetch=0 if in_forward_only else 1)
    experts = nn.ModuleList(Block() for _ in range(2))
    for expert in experts:
        fully_shard(expert, ctx)
    model = fully_shard(NetworkChoice(experts, dist.get_rank()), ctx)
    x = torch.ones(2, WIDTH)
    if in_forward_only:
        with torch.no_grad():
            model(x)
        model.chosen = 0
    model(x).sum().backward()


class NetworkChoice(nn.Module):
    def __init__(self, experts: nn.ModuleList, chosen: int) -> None:
        super().__init__()
        self.experts = experts
        self.chosen = chosen
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[self.chosen](x + self.bias)


@pytest.mark.parametrize("in_forward_only", [False, True])
def test_ranks_that_run_different_units_get_an_error_that_names_them(in_forward_only: bool) -> None:
    messages = expect_rank_errors(
        different_units, 2, in_forward_only, match="ranks ran different units"
    )
    # Both ranks gather both experts, of which one is ahead of a use that does not come.
    kind = "all_gather" if in_forward_only else "reduce_scatter"
    for message in messages:
        assert f"rank 0: {kind} of unit 'experts.0'" in message
        assert f"rank 1: {kind} of unit 'experts.1'" in message


def edit_between() -> None:
    twins = Twins.of("layers")
    loss, _ = twins.losses(*next(twins.batches(1)))
    with torch.no_grad():
        twins.model.layers[1].up.weight.add_(1)
    loss.backward()


def test_editing_weights_between_forward_and_backward_is_an_error() -> None:
    expect_rank_errors(edit_between, 2, match="unit 'layers.1' were modified between its forward")


def delete_model(when: str) -> None:
    gc.disable()
    try:
        ctx = FsdpContext()
        model = Model()
        shard_layers(model, ctx)
        storages = [
            weakref.ref(param_group) for unit in ctx.units for param_group in unit.param_groups
        ]
        modules = [weakref.ref(module) for module in model.modules()]
        tokens = torch.zeros(2, 3, dtype=torch.int64)
        loss = model(tokens).sum()
        if when != "after forward":
            loss.backward()
        if when == "after evaluation":
            with torch.no_grad():
                model(tokens)
        parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        del model
        if when == "after forward":
            del loss
        assert all(reference() is None for reference in modules)
        assert all(reference() is None for reference in storages)
        assert all(reference() is None for reference in parameters)
        assert ctx.units == []
    finally:
        gc.enable()


@pytest.mark.parametrize("when", ["after forward", "after backward", "after evaluation"])
def test_a_deleted_model_is_freed_without_the_collector(when: str) -> None:
    run_ranks(delete_model, 1, when)
    run_ranks(delete_model, 2, when)


def memory_at_rest() -> None:
    twins = Twins.of("layers")
    tokens, targets = next(twins.batches(1))
    twins.model.set_reshard_after_forward(True)
    loss, _ = twins.losses(tokens, targets)
    twins.check_rest()
    loss.backward()
    twins.check_rest()
    with torch.no_grad():
        twins.losses(tokens, targets)
    twins.check_rest()


def test_nothing_is_left_unsharded_after_forward_and_backward() -> None:
    run_ranks(memory_at_rest, 2)


def parameters_are_always_sharded() -> None:
    """Outside its forward and backward a module shows its sharded parameters, also while its full
    buffer is kept: what reads model.parameters() then never misses one."""
    model = Model()
    shard_layers(model, FsdpContext())
    expected = list(model.parameters())
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))
    loss = model(torch.zeros(1, 1, dtype=torch.int64)).sum()
    assert all(a is b for a, b in zip(model.parameters(), expected, strict=True))
    loss.backward()
    assert all(a is b for a, b in zip(model.parameters(), expected, strict=True))
    assert all(isinstance(parameter, RaggedDTensor) for parameter in expected)


def test_parameters_are_sharded_whenever_the_user_can_look() -> None:
    run_ranks(parameters_are_always_sharded, 2)


def train_after_inference() -> None:
    """Gradients are thought of where the first forward runs, and what is made in inference mode
    refuses to be edited: also the gradient of what a rank holds nothing of."""
    twins = Twins.of("layers")
    first, second = twins.batches(2)
    with torch.inference_mode():
        twins.model(twins.mine(first[0]))
    assert any(parameter.to_local().numel() == 0 for parameter in twins.model.parameters())
    twins.backward(*first)
    twins.backward(*second)
    for model in (twins.model, twins.twin):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    twins.check_gradients()


def test_training_may_begin_with_an_evaluation_in_inference_mode() -> None:
    run_ranks(train_after_inference, 4)


class Waited:
    """A work that was waited for or not, and fails or does not."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.waited = False

    def wait(self) -> bool:
        self.waited = True
        if self.fails:
            raise RuntimeError("peer gone")
        return True


def test_all_of_a_failed_collective_is_over_before_its_memory_goes() -> None:
    works: list[Any] = [Waited(fails=True), Waited(fails=False)]
    work = HostWorkHandle(
        "all_gather", "layers.0", PendingCollective(works, lambda: torch.zeros(1)), None
    )
    for _ in range(2):  # nobody takes what failed for done
        with pytest.raises(RuntimeError, match=r"all_gather of unit 'layers.0' failed.*peer gone"):
            work.wait()
    assert all(work.waited for work in works)


def replace_gradient() -> None:
    twins = Twins.of("root only")
    twins.backward(*next(twins.batches(1)))
    weight = twins.model.head.weight
    weight.grad = torch.zeros(weight.shape).double()


def test_a_plain_tensor_as_gradient_is_an_error() -> None:
    expect_rank_errors(
        replace_gradient, 1, match="must be of the same kind, shape and layout or None, got"
    )
