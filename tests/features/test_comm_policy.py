"""``QuantizedCommPolicy``: what travels takes 8 bits, and nothing else does."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fsdp_overlap import (
    BlockAtomic,
    Flat,
    FsdpContext,
    PerTensor,
    QuantizedCommPolicy,
    TensorAtomic,
    fully_shard,
)
from fsdp_overlap.features.quantized.collectives import QuantizedFormat, QuantizedRangesGather
from fsdp_overlap.features.quantized.plan import Block
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import LayoutRule, ParamGroupPlan, ParamSpec, Plan, plan_units
from support.fake_group import run_on_fake_group
from support.one_process import OneProcessCollectives
from support.quantized import LARGEST, as_gathered, quantize_twin
from support.ranks import RankError, run_ranks
from support.twins import COPIES, NAMES, Twins
from support.zoo import VOCABULARY, Model, shard_layers

DTYPES = [*LARGEST]
KEPT = ("embedding.weight",)
FP8 = QuantizedCommPolicy(torch.float8_e4m3fn)


# Exact against a plain program


def gathered(
    wholes: list[torch.Tensor],
    plan: ParamGroupPlan,
    policy: QuantizedCommPolicy,
    dtype: torch.dtype,
) -> list[list[torch.Tensor]]:
    """What each rank sees of each parameter."""
    flat = torch.full([plan.numel], math.nan, dtype=wholes[0].dtype)
    for whole, offset in zip(wholes, plan.offsets, strict=True):
        flat[offset : offset + whole.numel()] = whole.flatten()
    collectives = OneProcessCollectives()
    codes = policy.gather_dtype
    wire, scale_dtype = policy.wire(plan, dtype, codes), policy.scale_dtype(dtype, codes)
    issued = []
    for rank, shard in enumerate(flat.split(plan.shard_numels)):
        travels = QuantizedFormat(wire, wire.segment(rank), policy.gather_dtype, scale_dtype)
        gather = QuantizedRangesGather(travels, collectives)
        group = cast(dist.ProcessGroup, SimpleNamespace(rank=lambda rank=rank: rank))
        full = torch.full([plan.numel], math.nan, dtype=dtype)
        issued.append(gather.all_gather(full, shard, group))
    fulls = [each.finish() for each in issued]
    return [
        [
            full[offset : offset + spec.numel].view(spec.shape)
            for spec, offset in zip(plan.specs, plan.offsets, strict=True)
        ]
        for full in fulls
    ]


shapes = st.tuples(st.integers(0, 9), st.integers(0, 3).map(lambda n: 8 * n)) | st.lists(
    st.integers(0, 6), max_size=3
).map(lambda sizes: (*sizes, 8)[-3:])


@given(
    some=st.lists(shapes, min_size=1, max_size=4),
    ranks=st.integers(1, 7),
    layout=st.sampled_from(
        [Flat(), BlockAtomic(2), TensorAtomic(), TensorAtomic(max_padding=math.inf)]
    ),
    policy=st.builds(
        QuantizedCommPolicy,
        st.sampled_from(DTYPES),
        st.none(),
        st.sampled_from([(1, None), (1, 8), (1, 4), (2, None), (3, 4), (100, 8)]),
        st.booleans(),
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 99),
)
def test_values_are_those_of_a_plain_program(
    some: list[tuple[int, ...]],
    ranks: int,
    layout: LayoutRule,
    policy: QuantizedCommPolicy,
    dtype: torch.dtype,
    seed: int,
) -> None:
    specs = [ParamSpec(f"p{n}", shape, torch.float32) for n, shape in enumerate(some)]
    specs = [replace(spec, block=policy.block_numel(spec)) for spec in specs]
    [plan] = plan_units([specs], ranks, layout)
    assume(policy.applies_to(plan))
    generator = torch.Generator().manual_seed(seed)
    wholes = [
        torch.randn(spec.shape, generator=generator) * 10.0 ** (index * 2 - 3)
        for index, spec in enumerate(plan.specs)
    ]
    for found in gathered(wholes, cast(ParamGroupPlan, plan), policy, dtype):
        for whole, values in zip(wholes, found, strict=True):
            assert torch.equal(values, as_gathered(whole, policy, dtype))


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_extreme_numbers(
    code: torch.dtype, powers_of_two: bool, dtype: torch.dtype
) -> None:
    policy = QuantizedCommPolicy(code, powers_of_two=powers_of_two)
    whole = torch.tensor(
        [[0.0] * 8, [1e-45] * 8, [3e38, *[1.0] * 7], [math.inf, *[1.0] * 7], [math.nan] + [0.0] * 7]
    )
    [plan] = plan_units([[ParamSpec("p", (5, 8), torch.float32)]], 1, Flat())
    [[found]] = gathered([whole], cast(ParamGroupPlan, plan), policy, dtype)
    assert torch.equal(found[:3], as_gathered(whole[:3], policy, dtype))
    assert found[:3].isfinite().all()
    assert found[0].eq(0).all()
    assert found[3:].isnan().all()


# Training


def train(
    policy: QuantizedCommPolicy, options: dict[str, Any], unit_options: dict[str, Any]
) -> None:
    shard = partial(shard_layers, comm_policy=policy, **unit_options)
    twins = quantize_twin(Twins(Model, shard, **options), policy)
    twins.train(3)
    sent = twins.ctx.stats.all_gather_bytes
    plain = Twins(Model, partial(shard_layers, **unit_options), **options)
    plain.train(3)
    assert sent < 0.8 * plain.ctx.stats.all_gather_bytes  # most of it is padding in such a model


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("ranks", "policy", "options", "unit_options"),
    [
        (1, FP8, {}, {}),
        (2, FP8, {}, {}),
        (3, QuantizedCommPolicy(torch.int8), {"layout": BlockAtomic(2)}, {}),
        (
            2,
            replace(FP8, block=(1, 2), powers_of_two=True),
            {},
            {"reshard_after_forward": False},
        ),
        (
            4,
            QuantizedCommPolicy(torch.float8_e5m2, block=(2, None)),
            {},
            {"reshard_after_forward": 2},
        ),
        (
            3,
            replace(FP8, block=(None, None), keep=("embedding.weight",)),
            {"layout": TensorAtomic()},
            {},
        ),
        (4, FP8, {**COPIES}, {}),
        (1, FP8, {"layout": PerTensor()}, {}),
        (2, QuantizedCommPolicy(torch.int8, block=(1, 3)), {"layout": PerTensor()}, {}),
        (3, replace(FP8, powers_of_two=True), {"layout": PerTensor()}, {}),
        (4, FP8, {"layout": PerTensor(), **COPIES}, {}),
        (4, FP8, {**COPIES, "shard_optimizer_over_replicas": True}, {}),
    ],
)
def test_training_equals_that_of_quantized_weights(
    ranks: int, policy: QuantizedCommPolicy, options: dict[str, Any], unit_options: dict[str, Any]
) -> None:
    run_ranks(train, ranks, policy, options, unit_options)


# Reductions


def ranges_of(plan: Plan, spec: ParamSpec) -> list[tuple[int, int, int]]:
    """Which ranks hold which elements of a parameter."""
    if not isinstance(plan, RowsPlan):
        return plan.ranges(spec.fqn)
    size = math.prod(spec.shape[1:])
    rows = [plan.held(spec, rank) for rank in range(plan.world_size)]
    return [(rank, first * size, last * size) for rank, (first, last) in enumerate(rows)]


def as_sent(whole: torch.Tensor, policy: QuantizedCommPolicy) -> torch.Tensor:
    """What another rank gets of a gradient."""
    if policy.reduce_dtype == torch.bfloat16:
        return whole.bfloat16().float() if whole.ndim > 1 else whole
    return as_gathered(whole, replace(policy, gather_dtype=policy.reduce_dtype))


def held_by(ctx: FsdpContext, parameter: nn.Parameter) -> torch.Tensor:
    """For each rank that shards are spread over, which elements it holds."""
    for param_group in (param_group for unit in ctx.units for param_group in unit.param_groups):
        for spec, each in zip(param_group.plan.specs, param_group.sharded_parameters, strict=True):
            if each is parameter:
                held = torch.zeros(param_group.plan.world_size, spec.numel, dtype=torch.bool)
                for rank, start, stop in ranges_of(param_group.plan, spec):
                    held[rank, start:stop] = True
                return held.view(-1, *spec.shape)
    raise AssertionError("no param group has it")


def reduce_some(policy: QuantizedCommPolicy, layout: LayoutRule, mesh: tuple[int, ...]) -> None:
    """One backward, against a plain program: each rank's gradients quantized, and then summed."""
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=NAMES[-len(mesh) :])
    torch.manual_seed(0)
    model = Model(layers=2)
    plain = copy.deepcopy(model)
    ctx = FsdpContext(device_mesh, layout=layout)
    shard_layers(model, ctx, comm_policy=policy)
    ranks = dist.get_world_size()
    tokens = torch.randint(VOCABULARY, (ranks, 2, 5), generator=torch.Generator().manual_seed(1))
    model(tokens[dist.get_rank()]).square().mean().backward()
    of_ranks = []
    for of_rank in tokens:
        plain.zero_grad()
        plain(of_rank).square().mean().backward()
        of_ranks.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    for name, parameter in model.named_parameters():
        exact = torch.stack([each[name] for each in of_ranks])
        sent = torch.stack([as_sent(each[name], policy) for each in of_ranks])
        found = parameter.grad.full_tensor()
        held = held_by(ctx, parameter)[torch.arange(ranks) % mesh[-1]]
        expected = torch.where(held, exact, sent).mean(0)  # what does not travel is exact
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(
    ("ranks", "layout", "block"),
    [
        ((2,), Flat(), (1, None)),
        ((3,), BlockAtomic(2), (1, None)),
        ((3,), TensorAtomic(), (1, None)),
        ((2, 2), Flat(), (1, None)),
        ((3,), PerTensor(), (1, None)),
        ((2, 2), PerTensor(), (1, 2)),
        ((1,), PerTensor(), (2, None)),
    ],
)
def test_gradients_are_quantized_once_and_summed_in_full(
    dtype: torch.dtype, ranks: tuple[int, ...], layout: LayoutRule, block: Block
) -> None:
    policy = QuantizedCommPolicy(reduce_dtype=dtype, block=block)
    run_ranks(reduce_some, math.prod(ranks), policy, layout, ranks)


