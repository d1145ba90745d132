"""Ways of training: accumulation, evaluation, optimizers, precision. All as without sharding."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, RaggedDTensor, fully_shard
from support.ranks import run_ranks
from support.twins import Twins, loss_of, same
from support.zoo import WIDTH, Model, shard_layers

MODELS = ["layers", "nested units", "unused on some ranks", "tied parameters", "branches"]


def accumulate(name: str, sync_each: bool) -> None:
    twins = Twins.of(name)
    for _ in range(2):
        microbatches = list(twins.batches(3))
        for index, batch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            twins.model.set_requires_gradient_sync(sync_each or is_last)
            reduced = twins.ctx.stats.reduce_scatters
            twins.backward(*batch)
            if not (sync_each or is_last):
                assert twins.ctx.stats.reduce_scatters == reduced
        twins.check_gradients()
        twins.check_rest()
        twins.step()
        twins.check_parameters()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("sync_each", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_accumulate(world_size: int, name: str, sync_each: bool) -> None:
    run_ranks(accumulate, world_size, name, sync_each)


def absent_from_last_microbatch() -> None:
    """A unit that ran only in a microbatch without synchronization is reduced with the others."""
    twins = Twins.of("dynamic order")
    batches = list(twins.batches(3))
    for model in (twins.model, twins.twin):
        model.iteration = 1  # all layers, then 0 and 2 only
    twins.model.set_requires_gradient_sync(False)
    twins.backward(*batches[0])
    twins.model.set_requires_gradient_sync(True)
    twins.backward(*batches[1])
    twins.check_gradients()
    twins.check_rest()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_absent_from_the_last_microbatch_is_reduced(world_size: int) -> None:
    run_ranks(absent_from_last_microbatch, world_size)


def frozen_between_microbatches() -> None:
    """What a unit has gathered up is not lost, and reduced once, if all of it is frozen then."""
    twins = Twins.of("layers")
    batches = list(twins.batches(3))
    twins.model.set_requires_gradient_sync(False)
    twins.backward(*batches[0])
    for model in (twins.model, twins.twin):
        model.layers[1].requires_grad_(False)
    twins.model.set_requires_gradient_sync(True)
    twins.backward(*batches[1])
    twins.check_gradients()
    twins.check_rest()
    twins.step()
    twins.ctx.stats.reset()
    twins.backward(*batches[2])
    assert twins.ctx.stats.reduce_scatters == 3  # of four units
    twins.check_gradients()


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_of_a_unit_that_is_frozen_before_they_are_reduced(world_size: int) -> None:
    run_ranks(frozen_between_microbatches, world_size)


def several_forwards(name: str, how: str) -> None:
    twins = Twins.of(name)
    for _ in range(3):
        first, second = (twins.losses(*batch) for batch in twins.batches(2))
        if how == "summed":
            (first[0] + 2 * second[0]).backward()
            (first[1] + 2 * second[1]).backward()
        else:
            for loss, twin_loss in (first, second) if how == "in order" else (second, first):
                loss.backward()
                twin_loss.backward()
        twins.check_gradients()
        twins.check_rest()
        twins.step()
        twins.check_parameters()


@pytest.mark.pairs
@pytest.mark.parametrize("how", ["summed", "in order", "in reverse"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_several_forwards_before_backward(world_size: int, name: str, how: str) -> None:
    run_ranks(several_forwards, world_size, name, how)


def evaluate_between(name: str, reshard: bool | None, where: str) -> None:
    """FSDP2 goes on with old weights where an evaluation leaves a unit whole before the step."""
    twins = Twins.of(name)
    if reshard is not None:
        twins.model.set_reshard_after_forward(reshard)

    def evaluate(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.no_grad():
            twins.check_loss(*twins.losses(tokens, targets))

    for batch in twins.batches(4):
        if where == "before forward":
            evaluate(*batch)
        losses = twins.losses(*batch)
        if where == "before backward":
            evaluate(*batch)
        losses[0].backward()
        losses[1].backward()
        if where == "before step":
            evaluate(*batch)
        twins.check_gradients()
        twins.step()
        if where == "after step":
            evaluate(*batch)
        twins.check_parameters()


@pytest.mark.pairs
@pytest.mark.parametrize(
    "where", ["before forward", "before backward", "before step", "after step"]
)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_never_makes_weights_stale(
    world_size: int, reshard: bool | None, where: str
) -> None:
    run_ranks(evaluate_between, world_size, "layers", reshard, where)


def reshard_modes(reshard: bool | None) -> None:
    twins = Twins.of("layers")
    for module in twins.model.modules():
        if hasattr(module, "set_reshard_after_forward") and reshard is not None:
            module.set_reshard_after_forward(reshard, recurse=False)
    for step, (tokens, targets) in enumerate(twins.batches(3), 1):
        loss, twin_loss = twins.losses(tokens, targets)
        # By default the root and the layer that ran last, which backward needs first.
        kept = {True: 0, None: 2, False: 4}[reshard]
        assert twins.ctx.stats.current_full_buffers == kept
        loss.backward()
        twin_loss.backward()
        twins.check_loss(loss, twin_loss)
        twins.check_rest()
        twins.check_gradients(whole=step == 3)
        twins.step()
        twins.check_parameters(whole=step == 3)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reshard_after_forward_keeps_what_it_says(world_size: int, reshard: bool | None) -> None:
    run_ranks(reshard_modes, world_size, reshard)


def kept_after_backward() -> None:
    twins = Twins.of("layers")
    twins.model.set_reshard_after_forward(False)
    twins.model.set_reshard_after_backward(False)
    for step, batch in enumerate(twins.batches(4)):
        twins.ctx.stats.reset()
        twins.backward(*batch)
        assert twins.ctx.stats.current_full_buffers == 4
        # The optimizer changed the shards, so each is gathered once more, and only in forward.
        assert twins.ctx.stats.all_gathers == 4
        if step == 1:  # without an edit nothing is gathered
            with torch.no_grad():
                twins.check_loss(*twins.losses(*batch))
            assert twins.ctx.stats.all_gathers == 4
        twins.check_gradients()
        twins.step()
        twins.check_parameters()


def test_buffers_kept_across_steps_are_refreshed() -> None:
    run_ranks(kept_after_backward, 2)


def edit_weights(reshard: bool, how: str) -> None:
    twins = Twins.of("layers")
    twins.model.set_reshard_after_forward(reshard)
    batch = next(twins.batches(1))
    with torch.no_grad():
        twins.check_loss(*twins.losses(*batch))
        for (_, parameter), twin in twins.pairs():
            if how == "mul_":
                parameter.mul_(1.5)
                twin.mul_(1.5)
            elif how == "data":
                parameter.data.add_(0.25)
                twin.data.add_(0.25)
            elif how == "to_local":
                parameter.to_local().add_(0.25)
                twin.add_(0.25)
            elif how == "copy_":
                value = torch.linspace(0, 1, twin.numel()).double().view(twin.shape)
                parameter.copy_(value)
                twin.copy_(value)
            elif how == "foreach":
                torch._foreach_mul_([parameter], 0.5)
                twin.mul_(0.5)
    if how == "load_state_dict":
        state = {name: value * 0.3 for name, value in twins.twin.state_dict().items()}
        twins.model.load_state_dict(state)
        twins.twin.load_state_dict(state)
    twins.backward(*batch)
    twins.check_gradients()
    twins.step()
    twins.check_parameters()


@pytest.mark.parametrize("how", ["mul_", "data", "to_local", "copy_", "foreach", "load_state_dict"])
@pytest.mark.parametrize("reshard", [True, False])
def test_weight_edits_reach_the_next_forward(how: str, reshard: bool) -> None:
    run_ranks(edit_weights, 2, reshard, how)


def bfloat16_compute() -> None:
    """bf16 forward and backward, fp32 shards, fp32 reduction, against the same done by hand."""
    torch.manual_seed(7)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model()
    twin = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    ctx = FsdpContext()
    for layer in model.layers:
        fully_shard(layer, ctx, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model, ctx, mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, twin)]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        tokens, targets = torch.randint(13, (2, world * 2, 5), generator=generator)
        scores = model(tokens[rank * 2 : rank * 2 + 2])
        assert scores.dtype is torch.float32
        loss_of(scores, targets[rank * 2 : rank * 2 + 2]).backward()
        sums = [torch.zeros_like(parameter) for parameter in twin.parameters()]
        for rows, wanted in zip(tokens.split(2), targets.split(2), strict=True):
            low = copy.deepcopy(twin).bfloat16()
            loss_of(low(rows).float(), wanted).backward()
            for total, parameter in zip(sums, low.parameters(), strict=True):
                total += parameter.grad.float()
        for parameter, total in zip(twin.parameters(), sums, strict=True):
            parameter.grad = total / world
        for (name, parameter), expected in zip(
            model.named_parameters(), twin.parameters(), strict=True
        ):
            assert parameter.dtype is torch.float32
            assert parameter.grad.dtype is torch.float32
            # Exactly: the reduction adds in rank order, as above.
            assert torch.equal(parameter.grad.full_tensor(), expected.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bfloat16_compute_with_fp32_shards_is_exact(world_size: int) -> None:
    run_ranks(bfloat16_compute, world_size)


class SeesDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        self.seen = (x.dtype, extra["x"][0].dtype, extra["index"].dtype, self.linear.weight.dtype)
        return self.linear(x)


def input_casting(cast: bool) -> None:
    module = SeesDtype()
    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=cast)
    fully_shard(module, FsdpContext(), mp_policy=policy)
    x = torch.ones(2, WIDTH, dtype=torch.float32 if cast else torch.bfloat16)
    module(x, extra={"x": (torch.ones(1),), "index": torch.tensor(1)})
    inner = torch.bfloat16 if cast else torch.float32
    assert module.seen == (torch.bfloat16, inner, torch.int64, torch.bfloat16)


@pytest.mark.parametrize("cast", [True, False])
def test_inputs_are_cast_where_the_policy_says(cast: bool) -> None:
    run_ranks(input_casting, 1, cast)


def ignored_parameters() -> None:
    torch.manual_seed(7)
    model = Model().double()
    kept = model.layers[1].up.weight
    ctx = FsdpContext()
    for layer in model.layers:
        fully_shard(layer, ctx, ignored_params={kept})
    fully_shard(model, ctx, ignored_params={kept})
    assert model.layers[1].up.weight is kept
    assert not isinstance(kept, RaggedDTensor)
    loss_of(
        model(torch.ones(2, 5, dtype=torch.int64)), torch.ones(2, 5, dtype=torch.int64)
    ).backward()
    assert kept.grad is not None
    assert all(
        isinstance(parameter.grad, RaggedDTensor)
        for parameter in model.parameters()
        if parameter is not kept
    )


def test_ignored_parameters_are_left_alone() -> None:
    run_ranks(ignored_parameters, 2)


def freeze_later() -> None:
    twins = Twins.of("layers")
    for step, batch in enumerate(twins.batches(6)):
        for model in (twins.model, twins.twin):
            model.layers[0].requires_grad_(step < 2 or step > 4)
            model.layers[1].up.weight.requires_grad_(step % 2 == 0)
        twins.backward(*batch)
        twins.check_gradients()
        twins.step()
        twins.check_parameters()


def test_parameters_can_be_frozen_and_unfrozen_later() -> None:
    run_ranks(freeze_later, 2)


def explicit_unshard() -> None:
    twins = Twins.of("layers")
    layer, twin = twins.model.layers[0], twins.twin.layers[0]
    handle = layer.unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert type(layer.up.weight) is nn.Parameter
    assert torch.equal(layer.up.weight, twin.up.weight)
    # Outside any forward: its gradient is reduced all the same.
    layer.up.weight.square().sum().backward()
    twin.up.weight.square().sum().backward()
    layer.reshard()
    assert isinstance(layer.up.weight, RaggedDTensor)
    twins.check_gradients()
    twins.check_rest()
    twins.train(2)


def test_explicit_unshard_and_reshard() -> None:
    run_ranks(explicit_unshard, 2)


def kept_gradient() -> None:
    """A gradient that somebody holds on to is not written over by the next backward."""
    twins = Twins.of("layers")
    held = []
    for batch in twins.batches(3):
        twins.backward(*batch)
        weight = twins.model.layers[0].up.weight
        held.append((weight.grad, weight.grad.full_tensor(), weight.grad.to_local().clone()))
        twins.step()
    for gradient, full, local in held:
        assert torch.equal(gradient.full_tensor(), full)
        assert torch.equal(gradient.to_local(), local)


def test_a_gradient_held_by_the_user_stays() -> None:
    run_ranks(kept_gradient, 2)


def dropped_gradient_memory() -> None:
    twins = Twins.of("layers")
    twins.backward(*next(twins.batches(1)))
    held = [parameter.grad.to_local() for parameter in twins.model.parameters()]
    # Of what this rank holds nothing of, there is no memory to free.
    locals_ = [weakref.ref(local) for local in held if local.numel()]
    del held
    assert all(local() is not None for local in locals_)
    twins.optimizer.zero_grad()
    assert all(local() is None for local in locals_)


def test_zero_grad_frees_the_gradients() -> None:
    run_ranks(dropped_gradient_memory, 2)


def retained_graph() -> None:
    twins = Twins.of("layers")
    batch = next(twins.batches(1))
    losses = twins.losses(*batch)
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    twins.check_gradients()
    twins.check_rest()
    twins.train(2)


def test_backward_twice_through_a_retained_graph() -> None:
    run_ranks(retained_graph, 2)


def large_gradients(prefetch: int) -> None:
    """Gradients of 1 MiB and more leave autograd's hands one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=index % 2 == 0) for index in range(5)))
    twin = copy.deepcopy(model)
    ctx = FsdpContext(prefetch=prefetch)
    fully_shard(model[1], ctx)
    fully_shard(model[3], ctx)
    fully_shard(model, ctx)
    x = torch.randn(4, 512)
    for _ in range(2):
        model(x).square().sum().backward()
        twin(x).square().sum().backward()
        for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter.grad.full_tensor(), expected.grad)
        assert ctx.stats.peak_reduce_inputs == 1 + prefetch
        assert ctx.stats.current_reduce_inputs == 0


