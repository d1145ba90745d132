"""A list of modules as one unit: whole from the first that runs to the last, or to the end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, FsdpModule, RaggedDTensor, fully_shard
from support.fake_group import run_on_fake_group
from support.module_lists import Normed, shard_ends, shard_last_two
from support.ranks import run_ranks
from support.recorded import GATHER, REDUCE, Entry, RecordingCommStream
from support.twins import LENGTH, Twins, loss_of, same
from support.zoo import ROWS, VOCABULARY, Block


class TiedEnds(Normed):
    """Its first and last module share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class CheckpointedNormed(Normed):
    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)


def shard_ends_without_context(model: Normed, _: FsdpContext) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.embedding, model.head])
    fully_shard(model)


def shard_ends_without_root(model: Normed, ctx: FsdpContext) -> None:
    fully_shard([model.embedding, model.norm, model.head], ctx)
    for layer in model.layers:
        fully_shard(layer, ctx)


CASES = {
    "last two": (Normed, shard_last_two),
    "ends": (Normed, shard_ends),
    "ends that share their weight": (TiedEnds, shard_ends),
    "checkpointed between": (CheckpointedNormed, shard_ends),
}


def train(name: str, prefetch: int) -> None:
    Twins(*CASES[name], prefetch=prefetch).train(3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("world_size", "prefetch"), [(2, 0), (3, 1)])
def test_lists_train_like_the_twin(world_size: int, name: str, prefetch: int) -> None:
    run_ranks(train, world_size, name, prefetch)


def without_root() -> None:
    twins = Twins(Normed, shard_ends_without_root)
    for batch in twins.batches(3):
        twins.backward(*batch)
        twins.check_gradients()
        twins.step()
        twins.check_parameters()


def test_a_list_needs_no_root() -> None:
    run_ranks(without_root, 2)


def without_context() -> None:
    twins = Twins(Normed, shard_ends_without_context)
    for batch in twins.batches(2):
        twins.backward(*batch)
        twins.check_gradients()
        twins.step()
    unit = twins.model.head._fsdp_unit
    assert unit is twins.model.embedding._fsdp_unit
    assert unit.context is twins.model._fsdp_unit.context
    assert unit.name == "embedding, head"


def test_a_list_joins_the_context_of_its_root() -> None:
    run_ranks(without_context, 2)


class Recorded(Twins):
    def __init__(self, *case: Any, **options: Any) -> None:
        super().__init__(*case, **options)
        self.log: list[Entry] = []
        self.ctx.comm_stream_factory = lambda name, device: RecordingCommStream(name, self.log)

    def count(self, action: str, label: str, comm_stream: str = GATHER) -> int:
        wanted = (comm_stream, action, label)
        return sum((entry.comm_stream, entry.action, entry.label) == wanted for entry in self.log)


def one_gather_each_way() -> None:
    """Though layers run between the two modules."""
    twins = Recorded(Normed, shard_ends, prefetch=1)
    batches = list(twins.batches(2))
    twins.train(1)
    twins.log.clear()
    loss, _ = twins.losses(*batches[0])
    assert twins.count("enqueue", "embedding, head") == 1
    assert twins.count("free", "embedding, head") == 0  # backward needs it first
    loss.backward()
    assert twins.count("enqueue", "embedding, head") == 1
    assert twins.count("enqueue", "embedding, head", REDUCE) == 1
    twins.check_rest()


def test_a_list_is_gathered_once_for_all_its_modules() -> None:
    run_ranks(one_gather_each_way, 2)


def freed_after_the_last() -> None:
    twins = Recorded(Normed, shard_ends)
    twins.model.set_reshard_after_forward(True)
    twins.train(1)
    held: list[bool] = []
    full = twins.model.head._fsdp_unit.param_groups[0].full
    for layer in twins.model.layers:
        layer.register_forward_hook(lambda *_: held.append(full.allocated))
    twins.losses(*next(twins.batches(1)))
    assert held == [True] * 3
    twins.check_rest()


def test_a_list_is_freed_after_its_last_module() -> None:
    run_ranks(freed_after_the_last, 2)


