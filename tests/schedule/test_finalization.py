"""Recovery after errors, backwards that the caller ends, and verbs on late comm streams of a
GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.engine.unit import unit_of
from support.hostile_streams import RANKS, HostileCommStream
from support.module_lists import Normed, shard_ends
from support.ranks import run_ranks
from support.twins import Twins, same
from support.zoo import Model, Shard, shard_layers

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


def no_memory_left() -> None:
    raise torch.OutOfMemoryError("no memory left")


def raise_at_the_end(prefetch: int, shard: Shard) -> None:
    """The last reduce input gets no memory, while nothing is in flight."""
    twins = Twins(Model, shard, prefetch=prefetch)
    twins.train(1)
    buffer = unit_of(twins.model).gradients[0].reduce_scatter_input
    batch = next(twins.batches(1))
    with patch.object(buffer, "allocate", no_memory_left), pytest.raises(torch.OutOfMemoryError):
        twins.losses(*batch)[0].backward()
    refuse_to_go_on(twins, batch)
    twins.train(2)
    twins.check_rest()


def refuse_to_go_on(twins: Twins, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Gradients of the backward that raised are left, which ``zero_grad()`` does not see."""
    twins.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"last backward did not finish.*ctx\.reset\(\)"):
        twins.losses(*batch)
    twins.model.reset_iter_state()
    twins.optimizer.zero_grad()


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("shard", [shard_layers, fully_shard])
def test_an_error_at_the_end_of_backward_is_not_forgotten(prefetch: int, shard: Shard) -> None:
    run_ranks(raise_at_the_end, 2, prefetch, shard)


def a_hook_that_raises(parameter: nn.Parameter, raises_at: str) -> Callable[[], None]:
    """Have ``parameter`` raise as it gets its gradient. Return what removes the hook."""

    def hook(_: torch.Tensor) -> None:
        raise ArithmeticError(raises_at)

    return parameter.register_post_accumulate_grad_hook(hook).remove


def raise_in_wait(index: int) -> None:
    twins = Twins(Model, shard_layers)
    twins.model.set_manual_backward_finalization(True)
    batch = next(twins.batches(1))
    for _ in range(2):
        twins.losses(*batch)[0].backward()
        twins.model.set_requires_gradient_sync(True)
        remove = a_hook_that_raises([*twins.model.parameters()][index], "the hook")
        with pytest.raises(ArithmeticError, match="the hook"):
            twins.model.finalize_backward(async_op=True).wait()
        remove()
        for verb in (twins.model.finalize_backward, twins.ctx.schedule.complete_gradients):
            with pytest.raises(RuntimeError, match="last backward did not finish"):
                verb()
        refuse_to_go_on(twins, batch)
        twins.model.set_requires_gradient_sync(True)
    for batch in twins.batches(2):
        twins.backward(*batch)
        twins.model.finalize_backward()
        twins.check_gradients()
        twins.step()
    twins.check_rest()


@pytest.mark.parametrize("index", [0, -1])
def test_a_wait_that_raised_is_not_over(index: int) -> None:
    """The hook of the first parameter raises where reductions are waited for."""
    run_ranks(raise_in_wait, 2, index)


def finalize_within_except() -> None:
    twins = Twins(Model, shard_layers)
    twins.model.set_manual_backward_finalization(True)
    for batch in twins.batches(2):
        try:
            raise ArithmeticError("the caller's, which has nothing to do with backward")
        except ArithmeticError:
            twins.backward(*batch)
        twins.model.finalize_backward()
        twins.check_gradients()
        twins.step()


def test_an_error_that_the_caller_handles_is_not_of_backward() -> None:
    run_ranks(finalize_within_except, 2)


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


def copied() -> None:
    twins = Twins(Model, shard_layers)
    twins.model.set_manual_backward_finalization(True)
    twins.model = copy.deepcopy(twins.model)
    twins.backward(*next(twins.batches(1)))
    twins.model.finalize_backward()
    twins.check_gradients()


def test_a_copy_is_finalized_by_hand_too() -> None:
    run_ranks(copied, 2)


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


# On a GPU, where comm streams are late with all they do


def on_hostile_streams(how: str) -> None:
    build, shard = (Normed, shard_ends) if how == "list" else (Model, shard_layers)
    twins = Twins(build, shard, device="cuda")
    twins.ctx.comm_stream_factory = lambda comm_stream, device: HostileCommStream(device)
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
@pytest.mark.two_ranks
@pytest.mark.parametrize("how", ["list", "prefetch", "storage", "finalization", "event"])
def test_the_verbs_on_late_lanes(how: str) -> None:
    run_ranks(on_hostile_streams, RANKS, how, backend="nccl")