@pytest.mark.parametrize("prefetch", [0, 1])
def test_large_gradients_leave_early_with_few_reduce_inputs(prefetch: int) -> None:
    run_ranks(large_gradients, 2, prefetch)


def blocks_without_a_root() -> None:
    """An unsharded root around units that share a context."""
    torch.manual_seed(7)
    model = Model().double()
    twin = copy.deepcopy(model)
    ctx = FsdpContext()
    for layer in model.layers:
        fully_shard(layer, ctx)
    tokens = torch.arange(10).view(2, 5)
    for _ in range(3):
        loss_of(model(tokens), tokens).backward()
        loss_of(twin(tokens), tokens).backward()
        assert ctx.stats.current_full_buffers == 0
        for parameter, expected in zip(
            model.layers.parameters(), twin.layers.parameters(), strict=True
        ):
            same(parameter.grad.full_tensor(), expected.grad, "gradient")
    assert ctx.stats.prefetch_hits > ctx.stats.prefetch_misses


def test_units_under_an_unsharded_root() -> None:
    run_ranks(blocks_without_a_root, 2)


def one_layer_alone() -> None:
    """A unit other than the root is run by itself, between runs of the whole model."""
    twins = Twins.of("layers")
    x = torch.randn(3, WIDTH).double()
    for batch in twins.batches(3):
        outputs = [model.layers[1](x) for model in (twins.model, twins.twin)]
        same(outputs[0], outputs[1], "output")
        twins.backward(*batch)
        for output in outputs:
            output.sum().backward()
        twins.check_gradients()
        twins.check_rest()
        twins.step()
        twins.check_parameters()


