"""``GatherPolicy``: parameters are gathered in 8 bits, and compute sees what these stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fsdp_overlap import Blocks, Flat, GatherPolicy, Rows, Whole
from fsdp_overlap.comm.collectives import Issued
from fsdp_overlap.comm.quantized_gather import QuantizedCollectives, Wire
from fsdp_overlap.layout import BucketPlan, LayoutRule, ParamSpec, plan_units
from support.quantized import LARGEST, as_gathered, quantize_twin
from support.ranks import run_ranks
from support.twins import COPIES, Twins
from support.zoo import Model, shard_layers

DTYPES = [*LARGEST]


# Exact against a plain program


class Meeting:
    """Stands for the ranks of one process: what each sends is there when all have sent."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def reduce_scatter(self, *arguments: Any) -> Issued:
        raise NotImplementedError

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: Any
    ) -> Issued:
        assert len(shard) == plan.shard_numels[group.rank()]
        self.sent.append(shard.clone())

        def finish() -> torch.Tensor:
            return full.copy_(torch.cat(self.sent))

        return Issued((), finish)


def gathered(
    wholes: list[torch.Tensor], plan: BucketPlan, policy: GatherPolicy, dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """What each rank sees of each parameter."""
    flat = torch.full([plan.numel], math.nan, dtype=wholes[0].dtype)
    for whole, offset in zip(wholes, plan.offsets, strict=True):
        flat[offset : offset + whole.numel()] = whole.flatten()
    meeting: Any = Meeting()
    wire, scale_dtype = policy.wire(plan, dtype), policy.scale_dtype(dtype)
    issued = []
    for rank, shard in enumerate(flat.split(plan.shard_numels)):
        travels = Wire(wire, wire.segment(rank), policy.gather_dtype, scale_dtype, meeting)
        collectives = QuantizedCollectives(travels, meeting)
        group = cast(dist.ProcessGroup, SimpleNamespace(rank=lambda rank=rank: rank))
        full = torch.full([plan.numel], math.nan, dtype=dtype)
        issued.append(collectives.all_gather(full, shard, plan, group))
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
    layout=st.sampled_from([Flat(), Blocks(2), Whole(), Whole(padding=math.inf)]),
    policy=st.builds(
        GatherPolicy,
        st.sampled_from(DTYPES),
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
    policy: GatherPolicy,
    dtype: torch.dtype,
    seed: int,
) -> None:
    specs = [ParamSpec(f"p{n}", shape, torch.float32) for n, shape in enumerate(some)]
    specs = [replace(spec, block=policy.grain(spec)) for spec in specs]
    [plan] = plan_units([specs], ranks, layout)
    generator = torch.Generator().manual_seed(seed)
    wholes = [
        torch.randn(spec.shape, generator=generator) * 10.0 ** (index * 2 - 3)
        for index, spec in enumerate(plan.specs)
    ]
    for found in gathered(wholes, cast(BucketPlan, plan), policy, dtype):
        for whole, values in zip(wholes, found, strict=True):
            assert torch.equal(values, as_gathered(whole, policy, dtype))


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_extreme_numbers(
    code: torch.dtype, powers_of_two: bool, dtype: torch.dtype
) -> None:
    policy = GatherPolicy(code, powers_of_two=powers_of_two)
    whole = torch.tensor(
        [[0.0] * 8, [1e-45] * 8, [3e38, *[1.0] * 7], [math.inf, *[1.0] * 7], [math.nan] + [0.0] * 7]
    )
    [plan] = plan_units([[ParamSpec("p", (5, 8), torch.float32)]], 1, Flat())
    [[found]] = gathered([whole], cast(BucketPlan, plan), policy, dtype)
    assert torch.equal(found[:3], as_gathered(whole[:3], policy, dtype))
    assert found[:3].isfinite().all()
    assert found[0].eq(0).all()
    assert found[3:].isnan().all()


# Training


def train(policy: GatherPolicy, options: dict[str, Any], unit_options: dict[str, Any]) -> None:
    shard = partial(shard_layers, gather_policy=policy, **unit_options)
    twins = quantize_twin(Twins(Model, shard, **options), policy)
    twins.train(3)
    sent = twins.ctx.stats.all_gather_bytes
    plain = Twins(Model, partial(shard_layers, **unit_options), **options)
    plain.train(3)
    assert sent < 0.8 * plain.ctx.stats.all_gather_bytes  # most of it is padding in such a model


@pytest.mark.parametrize(
    ("ranks", "policy", "options", "unit_options"),
    [
        (1, GatherPolicy(), {}, {}),
        (2, GatherPolicy(), {}, {}),
        (3, GatherPolicy(torch.int8), {"layout": Blocks(2)}, {}),
        (2, GatherPolicy(block=(1, 2), powers_of_two=True), {}, {"reshard_after_forward": False}),
        (4, GatherPolicy(torch.float8_e5m2, (2, None)), {}, {"reshard_after_forward": 2}),
        (3, GatherPolicy(block=(None, None), keep=("embedding.weight",)), {"layout": Whole()}, {}),
        (4, GatherPolicy(), {**COPIES}, {}),
        (1, GatherPolicy(), {"layout": Rows()}, {}),
        (2, GatherPolicy(torch.int8, (1, 3)), {"layout": Rows()}, {}),
        (3, GatherPolicy(powers_of_two=True), {"layout": Rows()}, {}),
        (4, GatherPolicy(), {"layout": Rows(), **COPIES}, {}),
        (4, GatherPolicy(), {**COPIES, "divide_copies": True}, {}),
    ],
)
def test_training_equals_that_of_quantized_weights(
    ranks: int, policy: GatherPolicy, options: dict[str, Any], unit_options: dict[str, Any]
) -> None:
    run_ranks(train, ranks, policy, options, unit_options)
