"""Parameters whose gradients have another dtype than their own. They are those of unsharded
training to the bit, and those of FSDP2 of torch 2.15."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, fully_shard
from support.grad_dtypes import (
    BF16,
    FP32,
    KEPT,
    LAYOUTS,
    TORCH,
    WIDTH,
    Net,
    backward,
    batches,
    check,
    every_dtype,
    every_layout,
    gradients,
    mesh_of,
    ours,
    set_grad_dtype,
    theirs,
    unsharded,
)
from support.ranks import run_ranks

REDUCED = (None, FP32, BF16)
SYNCS = ((True, True, True), (False, False, True), (False, True, True))
"""Which microbatches are synchronized."""


def beside_unsharded(kept: str, layouts: Sequence[str], dims: tuple[int, ...]) -> None:
    dtype, grad_dtype = KEPT[kept]
    mesh = mesh_of(dims)
    # With copies it takes longer, and each of both once is enough.
    pairs = product(REDUCED, SYNCS) if len(dims) == 1 else zip(REDUCED, SYNCS, strict=True)
    for reduced, syncs in pairs:
        expected = unsharded(Net(dtype, turns=2), grad_dtype, reduced, syncs, dims)
        for layout in layouts:
            net = Net(dtype, turns=2)
            set_grad_dtype(net, grad_dtype)
            policy = MixedPrecisionPolicy(reduce_dtype=reduced)
            model = ours(net, layout, mesh=mesh, mp_policy=policy)
            assert {parameter.grad_dtype for parameter in model.parameters()} == {grad_dtype}
            found = gradients(model, syncs)
            check(found, expected, (layout, reduced, syncs))
        if grad_dtype is FP32 and reduced is not BF16:  # and nothing was rounded on the way
            assert all(any(each != each.bfloat16()) for each in map(torch.flatten, expected))


@pytest.mark.sampled(4)
@every_dtype
@pytest.mark.parametrize(
    ("dims", "layouts"), [((2,), ("flat", "whole", "rows")), ((2, 2), ("flat", "rows"))]
)
def test_gradients_are_those_of_unsharded_training(
    kept: str, dims: tuple[int, ...], layouts: Sequence[str]
) -> None:
    run_ranks(beside_unsharded, 2 * len(dims), kept, layouts, dims)


def beside_fsdp2(kept: str, dims: tuple[int, ...], is_set_after: bool) -> None:
    dtype, grad_dtype = KEPT[kept]
    mesh = mesh_of(dims)
    for reduced, syncs in product(REDUCED, SYNCS):
        results = []
        for verb in (theirs, *(partial(ours, layout=layout) for layout in LAYOUTS)):
            net = Net(dtype)
            if not is_set_after:
                set_grad_dtype(net, grad_dtype)
            model = verb(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
            if is_set_after:
                set_grad_dtype(model, grad_dtype)
            results.append(gradients(model, syncs))
        for found in results[1:]:
            check(found, results[0], (reduced, syncs))


@pytest.mark.sampled(4)
@pytest.mark.skipif(TORCH < (2, 15), reason="FSDP2 follows grad_dtype from torch 2.15 on")
@every_dtype
@pytest.mark.parametrize("dims", [(2,), (2, 2)])
@pytest.mark.parametrize("is_set_after", [False, True])
def test_gradients_are_fsdp2s_to_the_bit(
    kept: str, dims: tuple[int, ...], is_set_after: bool
) -> None:
    run_ranks(beside_fsdp2, 2 * len(dims), kept, dims, is_set_after)


def what_fsdp2_does() -> None:
    layer: Any = nn.Linear(4, 4)
    layer.weight.grad_dtype = BF16
    torchs_fully_shard(layer)
    x = torch.ones(1, 4)
    layer(x).sum().backward()
    assert layer.weight.grad.dtype is (BF16 if TORCH >= (2, 15) else FP32)
    layer = torchs_fully_shard(nn.Linear(4, 4))
    if TORCH >= (2, 15):
        layer(x).sum().backward()
        layer.zero_grad()
    layer.weight.grad_dtype = BF16
    with pytest.raises(RuntimeError, match=r"assign a gradient with dtype|gradient with dtype"):
        layer(x).sum().backward()


def test_fsdp2_does_what_the_table_says() -> None:
    run_ranks(what_fsdp2_does, 1)


# ---- set on sharded parameters ----


def set_after(kept: str) -> None:
    dtype, grad_dtype = KEPT[kept]
    for layout in LAYOUTS:
        model = ours(Net(dtype), layout)
        set_grad_dtype(model, grad_dtype)
        expected = unsharded(Net(dtype), grad_dtype, None, (False, True), (2,))
        check(gradients(model, (False, True)), expected, layout)
        assert {parameter.grad_dtype for parameter in model.parameters()} == {grad_dtype}
        assert all(
            "gradients" in param_group.dtypes for param_group in model._fsdp_unit.param_groups
        )
        weight = model.head.weight
        weight.grad_dtype = grad_dtype  # as it is
        weight.grad = None
        with pytest.raises(RuntimeError, match=r"its unit was gathered; set it before the first"):
            weight.grad_dtype = dtype
        assert weight.grad_dtype == grad_dtype


@every_dtype
def test_it_may_be_set_on_sharded_parameters_before_they_run(kept: str) -> None:
    run_ranks(set_after, 2, kept)


def set_on_some(layout: str) -> None:
    net = ours(Net(FP32), layout)
    net.head.weight.grad_dtype = BF16
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"unit 'Net' has parameters .*bfloat16 and .*32.*"):
            net(x)
    net.head.bias.grad_dtype = BF16
    backward(net, x)
    assert net.head.weight.grad.dtype == net.head.bias.grad.dtype == BF16
    assert net.layers[0].scale.grad.dtype == FP32


@every_layout
def test_parameters_that_travel_together_need_the_same(layout: str) -> None:
    run_ranks(set_on_some, 1, layout)


def a_param_group_each() -> None:
    net = Net(BF16)
    net.head.weight.grad_dtype = FP32
    net = ours(net)
    backward(net, batches(1)[0])
    assert net.head.weight.grad.dtype == FP32
    assert net.head.bias.grad.dtype == BF16
    assert {param_group.label for param_group in net._fsdp_unit.param_groups} == {
        "Net [bfloat16, gradients float32]",
        "Net [bfloat16]",
    }


def test_set_before_parameters_of_a_unit_may_have_several() -> None:
    run_ranks(a_param_group_each, 2)


REFUSED = [
    (FP32, None, "None: gradients of any dtype cannot be reduced"),
    (FP32, torch.int64, "int64: gradients are kept in a dtype of the parameter's kind"),
    (FP32, torch.complex64, "complex64: gradients are kept in a dtype"),
    (torch.complex64, FP32, "float32: gradients are kept in a dtype"),
    (FP32, torch.float8_e4m3fn, "float8_e4m3fn: gradients are kept in a dtype"),
]


def refused(layout: str) -> None:
    for dtype, grad_dtype, message in REFUSED:
        layer = nn.Linear(4, 4).to(dtype)
        layer.weight.grad_dtype = grad_dtype
        with pytest.raises(
            ValueError, match=f"'weight' of Linear is .* its grad_dtype .*{message}"
        ):
            fully_shard(layer, FsdpContext(layout=LAYOUTS[layout]))
        assert type(layer.weight) is nn.Parameter
        layer = fully_shard(nn.Linear(4, 4).to(dtype), FsdpContext(layout=LAYOUTS[layout]))
        with pytest.raises(RuntimeError, match=f"on a sharded parameter of {dtype}: "):
            layer.weight.grad_dtype = grad_dtype
        assert layer.weight.grad_dtype == dtype
    layer = fully_shard(nn.Linear(4, 4), FsdpContext(layout=LAYOUTS[layout]))
    layer.weight.grad = torch.zeros_like(layer.weight)
    with pytest.raises(
        RuntimeError, match=r"it has a gradient of torch.float32; set its grad to N"
    ):
        layer.weight.grad_dtype = BF16


@every_layout
def test_what_cannot_be_followed_is_refused(layout: str) -> None:
    run_ranks(refused, 1, layout)


def explicit_and_its_own() -> None:
    net = Net(FP32)
    set_grad_dtype(net, FP32)
    net = ours(net).to(BF16)
    backward(net, batches(1)[0])
    # Before, torch does not tell that it was set.
    assert net.head.weight.grad.dtype is (FP32 if TORCH >= (2, 15) else BF16)
    net = ours(Net(FP32))
    set_grad_dtype(net, FP32)
    net.to(BF16)
    backward(net, batches(1)[0])
    assert net.head.weight.grad.dtype is FP32


def test_one_that_was_set_to_the_parameters_own_outlives_a_cast() -> None:
    run_ranks(explicit_and_its_own, 1)


def summed_in_its_own() -> None:
    """Compute has another dtype, and the first layer's uses are summed."""
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    before, after = Net(FP32, turns=4), ours(Net(FP32, turns=4), mp_policy=policy)
    set_grad_dtype(before, FP32)
    set_grad_dtype(after, FP32)
    expected = gradients(ours(before, mp_policy=policy), (True,))
    check(gradients(after, (True,)), expected, "set after")
    rounded = gradients(ours(Net(FP32, turns=4), mp_policy=policy), (True,))
    assert not torch.equal(rounded[0], expected[0])
    set_grad_dtype(after, FP32)  # which it has


def test_one_that_was_set_to_the_parameters_own_is_that_of_sums() -> None:
    run_ranks(summed_in_its_own, 2)


def of_integers() -> None:
    """They have no gradients, but who sets it for all parameters sets it for them too."""
    for layout, is_set_after in product(LAYOUTS, (False, True)):
        layer = nn.Linear(4, 4)
        layer.codes = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
        if not is_set_after:
            set_grad_dtype(layer, BF16)
        fully_shard(layer, FsdpContext(layout=LAYOUTS[layout]))
        if is_set_after:
            set_grad_dtype(layer, BF16)
        layer(torch.ones(1, 4)).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype is BF16
        assert torch.equal(layer.codes.full_tensor(), torch.arange(4, dtype=torch.uint8))


def test_it_may_be_set_for_integers_too() -> None:
    run_ranks(of_integers, 2)