def count_bytes(layout: LayoutRule) -> None:
    for policy, of_gather, of_reduction in (
        (QuantizedCommPolicy(torch.int8, torch.int8), 64 * (64 + 4), 64 * (64 + 4)),
        (QuantizedCommPolicy(reduce_dtype=torch.bfloat16), 64 * 64 * 4, 64 * 64 * 2),
        (replace(FP8, reduce_dtype=torch.bfloat16, block=(1, 32)), 64 * (64 + 8), 64 * 64 * 2),
        (replace(FP8, powers_of_two=True), 64 * (64 + 1), 64 * 64 * 4),
    ):
        model = nn.Linear(64, 64, bias=False)
        ctx = FsdpContext(layout=layout)
        fully_shard(model, ctx, comm_policy=policy, reshard_after_forward=False)
        model(torch.ones(1, 64)).sum().backward()
        assert ctx.stats.all_gather_bytes == of_gather
        assert ctx.stats.reduce_scatter_bytes == of_reduction


def count_bytes_of_kept(layout: LayoutRule) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 96, bias=False))
    policy = QuantizedCommPolicy(torch.int8, torch.int8, keep=("1.weight",))
    ctx = FsdpContext(layout=layout)
    fully_shard(model, ctx, comm_policy=policy, reshard_after_forward=False)
    model(torch.ones(1, 64)).sum().backward()
    assert ctx.stats.all_gather_bytes == 64 * (64 + 4) + 96 * 64 * 4
    assert ctx.stats.reduce_scatter_bytes == 64 * (64 + 4) + 96 * 64 * 4