def test_a_unit_can_run_by_itself() -> None:
    run_ranks(one_layer_alone, 2)


def sharded_defaults() -> None:
    model = Model()
    shard_layers(model, FsdpContext())
    names = dict(model.named_parameters())
    assert list(names) == list(dict(Model().named_parameters()))
    assert list(model.state_dict()) == list(Model().state_dict())
    assert type(model).__name__ == "FSDPModel"
    assert type(model).__module__ == Model.__module__
    assert isinstance(model, Model)


def test_names_stay_as_they_were() -> None:
    run_ranks(sharded_defaults, 2)


def child_before_root() -> None:
    """A unit that ran by itself before it met its root, with its backward still to come."""
    twins = Twins.of("without a context")
    x = torch.randn(3, WIDTH).double()
    early = [model.layers[1](x) for model in (twins.model, twins.twin)]
    first, second = twins.batches(2)
    twins.backward(*first)
    for output in early:
        output.sum().backward()
    twins.check_gradients()
    contexts = {module._fsdp_unit.context for module in (twins.model, *twins.model.layers)}
    assert len(contexts) == 2
    twins.backward(*second)
    twins.check_gradients()
    contexts = {module._fsdp_unit.context for module in (twins.model, *twins.model.layers)}
    assert len(contexts) == 1


def test_a_unit_joins_its_root_once_its_own_backward_is_done() -> None:
    run_ranks(child_before_root, 2)
