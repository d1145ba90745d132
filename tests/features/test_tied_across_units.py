"""A parameter that modules of several units have: the first unit owns it, later ones read it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import (
    FsdpContext,
    PerTensor,
    fully_shard,
    patch_fsdp2,
    register_fsdp_forward_method,
)
from fsdp_overlap.layout import TensorAtomic
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import VOCABULARY, WIDTH, Block, Model, shard_layers


class Predictor(nn.Module):
    """Predicts one token more, by a block and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.block(x))
        return scores


class Tied(Model):
    """Embedding, head and the head of a predictor share one weight, and two blocks another."""

    checkpoints = ""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.predictor = Predictor()
        self.head.weight = self.predictor.head.weight = self.embedding.weight
        self.layers[1].up.weight = self.layers[0].up.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        scores: torch.Tensor = self.run(self.head, x) + self.run(self.predictor, x)
        return scores

    def run(self, layer: nn.Module, x: torch.Tensor) -> Any:
        if not self.checkpoints:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.checkpoints == "reentrant")


class TiedWithBias(Tied):
    """The head has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias = nn.Parameter(torch.ones(VOCABULARY))


Units = tuple[str, ...]
"""The units within the model, in the order of their calls. ``a+b`` is a list."""


def groupings() -> Iterator[tuple[Units, bool]]:
    """Units, and whether the model is one too."""
    ends: list[Units] = [
        (),
        ("embedding",),
        ("head",),
        ("predictor",),
        ("predictor.head",),
        ("predictor.head", "predictor"),
        ("embedding+head", "predictor"),
        ("predictor", "embedding+head"),
        ("head+predictor", "embedding"),
        ("predictor.head", "predictor", "embedding", "head"),
        *permutations(("embedding", "head")),
        *permutations(("embedding", "head", "predictor")),
    ]
    blocks: list[Units] = [(), ("layers.0",), ("layers.1", "layers.0"), ("layers.0+layers.1",)]
    for index, these in enumerate(ends):
        for those in (blocks[index % 4], blocks[(index + 1) % 4]):
            yield (*these, *those), True
    for order in (("embedding", "head", "predictor"), ("head", "predictor", "embedding")):
        yield (*order, "layers.0", "layers.1"), False
        yield ("layers.1", *order, "layers.0"), False


def shard(units: Units, has_root: bool, model: nn.Module, ctx: FsdpContext, **options: Any) -> None:
    for names in units:
        modules = [model.get_submodule(name) for name in names.split("+")]
        fully_shard(modules if len(modules) > 1 else modules[0], ctx, **options)
    if has_root:
        fully_shard(model, ctx, **options)


def all_groupings() -> int:
    count = 0
    for count, (units, has_root) in enumerate(groupings(), 1):
        twins = Twins((Tied, TiedWithBias)[count % 2], partial(shard, units, has_root))
        try:
            for batch in twins.batches(2):
                twins.backward(*batch)
                twins.check_gradients()
                twins.check_rest()
                twins.step()
            twins.check_parameters()
        except BaseException as error:
            error.add_note(f"{units}, root: {has_root}")
            raise
    return count


@pytest.mark.slow
def test_it_trains_as_without_sharding_however_modules_are_grouped() -> None:
    assert run_ranks(all_groupings, 2, timeout=300) == [40, 40]


ENDS: Units = ("embedding", "head", "predictor", "layers.1", "layers.0")
WITHIN_ROOT: Units = ("predictor.head", "layers.0")
"""The root reads what both own."""


def modes() -> None:
    """One option after the other. Stages 1 and 2 keep full buffers."""
    for units in (ENDS, WITHIN_ROOT):
        for options in (
            {"prefetch": 0},
            {"prefetch": 2},
            {"layout": PerTensor()},
            {"mesh": (2, 1)},
        ):
            Twins(TiedWithBias, partial(shard, units, True), **options).train(2)
        for after_forward in (True, False, 1, 2):
            of_units = partial(shard, units, True, reshard_after_forward=after_forward)
            twins = Twins(TiedWithBias, of_units)
            for batch in twins.batches(2):
                twins.backward(*batch)
                twins.check_gradients()
                twins.step()
        for kind in ("reentrant", "not reentrant"):
            twins = Twins(TiedWithBias, partial(shard, units, True))
            twins.model.checkpoints = twins.twin.checkpoints = kind
            twins.train(2)
        frozen = Twins(FrozenWeight, partial(shard, units, True))
        frozen.train(2)
        accumulate(Twins(TiedWithBias, partial(shard, units, True)))
        for stage in (1, 2):
            twins = Twins(TiedWithBias, partial(shard, units, True))
            twins.model.set_zero_stage(stage)
            accumulate(twins)


class FrozenWeight(TiedWithBias):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)


def accumulate(twins: Twins) -> None:
    """Over two batches a step, and evaluate after each step."""
    batches = list(twins.batches(4))
    for index, batch in enumerate(batches):
        is_last = index % 2 == 1
        if twins.model._fsdp_unit.settings.reduces_last_only:
            twins.model.set_is_last_backward(is_last)
        else:
            twins.model.set_requires_gradient_sync(is_last)
        twins.backward(*batch)
        if is_last:
            twins.check_gradients(whole=True)
            twins.step()
            twins.check_parameters(whole=True)
            with torch.no_grad():
                loss, twin_loss = twins.losses(*batch)
            twins.check_loss(loss, twin_loss)


@pytest.mark.slow
def test_it_trains_in_every_mode() -> None:
    run_ranks(modes, 2, timeout=300)


def policy(units: Units) -> list[torch.Tensor]:
    """What two steps with a policy for dtypes give. Outputs are cast as the reader wants, and not
    as the owner does."""
    torch.manual_seed(7)
    model, ctx = TiedWithBias(), FsdpContext()
    cast = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for names in units:
        modules = [model.get_submodule(each) for each in names.split("+")]
        its = replace(cast, output_dtype=torch.float32) if names == "embedding" else cast
        fully_shard(modules, ctx, mp_policy=its)
    fully_shard(model, ctx, mp_policy=replace(cast, output_dtype=torch.float32))
    of_head: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda *args: of_head.append(args[-1]))
    assert model(torch.zeros(1, 2, dtype=torch.long)).dtype is torch.float32
    assert of_head[0].dtype is torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randint(VOCABULARY, (3, 4), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


def policies() -> None:
    expected = policy(("layers.0", "layers.1", "embedding+head+predictor"))
    for found, one in zip(policy(ENDS), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-2, atol=1e-3)

    model, ctx, low = Tied(), FsdpContext(), MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(model.embedding, ctx, mp_policy=low)
    fully_shard(model.head, ctx, mp_policy=replace(low, cast_forward_inputs=False))
    with pytest.raises(RuntimeError, match="same dtype"):
        model.head(torch.ones(WIDTH))


def test_dtypes_are_those_of_the_reader_but_for_the_weight() -> None:
    run_ranks(policies, 2)


def names_and_states() -> None:
    for units in (ENDS, WITHIN_ROOT):
        twins = Twins(TiedWithBias, partial(shard, units, True))
        model, twin = twins.model, twins.twin
        for duplicates in (True, False):
            mine, its = (
                [name for name, _ in each.named_parameters(remove_duplicate=duplicates)]
                for each in (model, twin)
            )
            assert mine == its
        twins.backward(*next(twins.batches(1)))
        twins.step()
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=options)
        expected = {name: value.clone() for name, value in twin.state_dict().items()}
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value)
        # As safetensors has it: a tied weight comes once.
        once = {n: v for n, v in state.items() if n in dict(model.named_parameters())}
        set_model_state_dict(model, {n: v * 2 for n, v in state.items()}, options=options)
        twins.twin.load_state_dict({n: v * 2 for n, v in expected.items()})
        twins.check_parameters()
        set_model_state_dict(
            model, once, options=StateDictOptions(full_state_dict=True, strict=False)
        )
        twins.twin.load_state_dict(expected)
        twins.check_parameters()
        of_optimizer = get_optimizer_state_dict(model, twins.optimizer, options=options)
        assert set(of_optimizer["state"]) == {name for name, _ in twin.named_parameters()}
        set_optimizer_state_dict(model, twins.optimizer, of_optimizer, options=options)
        twins.train(1)


def test_names_and_states_are_those_of_the_unsharded_model() -> None:
    run_ranks(names_and_states, 2)


def copied_and_built_late() -> None:
    for units in (ENDS, ("head", "embedding", "layers.1"), WITHIN_ROOT):
        twins = Twins(TiedWithBias, partial(shard, units, True))
        twins.backward(*next(twins.batches(1)))
        twins.step()
        twins.model, twins.optimizer = copy.deepcopy((twins.model, twins.optimizer))
        twins.ctx = twins.model._fsdp_unit.context
        assert twins.model.head.weight is twins.model.embedding.weight
        twins.train(2)

        with torch.device("meta"):
            late = TiedWithBias().double()
        shard(units, True, late, FsdpContext())
        late.to_empty(device="cpu")
        assert late.head.weight is late.predictor.head.weight is late.embedding.weight
        late.load_state_dict(twins.model.state_dict())
        with torch.device("meta"):
            assigned = TiedWithBias().double()
        shard(units, True, assigned, FsdpContext())
        assigned.load_state_dict(twins.twin.state_dict(), assign=True)
        with torch.device("meta"):
            cast = TiedWithBias()
        shard(units, True, cast, FsdpContext())
        cast.double().to_empty(device="cpu").load_state_dict(twins.model.state_dict())
        tokens, _ = next(twins.batches(1))
        expected = twins.twin(tokens)
        for model in (late, assigned, cast):
            torch.testing.assert_close(model(tokens), expected)
            assert model.head.weight is model.embedding.weight


def test_copies_and_models_that_get_memory_late_keep_their_ties() -> None:
    run_ranks(copied_and_built_late, 2)


def verbs() -> None:
    """What a unit reads is unsharded and resharded with it, and in its other methods."""
    twins = Twins(TiedWithBias, partial(shard, ENDS, True))
    head, whole = twins.model.head, twins.twin.embedding.weight
    head.unshard()
    torch.testing.assert_close(head.weight, whole)
    head.reshard()
    assert isinstance(head.weight, DTensor)
    twins.check_rest()
    head.double_scores = MethodType(lambda self, x: 2 * nn.functional.linear(x, self.weight), head)
    register_fsdp_forward_method(head, "double_scores")
    x = torch.ones(WIDTH, dtype=torch.float64)
    head.double_scores(x).sum().backward()
    nn.functional.linear(x, 2 * whole).sum().backward()
    twins.check_gradients()
    twins.check_rest()
    # A forward that raises leaves nothing behind.
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        head(torch.ones(1, 1, dtype=torch.float64))
    assert isinstance(head.weight, DTensor)
    root = Twins(TiedWithBias, partial(shard, WITHIN_ROOT, True))
    root.model.layers[1].register_forward_hook(raises)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            root.model(torch.zeros(1, 2, dtype=torch.long))
        assert isinstance(root.model.head.weight, DTensor)
        root.check_rest()


def raises(*_: object) -> None:
    raise ArithmeticError


def test_verbs_reach_what_a_unit_reads() -> None:
    run_ranks(verbs, 2)


def as_fsdp2() -> None:
    """Without contexts, as in code that was written for FSDP2."""
    for has_root in (True, False):
        with patch_fsdp2():
            Twins(Tied, partial(shard_as_fsdp2, has_root)).train(2)


def shard_as_fsdp2(has_root: bool, model: Any, _: FsdpContext) -> None:
    for module in (model.embedding, *model.layers, model.head, model.predictor):
        torch.distributed.fsdp.fully_shard(module)
    if has_root:
        torch.distributed.fsdp.fully_shard(model)


def list_that_is_read() -> None:
    """Its last reader runs when all modules of the list have, and is the last to need it."""
    twins = Twins(Tied, partial(shard, ("embedding+head", "predictor"), True))
    twins.losses(*next(twins.batches(1)))
    assert not twins.ctx.schedule.prefetcher.in_graphs


def without_a_gradient_on_one_rank() -> None:
    """The predictor and the list that it reads have one output, so backward comes to the list's
    call first, and to the predictor's, which is open by then, again. No prefetch is lost by it."""
    units = ("embedding+head", "predictor", "layers.1", "layers.0")
    twins = Twins(Tied, partial(shard, units, True))
    for in_vain, skipping in ((1, None), (0, 0), (0, 1)):  # the first order is a guess
        tokens, _ = next(twins.batches(1))
        gathers = twins.ctx.stats.all_gathers
        total = tokens.new_zeros((), dtype=torch.float64)
        for rank, rows in enumerate(tokens.chunk(2)):
            total = total + run_some(twins.twin, rows, False, rank == skipping)
        run_some(twins.model, twins.mine(tokens), False, dist.get_rank() == skipping).backward()
        (total / 2).backward()
        assert twins.ctx.stats.all_gathers - gathers <= 9 + in_vain
        twins.check_gradients()
        twins.step()


