"""Parameters whose gradients have another dtype than their own. They are those of unsharded
training to the bit, and those of FSDP2 of torch 2.15."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, Rows, Whole, WirePolicy, fully_shard
from fsdp_overlap.layout import Flat
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from support.ranks import run_ranks
from support.tensor_parallel import LENGTH, WORDS, Transformer, loss_of, parallelize, shard

BF16, FP32 = torch.bfloat16, torch.float32
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
WIDTH = 6

KEPT = {"float32 of bfloat16": (BF16, FP32), "bfloat16 of float32": (FP32, BF16)}
"""The dtype of parameters, and that of their gradients."""
REDUCED = (None, FP32, BF16)
SYNCS = ((True, True, True), (False, False, True), (False, True, True))
"""Which microbatches are synchronized."""
LAYOUTS = {"flat": Flat(), "whole": Whole(), "rows": Rows()}

every_dtype = pytest.mark.parametrize("kept", KEPT)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Scaled(nn.Module):
    """Autograd has a float32 gradient for ``scale``, whatever its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.scale.dtype)).float() * self.scale


class Net(nn.Module):
    """``turns``: how often the first layer runs."""

    def __init__(self, dtype: torch.dtype, turns: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Scaled() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.turns = turns
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*[self.layers[0]] * self.turns, *self.layers[1:]]:
            x = torch.tanh(layer(x)) + x
        return self.head(x.to(self.head.weight.dtype))


def set_grad_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters():
        parameter.grad_dtype = dtype


def shard_net(verb: Callable[..., Any], net: Net, **options: Any) -> Any:
    for layer in net.layers:
        verb(layer, **options)
    verb(net, **options)
    return net


def ours(net: nn.Module, layout: str = "flat", **options: Any) -> Any:
    names = ("mesh", "divide_copies")
    context = {name: options.pop(name) for name in names if name in options}
    ctx = FsdpContext(layout=LAYOUTS[layout], **context)
    return shard_net(partial(fully_shard, ctx=ctx), net, **options)  # type: ignore[arg-type]


def theirs(net: nn.Module, **options: Any) -> Any:
    return shard_net(torchs_fully_shard, net, **options)  # type: ignore[arg-type]


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).float().square().sum().backward()


def gradients(model: Any, syncs: tuple[bool, ...]) -> list[torch.Tensor]:
    for is_synced, x in zip(syncs, batches(len(syncs)), strict=True):
        model.set_requires_gradient_sync(is_synced)
        backward(model, x)
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def mean_of(gradient: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Among shards first and then across copies, two by two, rounded to the gradient's dtype."""
    found = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(found, gradient)
    for _ in dims:
        found = [(one + other) / 2 for one, other in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def unsharded(
    net: nn.Module,
    grad_dtype: torch.dtype,
    reduced: torch.dtype | None,
    syncs: tuple[bool, ...],
    dims: tuple[int, ...],
) -> list[torch.Tensor]:
    """The gradients that torch's own autograd accumulates, reduced and cast by hand."""
    set_grad_dtype(net, reduced or grad_dtype)
    totals: dict[nn.Parameter, torch.Tensor] = {}
    for is_synced, x in zip(syncs, batches(len(syncs)), strict=True):
        backward(net, x)
        for parameter in net.parameters() if is_synced else ():
            assert parameter.grad is not None
            mean = mean_of(parameter.grad, dims).to(grad_dtype)
            totals[parameter] = totals[parameter] + mean if parameter in totals else mean
            parameter.grad = None
    return list(totals.values())


def check(found: list[torch.Tensor], expected: list[torch.Tensor], case: object) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert mine.dtype is its.dtype, case
        assert torch.equal(mine, its), case


def mesh_of(dims: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])


def beside_unsharded(kept: str, layout: str, dims: tuple[int, ...]) -> None:
    dtype, grad_dtype = KEPT[kept]
    mesh = mesh_of(dims)
    for reduced, syncs in product(REDUCED, SYNCS):
        expected = unsharded(Net(dtype, turns=2), grad_dtype, reduced, syncs, dims)
        net = Net(dtype, turns=2)
        set_grad_dtype(net, grad_dtype)
        model = ours(net, layout, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
        assert {parameter.grad_dtype for parameter in model.parameters()} == {grad_dtype}
        found = gradients(model, syncs)
        check(found, expected, (reduced, syncs))
        if grad_dtype is FP32 and reduced is not BF16:  # and nothing was rounded on the way
            assert all(any(each != each.bfloat16()) for each in map(torch.flatten, found))


@every_dtype
@every_layout
@pytest.mark.parametrize("dims", [(2,), (2, 2)])
def test_gradients_are_those_of_unsharded_training(
    kept: str, layout: str, dims: tuple[int, ...]
) -> None:
    run_ranks(beside_unsharded, 2 * len(dims), kept, layout, dims)


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
        assert all("gradients" in bucket.dtypes for bucket in model._fsdp_unit.buckets)
        weight = model.head.weight
        weight.grad_dtype = grad_dtype  # as it is
        weight.grad = None
        with pytest.raises(RuntimeError, match=r"its unit has run; set it before the first forwar"):
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


def a_bucket_each() -> None:
    net = Net(BF16)
    net.head.weight.grad_dtype = FP32
    net = ours(net)
    backward(net, batches(1)[0])
    assert net.head.weight.grad.dtype == FP32
    assert net.head.bias.grad.dtype == BF16
    assert {bucket.label for bucket in net._fsdp_unit.buckets} == {
        "Net [bfloat16, gradients float32]",
        "Net [bfloat16]",
    }


def test_set_before_parameters_of_a_unit_may_have_several() -> None:
    run_ranks(a_bucket_each, 2)


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


# ---- what it goes together with ----


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


def planned_again() -> None:
    """The call around all units lays them out anew, and parameters are new objects."""

    def build() -> nn.Sequential:
        torch.manual_seed(2)
        sizes = ((WIDTH, 8), (8, 8), (8, 16))
        return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).to(BF16)

    net, twin = build(), build()
    set_grad_dtype(net[0], FP32)
    ctx = FsdpContext(layout=Whole())
    for layer in net:
        fully_shard(layer, ctx)
    set_grad_dtype(net[1], FP32)
    before = [layer.weight for layer in net]
    fully_shard(net, ctx)
    after = [layer.weight for layer in net]
    assert any(one is not other for one, other in zip(before, after, strict=True))
    net[2].weight.grad_dtype = FP32
    [x] = batches(1)
    set_grad_dtype(twin, FP32)
    for model in (net, twin):
        backward(model, x.bfloat16())
    for mine, its in zip(net.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        check([mine.grad.full_tensor()], [mean_of(its.grad, (2,))], "planned again")  # type: ignore[attr-defined]


def test_units_that_are_planned_again_keep_it() -> None:
    run_ranks(planned_again, 2)


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
        net = ours(net, mesh=mesh_of((2, 2)), divide_copies=True)
        check(gradients(net, (False, True)), expected, dtype)


def test_it_goes_with_divided_copies() -> None:
    run_ranks(divided, 4)


def few_bits() -> None:
    """A rank's own part is exact, and what arrives is summed in the dtype of the gradients."""
    wire = WirePolicy(reduce_dtype=torch.float8_e4m3fn)
    net = Net(BF16)
    set_grad_dtype(net, FP32)
    net = ours(net, wire_policy=wire)
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
