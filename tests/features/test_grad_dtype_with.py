"""What gradients of another dtype go together with: copies, casts, optimizers, stages, compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, QuantizedCommPolicy
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from support.grad_dtypes import (
    BF16,
    FP32,
    KEPT,
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
    unsharded,
)
from support.ranks import run_ranks
from support.tensor_parallel import LENGTH, WORDS, Transformer, loss_of, parallelize, shard


def kept_through(change: str, layout: str) -> None:
    """``change`` between ``fully_shard()`` and the first forward."""
    net = Net(BF16)
    if change in ("deepcopy", "to"):
        set_grad_dtype(net, FP32)
    if change == "meta":
        set_grad_dtype(net.to("meta"), FP32)  # which replaces parameters
    net = ours(net, layout)
    if change in ("deepcopy after", "to after", "assign"):
        set_grad_dtype(net, FP32)
    values = Net(BF16).state_dict()
    dtype = BF16
    if change == "meta":
        net.to_empty(device="cpu")
        net.load_state_dict(ours(Net(BF16), layout).state_dict())
    elif change.startswith("deepcopy"):
        net = copy.deepcopy(net)
    elif change.startswith("to"):
        net.to(torch.float16).to(dtype)
    else:
        if layout == "rows":
            dtype = torch.float16
        other = {
            name: value.to(dtype) for name, value in ours(Net(BF16), layout).state_dict().items()
        }
        net.load_state_dict(other, assign=True)
    twin = Net(BF16)
    twin.load_state_dict(values)
    expected = unsharded(twin.to(dtype), FP32, None, (False, True), (2,))
    check(gradients(net, (False, True)), expected, change)
    if change.startswith("deepcopy"):  # also when there are gradients
        check([p.grad.full_tensor() for p in copy.deepcopy(net).parameters()], expected, change)
        parameter = copy.deepcopy(net.head.weight)
        assert parameter.grad_dtype == parameter.grad.dtype == FP32


CHANGES = ("deepcopy", "deepcopy after", "to", "to after", "meta", "assign")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_it_is_kept(change: str, layout: str) -> None:
    run_ranks(kept_through, 2, change, layout)


def assigned_with_another() -> None:
    net = ours(Net(BF16))
    values = dict(net.state_dict())
    values["head.bias"] = nn.Parameter(torch.zeros(5, dtype=BF16))
    values["head.bias"].grad_dtype = FP32
    before = net.head.bias
    with pytest.raises(
        RuntimeError, match=r"'head.bias' of Net the grad_dtype torch.float32, and "
    ):
        net.load_state_dict(values, assign=True)
    assert net.head.bias is before


def test_assigning_parameters_with_another_is_refused() -> None:
    run_ranks(assigned_with_another, 1)


def with_optimizer(kept: str, layout: str) -> None:
    """AdamW steps in the wider of the dtypes, and its states go from one optimizer to another."""
    dtype, grad_dtype = KEPT[kept]
    net, twin = Net(dtype), Net(dtype)
    set_grad_dtype(net, grad_dtype)
    net = ours(net, layout)
    optimizer = AdamW(net.parameters(), lr=0.1)
    found = gradients(net, (False, True))
    optimizer.step()
    wide = [parameter.detach().float() for parameter in twin.parameters()]
    for parameter, gradient in zip(wide, found, strict=True):
        parameter.grad = gradient.float()
    torch.optim.AdamW(wide, lr=0.1, fused=True).step()
    check([p.detach().full_tensor() for p in net.parameters()], [p.to(dtype) for p in wide], kept)
    states = get_optimizer_state_dict(net, optimizer)
    optimizer.zero_grad()
    fresh = AdamW(net.parameters(), lr=0.1)
    set_optimizer_state_dict(net, fresh, optim_state_dict=states)
    for parameter in net.parameters():
        for name, state in optimizer.state[parameter].items():
            its = fresh.state[parameter][name]
            assert its.dtype is state.dtype
            same = [getattr(each, "full_tensor", lambda each=each: each)() for each in (its, state)]
            assert torch.equal(*same)
    assert all(parameter.grad is None for parameter in net.parameters())
    backward(net, batches(1)[0])
    norms = [clip(net.parameters(), 0.01) for clip in (nn.utils.clip_grad_norm_, clip_grad_norm_)]
    assert norms[0] > 0.01
    torch.testing.assert_close(float(norms[1]), 0.01, rtol=1e-2, atol=0)
    fresh.step()
    Muon(
        [{"params": [p for p in net.parameters() if p.ndim == 2]}], lr=0.1, weight_decay=0.0
    ).step()
    torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False).step()
    for module in (net, twin):  # with which torch's AdamW raises, sharded or not
        set_grad_dtype(module, grad_dtype)
        backward(module, batches(1)[0])
        with pytest.raises(RuntimeError, match="dtype"):
            torch.optim.AdamW(module.parameters(), lr=0.1).step()


@every_dtype
@every_layout
def test_own_optimizers_and_clipping_take_such_gradients(kept: str, layout: str) -> None:
    run_ranks(with_optimizer, 2, kept, layout)


def several_grad_dtypes() -> None:
    """One optimizer group whose parameters have one dtype, and their gradients two."""
    net = Net(BF16)
    set_grad_dtype(net.layers[1], FP32)
    net = ours(net)
    found = gradients(net, (True,))
    AdamW(net.parameters(), lr=0.1).step()
    for parameter, gradient, twin in zip(
        net.parameters(), found, Net(BF16).parameters(), strict=True
    ):
        wide = twin.detach().to(gradient.dtype)
        wide.grad = gradient
        torch.optim.AdamW([wide], lr=0.1, fused=True).step()
        assert torch.equal(parameter.detach().full_tensor(), wide.to(BF16))


def test_adamw_steps_each_gradient_in_its_own_dtype() -> None:
    run_ranks(several_grad_dtypes, 2)


def stages() -> None:
    expected = unsharded(Net(BF16), FP32, None, (False, True), (2,))
    for stage in (1, 2, 3):
        net = Net(BF16)
        set_grad_dtype(net, FP32)
        net = ours(net)
        net.set_zero_stage(stage)
        for is_last, x in zip((False, True), batches(2), strict=True):
            net.set_is_last_backward(is_last)
            backward(net, x)
        found = [parameter.grad.full_tensor() for parameter in net.parameters()]
        assert {each.dtype for each in found} == {FP32}
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its)  # stages above the first reduce twice


def test_it_goes_with_zero_stages() -> None:
    run_ranks(stages, 2)


def divided() -> None:
    for dtype, grad_dtype in KEPT.values():
        expected = unsharded(Net(dtype), grad_dtype, None, (False, True), (2, 2))
        net = Net(dtype)
        set_grad_dtype(net, grad_dtype)
        net = ours(net, mesh=mesh_of((2, 2)), shard_optimizer_over_replicas=True)
        check(gradients(net, (False, True)), expected, dtype)


def test_it_goes_with_divided_copies() -> None:
    run_ranks(divided, 4)


def few_bits() -> None:
    """A rank's own part is exact, and what arrives is summed in the dtype of the gradients."""
    wire = QuantizedCommPolicy(reduce_dtype=torch.float8_e4m3fn)
    net = Net(BF16)
    set_grad_dtype(net, FP32)
    net = ours(net, comm_policy=wire)
    found = gradients(net, (True,))
    expected = unsharded(Net(BF16), FP32, None, (True,), (2,))
    for mine, its in zip(found, expected, strict=True):
        assert mine.dtype is FP32
        torch.testing.assert_close(mine, its, rtol=0.1, atol=0.05 * float(its.abs().max()))