@pytest.mark.parametrize("layout", [Flat(), PerTensor()])
def test_a_matrix_that_is_kept_takes_what_it_takes_alone(layout: LayoutRule) -> None:
    run_ranks(count_bytes_of_kept, 2, layout)


@pytest.mark.parametrize("layout", [Flat(), PerTensor()])
def test_as_many_bytes_travel_as_codes_and_scales_take(layout: LayoutRule) -> None:
    run_ranks(count_bytes, 2, layout)


def reduce_padded() -> None:
    """Ten rows on four ranks: the last has one, which shares a scale with what nobody fills."""
    model = nn.Linear(8, 10, bias=False)
    policy = QuantizedCommPolicy(reduce_dtype=torch.int8, block=(3, None))
    fully_shard(model, FsdpContext(layout=PerTensor()), comm_policy=policy)
    model(torch.ones(1, 8)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.ones(10, 8))


def test_a_chunk_may_end_before_its_last_block_does() -> None:
    run_ranks(reduce_padded, 4)


def reduce_halves() -> None:
    """Large gradients in float16, of which the sum would overflow, on a rank that holds nothing."""
    model = nn.Linear(8, 8, bias=False).half()
    policy = QuantizedCommPolicy(reduce_dtype=torch.int8)
    fully_shard(model, FsdpContext(layout=TensorAtomic()), comm_policy=policy)
    (40000.0 * model(torch.ones(1, 8).half())).sum().backward()
    assert model.weight.grad.full_tensor().eq(40000).all()


def test_sums_in_half_precision_do_not_overflow_and_a_rank_may_hold_nothing() -> None:
    run_ranks(reduce_halves, 3)