def names_and_state() -> None:
    model, plain = Normed(), Normed()
    plain.load_state_dict(model.state_dict())
    listed = [model.norm, model.head]
    assert fully_shard(listed, FsdpContext()) is listed
    assert isinstance(model.norm, FsdpModule)
    assert isinstance(model.head, FsdpModule)
    assert isinstance(model.head, nn.Linear)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, expected in plain.state_dict().items():
        value = state[name]
        assert isinstance(value, RaggedDTensor) == name.startswith(("norm", "head")), name
        same(value.full_tensor() if isinstance(value, RaggedDTensor) else value, expected, name)
    doubled = {name: value * 2 for name, value in state.items()}
    model.load_state_dict(doubled)
    same(model.norm.weight.full_tensor(), 2 * plain.norm.weight.detach(), "loaded")


def test_names_and_state_dicts_are_those_of_the_modules() -> None:
    run_ranks(names_and_state, 2)


def start_on_meta() -> None:
    with torch.device("meta"):
        model = TiedEnds()
    shard_ends(model, FsdpContext())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    twin = TiedEnds()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(0.25)
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY
    same(model(tokens), twin(tokens), "scores")
    model(tokens).sum().backward()


def test_a_list_starts_on_the_meta_device() -> None:
    run_ranks(start_on_meta, 2)


def apply_once() -> None:
    model = Normed()
    expected = [2 * parameter.detach() for parameter in model.parameters()]
    shard_last_two(model, FsdpContext())
    model._apply(lambda tensor: tensor * 2)
    for (name, parameter), wanted in zip(model.named_parameters(), expected, strict=True):
        same(parameter.full_tensor(), wanted, name)


def test_a_function_of_all_tensors_is_applied_once() -> None:
    run_ranks(apply_once, 2)


def copied() -> None:
    twins = Twins(TiedEnds, shard_ends)
    twins.train(1)
    duplicate = copy.deepcopy(twins.model)
    unit = duplicate.head._fsdp_unit
    assert unit is duplicate.embedding._fsdp_unit
    assert unit is not twins.model.head._fsdp_unit
    assert unit.context is duplicate._fsdp_unit.context
    assert duplicate.head.weight is duplicate.embedding.weight
    tokens, _ = next(twins.batches(1))
    same(duplicate(tokens), twins.model(tokens), "scores")
    with torch.no_grad():
        duplicate.head.weight.zero_()
    twins.check_parameters()
    head = copy.deepcopy(twins.model.head)  # alone: its unit has lost the embedding
    with pytest.raises(RuntimeError, match="of which one was deleted"):
        copy.deepcopy(head)


def test_a_list_is_copied_as_one_unit() -> None:
    run_ranks(copied, 2)


def planned_together() -> None:
    model = Normed()
    ctx = FsdpContext(validate_layouts=True)
    ctx.plan_layout([*model.layers, [model.norm, model.head], model])
    shard_last_two(model, ctx)
    model(torch.zeros(1, 1, dtype=torch.long))
    other = Normed()
    ctx = FsdpContext()
    ctx.plan_layout([[other.norm, other.head]])
    with pytest.raises(ValueError, match="planned with other parameters"):
        fully_shard(other.norm, ctx)


def test_a_list_is_planned_as_a_list() -> None:
    run_ranks(planned_together, 2)


def chunked(chunks: int, backward: str) -> None:
    """The model runs up to its norm, then the head on one chunk after the other."""
    twins = Recorded(Normed, shard_last_two)
    twins.model.chunks = twins.twin.chunks = True
    for step, (tokens, targets) in enumerate(twins.batches(3)):
        twins.log.clear()
        for model, rows in ((twins.model, [twins.rank]), (twins.twin, range(twins.world))):
            for rank in rows:
                part = slice(rank * ROWS, (rank + 1) * ROWS)
                weight = 1 if model is twins.model else 1 / twins.world
                hidden = model(tokens[part])
                end = hidden.detach().requires_grad_() if backward == "each" else hidden
                losses = []
                pairs = zip(end.chunk(chunks, 1), targets[part].chunk(chunks, 1), strict=True)
                for piece, wanted in pairs:
                    loss = weight * loss_of(model.head(piece), wanted)
                    losses.append(loss)
                    if backward == "each":
                        loss.backward()
                if backward == "each":
                    hidden.backward(end.grad)
                else:
                    sum(losses).backward()
        twins.check_gradients()
        twins.check_rest()
        if step:
            gathers = twins.count("enqueue", "head, norm")
            reductions = twins.count("enqueue", "head, norm", REDUCE)
            # Every chunk finds it whole from the model's forward: until a backward has come back to
            # that, others may read the head's weight. The norm's own backward comes last.
            assert gathers == 1, twins.log
            assert reductions == (1 if backward == "summed" else chunks + 1), twins.log
            # One for each layer and the root in forward; the root is kept for backward.
            layers = [twins.count("enqueue", f"layers.{index}") for index in range(3)]
            assert layers == [2, 2, 2], twins.log
        twins.step()
        twins.check_parameters()