def conditional(is_first: bool) -> None:
    """The predictor, which only some ranks run, reads the weight, or owns it if it is the first."""
    twins = Twins(Tied, partial(shard_conditional, is_first))
    batches = list(twins.batches(2))
    for index, (tokens, _) in enumerate(batches):
        skips = index == 1 and dist.get_rank() == 1
        total = tokens.new_zeros((), dtype=torch.float64)
        for rank, rows in enumerate(tokens.split(len(tokens) // 2)):
            total = total + run_some(twins.twin, rows, index == 1 and rank == 1)
        run_some(twins.model, twins.mine(tokens), skips).backward()
        (total / 2).backward()
        twins.check_gradients()
        twins.step()


def run_some(model: Any, tokens: torch.Tensor, skips: bool, ignores: bool = False) -> torch.Tensor:
    """Run the predictor, or skip it, or ignore what it gives."""
    x = model.embedding(tokens)
    scores = model.head(model.layers[1](model.layers[0](x)))
    if not skips:
        predicted = model.predictor(x)
        scores = scores if ignores else scores + predicted
    return scores.square().mean()


def shard_conditional(is_first: bool, model: Any, ctx: FsdpContext) -> None:
    if is_first:
        fully_shard(model.predictor, ctx, conditional=True)
    for module in (model.embedding, *model.layers, model.head):
        fully_shard(module, ctx)
    if not is_first:
        fully_shard(model.predictor, ctx, conditional=True)


class SharedModule(Model):
    """Two units have a module in common."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up = self.layers[0].up


def shared_module() -> None:
    Twins(SharedModule, shard_layers).train(2)
    with torch.device("meta"):
        late = SharedModule().double()
    shard_layers(late, FsdpContext())
    late.to_empty(device="cpu").load_state_dict(SharedModule().state_dict())
    assert late.layers[2].up.weight is late.layers[0].up.weight
    assert late(torch.zeros(1, 2, dtype=torch.long)).isfinite().all()


def without_a_context_and_where_ranks_differ() -> None:
    as_fsdp2()
    list_that_is_read()
    without_a_gradient_on_one_rank()
    conditional(is_first=False)
    conditional(is_first=True)
    shared_module()


def test_it_trains_without_a_context_where_ranks_differ_and_in_modules_of_two_units() -> None:
    run_ranks(without_a_context_and_where_ranks_differ, 2)


def planned() -> None:
    twins = Twins(TiedWithBias, shard_planned, layout=TensorAtomic())
    twins.train(2)


def shard_planned(model: Any, ctx: FsdpContext) -> None:
    fully_shard(model.layers[0], ctx)
    ctx.plan_layout([model.head, model.embedding, model.layers[1], model])
    for module in (model.head, model.embedding, model.layers[1], model):
        fully_shard(module, ctx)


def test_a_layout_is_planned_ahead_with_ties() -> None:
    run_ranks(planned, 2)


def refused() -> None:
    model, ctx = Tied(), FsdpContext()
    fully_shard(model.embedding, ctx)
    halves = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16)
    for options, said in (
        ({"ctx": FsdpContext()}, "which has another FsdpContext: give both the same; or make one"),
        (
            {"ctx": ctx, "mesh": halves},
            "which is sharded over .*, and this unit over .*: give both the same; ",
        ),
        ({"ctx": ctx, "mp_policy": policy}, "computes with it in torch.float32, and this unit in "),
    ):
        with pytest.raises(
            ValueError, match=rf"^parameter 'weight' of Linear is also 'weight' of the .*{said}"
        ):
            fully_shard(model.head, **options)
        assert type(model.head) is nn.Linear
    twins_of = Tied()
    fully_shard(twins_of.embedding, ctx)
    del twins_of.embedding
    with pytest.raises(
        ValueError, match="of the unit Embedding, of which a module was deleted; or make one"
    ):
        fully_shard(twins_of.head, ctx)


def test_what_one_unit_cannot_read_of_another_is_refused_before_anything_is_changed() -> None:
    run_on_fake_group(refused, 2)