def train_small_types() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    frozen = torch.ones(8, 8).to(torch.float8_e4m3fn)
    model.register_parameter("codes", nn.Parameter(frozen, requires_grad=False))
    fully_shard(model, FsdpContext(), comm_policy=FP8)
    model(torch.ones(1, 8)).sum().backward()
    assert model.codes.full_tensor().view(torch.uint8).equal(frozen.view(torch.uint8))


def test_what_has_eight_bits_travels_as_it_is() -> None:
    run_ranks(train_small_types, 2)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gather_dtype": torch.bfloat16},
            "use one of torch.float8_e4m3fn, .*MixedPrecisionPolicy",
        ),
        ({"gather_dtype": torch.float8_e8m0fnu}, "use one of"),
        ({"gather_dtype": torch.int8, "block": 32}, r"block=32\): name the rows and the columns"),
        ({"gather_dtype": torch.int8, "block": (0, None)}, "a number of at least 1"),
        ({"gather_dtype": torch.int8, "block": (1, 2.0)}, "a number of at least 1"),
        ({"gather_dtype": torch.int8, "keep": "head.weight"}, "use a tuple of names"),
        ({}, "name a gather_dtype or a reduce_dtype"),
        ({"reduce_dtype": torch.float16}, "MixedPrecisionPolicy"),
    ],
)
def test_policies_that_say_nothing_sensible(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        QuantizedCommPolicy(**options)


def refuse(layout: LayoutRule, options: dict[str, Any], message: str, planned: bool) -> None:
    model = Model(layers=1)
    before = dict(model.named_parameters())
    ctx = FsdpContext(layout=layout)
    if planned:
        ctx.plan_layout([model])
    with pytest.raises(ValueError, match=message):
        fully_shard(model, ctx, **options)
    assert dict(model.named_parameters()) == before
    fully_shard(model, ctx)  # nothing was changed


@pytest.mark.parametrize(
    ("layout", "policy", "message", "planned"),
    [
        (
            Flat(),
            replace(FP8, block=(1, 4)),
            "no multiple of the 4 that share a scale",
            False,
        ),
        (Flat(), replace(FP8, block=(None, None)), "inside of the .* TensorAtomic", True),
        (Flat(), FP8, "inside of the .* BlockAtomic", True),
        (
            PerTensor(),
            replace(FP8, block=(2, None)),
            "chunks of 5 along dimension 0",
            False,
        ),
    ],
)
def test_blocks_that_parameters_cannot_have(
    layout: LayoutRule, policy: QuantizedCommPolicy, message: str, planned: bool
) -> None:
    run_on_fake_group(refuse, 3, layout, {"comm_policy": policy}, message, planned)


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


@pytest.mark.parametrize("policy", [FP8, replace(FP8, keep=("*",))])
def test_rows_that_are_cut_along_their_columns(policy: QuantizedCommPolicy) -> None:
    options = {"comm_policy": policy, "shard_placement_fn": columns}
    run_on_fake_group(refuse, 2, PerTensor(), options, "along dimension 1", False)


def disagree(other: QuantizedCommPolicy | None) -> None:
    policy = FP8 if dist.get_rank() else other
    model = Model(layers=1)
    fully_shard(model, FsdpContext(validate_layouts=True), comm_policy=policy)
    model(torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("other", [None, QuantizedCommPolicy(torch.float8_e5m2)])
def test_ranks_with_other_policies_get_an_error(other: QuantizedCommPolicy | None) -> None:
    with pytest.raises(RankError, match="planned"):
        run_ranks(disagree, 2, other)


# What stays as it is


def keep_precision() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    model = Model(layers=2)
    wholes = {name: whole.detach().clone() for name, whole in model.named_parameters()}
    shard_layers(model, FsdpContext(), mp_policy=policy, comm_policy=FP8)
    seen = {}

    def look(module: nn.Module, _: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen[module, name] = parameter.detach().clone()

    for module in (model.embedding, model.head, *model.layers.modules()):
        module.register_forward_pre_hook(look)
    model(torch.zeros(1, 2, dtype=torch.int64))
    for (module, name), values in seen.items():
        [fqn] = [
            f"{path}.{name}".strip(".") for path, each in model.named_modules() if each is module
        ]
        assert torch.equal(values, as_gathered(wholes[fqn], FP8, torch.bfloat16)), fqn
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), wholes[name])
    tokens = torch.ones(2, 3, dtype=torch.int64)
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def test_shards_keep_their_precision_and_compute_sees_the_rest_in_its_own_dtype() -> None:
    run_ranks(keep_precision, 2)