@pytest.mark.parametrize("backward", ["summed", "each"])
def test_a_head_runs_alone_chunk_by_chunk(backward: str) -> None:
    run_ranks(chunked, 2, 5, backward)


def predicted_after_chunks() -> None:
    """What runs alone between passes does not make the model's order forgotten."""
    twins = Recorded(Normed, shard_last_two)
    twins.model.chunks = True
    for tokens, targets in twins.batches(4):
        twins.ctx.stats.reset()
        hidden = twins.model(twins.mine(tokens))
        misses = twins.ctx.stats.prefetch_misses
        end = hidden.detach().requires_grad_()
        for piece, wanted in zip(end.chunk(5, 1), twins.mine(targets).chunk(5, 1), strict=True):
            loss_of(twins.model.head(piece), wanted).backward()
        hidden.backward(end.grad)
    assert misses == 1  # the root's own, which begins
    assert twins.ctx.stats.prefetches_unused == 0


def test_the_order_of_a_pass_survives_what_runs_alone() -> None:
    run_ranks(predicted_after_chunks, 2)


def resharded_after_chunks() -> None:
    """As torchtitan does: the head stays whole for its chunks, and is freed before the rest of
    backward comes to the norm, which is of the same unit."""
    twins = Twins(Normed, shard_last_two)
    twins.model.chunks = twins.twin.chunks = True
    tokens, targets = next(twins.batches(1))
    for model in (twins.model, twins.twin):
        hidden = model(tokens)
        end = hidden.detach().requires_grad_()
        if model is twins.model:
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
        for piece, wanted in zip(end.chunk(5, 1), targets.chunk(5, 1), strict=True):
            loss_of(model.head(piece), wanted).backward()
        if model is twins.model:
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
        hidden.backward(end.grad)
    for (name, parameter), twin in twins.pairs():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), twin.grad, msg=name)


def test_a_head_may_be_freed_before_backward_comes_to_the_norm_beside_it() -> None:
    run_ranks(resharded_after_chunks, 2)


def evaluation() -> None:
    twins = Twins(Normed, shard_last_two)
    twins.train(1)
    twins.model.chunks = twins.twin.chunks = True
    tokens, _ = next(twins.batches(1))
    with torch.no_grad():
        gathered = twins.ctx.stats.all_gathers
        hidden = twins.model(tokens)
        twins.check_rest()
        for piece in hidden.chunk(5, 1):
            same(twins.model.head(piece), twins.twin.head(piece), "scores")
        assert twins.ctx.stats.all_gathers == gathered + 5 + 1
        twins.model.head.reshard()
        twins.check_rest()


def test_chunks_of_an_evaluation_share_a_gather() -> None:
    run_ranks(evaluation, 2)


class FailsBetween(Normed):
    fails = False

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError("planned")
        return super().run(layer, x)


def fails_between() -> None:
    twins = Twins(FailsBetween, shard_ends)
    twins.train(1)
    twins.model.fails = True
    with pytest.raises(ArithmeticError):
        twins.losses(*next(twins.batches(1)))
    twins.model.fails = False
    twins.check_rest()
    twins.train(1)


def test_a_forward_that_raises_between_leaves_nothing_behind() -> None:
    run_ranks(fails_between, 2)


def refusals() -> None:
    block = Block()
    for bad, error, match in (
        ([], ValueError, "at least one module"),
        ([block, block], ValueError, "each named once"),
        ([block, "head"], TypeError, "one with a str"),
        ([nn.ModuleList([block])], ValueError, "has no forward"),
    ):
        with pytest.raises(error, match=match):
            fully_shard(bad, FsdpContext())
    assert type(block) is Block
    inner = Block()
    fully_shard([inner, inner.up], FsdpContext())  # as in FSDP2, `up` is part of `inner`
    assert not isinstance(inner.up, FsdpModule)
    with pytest.raises(ValueError, match="is a unit already"):
        fully_shard([block, inner], FsdpContext())
    assert type(block) is Block
    assert dist.is_initialized()


def test_bad_lists_are_refused_before_anything_is_changed() -> None:
    run_on_fake_group(refusals, 2)