def test_it_goes_with_reductions_in_few_bits() -> None:
    run_ranks(few_bits, 2)


def compiled() -> None:
    net, twin = Net(BF16), Net(BF16)
    set_grad_dtype(net, FP32)
    net = ours(net)
    for layer in [*net.layers, *twin.layers]:
        layer.compile(backend="aot_eager")
    expected = unsharded(twin, FP32, None, (False, True), (2,))
    check(gradients(net, (False, True)), expected, "compiled")


@pytest.mark.slow
def test_it_goes_with_compile() -> None:
    run_ranks(compiled, 2)


def tensor_parallel() -> None:
    """Gradients that are parts of a sum over tensor parallelism are summed in float32."""
    results = []
    for grad_dtype in (None, FP32):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(4)
        model: Any = parallelize(Transformer().to(BF16 if grad_dtype else FP32), mesh["tp"])
        if grad_dtype is not None:
            set_grad_dtype(model, grad_dtype)
        shard(model, FsdpContext(mesh["dp"]))
        generator = torch.Generator().manual_seed(1)
        tokens, targets = torch.randint(WORDS, (2, 3, LENGTH), generator=generator)
        loss_of(model, tokens, targets).backward()
        results.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    most = max(float(exact.abs().max()) for exact in results[0])
    for exact, found in zip(*results, strict=True):
        assert found.dtype is FP32
        torch.testing.assert_close(found, exact, rtol=0.1, atol=0.02 * most)
    assert any(not torch.equal(found, found.bfloat16()) for found in results[1])


def test_it_goes_with_tensor_parallelism() -> None:
    run_ranks(tensor_parallel, 2)


def penalty(layout: str) -> None:
    """What autograd accumulates into sharded parameters themselves has the dtype too."""
    net = Net(BF16)
    set_grad_dtype(net, FP32)
    net = ours(net, layout)
    (net.head.weight.float() * 0.1).sum().backward()
    assert net.head.weight.grad.dtype is FP32
    backward(net, batches(1)[0])
    [expected] = [
        each
        for each, (name, _) in zip(
            unsharded(Net(BF16), FP32, None, (True,), (2,)),
            Net(BF16).named_parameters(),
            strict=True,
        )
        if name == "head.weight"
    ]
    first = torch.full_like(expected, 0.1).bfloat16().float()
    assert torch.equal(net.head.weight.grad.full_tensor(), first + expected)


def test_gradients_through_sharded_rows_have_it() -> None:
    run_ranks(penalty, 2, "rows")


def given_by_hand(layout: str) -> None:
    net = ours(Net(BF16), layout)
    set_grad_dtype(net, FP32)
    weight = net.head.weight
    weight.grad = torch.ones_like(weight)
    assert weight.grad.dtype is FP32
    weight.grad = None
    backward(net, batches(1)[0])
    assert weight.grad.dtype is FP32


@every_layout
def test_a_gradient_given_by_hand_is_cast(layout: str) -> None:
    run_ranks(given_by_hand, 1, layout)
