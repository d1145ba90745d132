"""Tensor extensions: parameters whose class says how they are gathered, beside FSDP2."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_overlap import Flat, FsdpContext, Rows, WirePolicy, fully_shard
from fsdp_overlap.comm.collectives import Issued
from fsdp_overlap.comm.extension_gather import ExtensionGather
from fsdp_overlap.layout import BucketPlan
from fsdp_overlap.optim import AdamW, Muon
from support.extensions import TOLD, WIDTH, Net, Rounded, Wrapped, parts
from support.ranks import run_ranks
from support.twins import NAMES

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def both(
    kind: str = "rounded", inner: int = 16, mesh: tuple[int, ...] | None = None, **options: Any
) -> tuple[Any, Any, FsdpContext]:
    """One model, sharded by this library and by FSDP2."""
    torch.manual_seed(2)
    ours, theirs = Net(kind, inner), Net(kind, inner)
    theirs = copy.deepcopy(ours)
    named = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=NAMES)
    ctx = FsdpContext(named, layout=Rows())
    for module in (*ours.layers, ours):
        fully_shard(module, ctx, **options)
    if named is not None:
        options["mesh"] = named
    for module in (*theirs.layers, theirs):
        torchs_fully_shard(module, **options)
    return ours, theirs, ctx


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    return list(torch.randn(count, 3, WIDTH, generator=generator))


def same(ours: Any, theirs: Any, name: str) -> None:
    """Compares what a rank holds, class by class."""
    assert isinstance(ours, DTensor)
    assert isinstance(theirs, DTensor)
    assert (ours.shape, ours.stride(), ours.placements) == (
        theirs.shape,
        theirs.stride(),
        theirs.placements,
    ), name
    mine, its = ours._local_tensor, theirs._local_tensor
    assert type(mine) is type(its), (name, type(mine), type(its))
    assert mine.shape == its.shape, name
    for one, other in zip(parts(mine), parts(its), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)


def check(ours: nn.Module, theirs: nn.Module, gradients: bool = False) -> None:
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if gradients:
            same(mine.grad, its.grad, f"gradient of {name}")
        else:
            same(mine, its, name)


def train(ours: Any, theirs: Any, steps: int = 3, micro: int = 1) -> None:
    models = (ours, theirs)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in models]
    for _ in range(steps):
        for index, batch in enumerate(batches(micro)):
            losses = []
            for model in models:
                model.set_requires_gradient_sync(index == micro - 1)
                loss = model(batch).square().mean()
                loss.backward()
                losses.append(parts(loss)[0])
            torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        check(ours, theirs, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check(ours, theirs)


def trains(micro: int = 1, **options: Any) -> None:
    ours, theirs, ctx = both(**options)
    check(ours, theirs)
    train(ours, theirs, micro=micro)
    assert ctx.stats.full_buffers_alive == 0


@pytest.mark.parametrize("policy", [None, LOW], ids=["", "in bfloat16"])
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("kind", ["rounded", "coded", "pair", "early"])
def test_training_equals_fsdp2s(
    kind: str, reshards: bool, policy: MixedPrecisionPolicy | None
) -> None:
    options = {} if policy is None else {"mp_policy": policy}
    run = partial(trains, kind=kind, reshard_after_forward=reshards, **options)
    run_ranks(run, 2)


@pytest.mark.parametrize("inner", [5, 3])
def test_rows_may_be_uneven_or_missing(inner: int) -> None:
    run_ranks(partial(trains, inner=inner), 4)


@pytest.mark.parametrize("kind", ["rounded", "pair"])
def test_ranks_may_hold_copies(kind: str) -> None:
    run_ranks(partial(trains, kind=kind, mesh=(2, 2)), 4)


@pytest.mark.parametrize("kind", ["rounded", "coded", "pair"])
def test_gradients_accumulate(kind: str) -> None:
    run_ranks(partial(trains, kind=kind, micro=3), 2)


class Columns(nn.Module):
    """A linear layer whose rows tensor parallelism has cut."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(4)
        tile = torch.randn(12, WIDTH).chunk(2)[mesh.get_local_rank()]
        whole = DTensor.from_local(Rounded(tile), mesh, [Shard(0)])  # type: ignore[arg-type]
        self.weight = nn.Parameter(whole)
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replicated = DTensor.from_local(x, self.mesh, [Replicate()])
        return nn.functional.linear(replicated, self.weight).full_tensor()


def lies_over_both() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, theirs = Columns(mesh["tp"]), Columns(mesh["tp"])
    fully_shard(ours, FsdpContext(mesh["dp"], layout=Rows()))
    torchs_fully_shard(theirs, mesh=mesh["dp"])
    train(ours, theirs)


def test_tensor_parallelism_may_have_cut_them() -> None:
    run_ranks(lies_over_both, 4)


class Meeting:
    """Stands for the ranks of one process: what each sends is there when all have sent."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: Any
    ) -> Issued:
        assert len(shard) == plan.shard_numels[group.rank()]
        self.sent.append(shard.clone())
        return Issued((), lambda: full.copy_(torch.cat(self.sent)))


DTYPES = [torch.float64, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool, torch.uint8]
SENT = st.lists(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), max_size=3),
    min_size=1,
    max_size=4,
)


@given(SENT, st.integers(1, 3))
def test_what_is_sent_arrives_in_every_dtype_and_size(
    sent: list[list[tuple[torch.dtype, int]]], ranks: int
) -> None:
    meeting: Any = Meeting()
    gathers, issued = [], []
    of_all: list[list[list[torch.Tensor]]] = []
    for rank in range(ranks):
        of_all.append(
            [
                [torch.randint(0, 2, (size,)).to(dtype) for dtype, size in tensors]
                for tensors in sent
            ]
        )
        gather = ExtensionGather([])
        gather.others = meeting
        group: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks)
        issued.append(gather.all_gather_first(of_all[-1], torch.empty(0), group))
        gathers.append(gather)
    for gather, each in zip(gathers, issued, strict=True):
        each.finish()
        for index, tensors in enumerate(gather.outputs):
            for number, output in enumerate(tensors):
                expected = torch.cat([rank[index][number] for rank in of_all])
                assert output.dtype == expected.dtype
                assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


def is_told() -> None:
    """As FSDP2 tells, whatever mesh has copies."""
    TOLD.clear()
    ours, theirs, _ = both(mesh=(2, 2), mp_policy=LOW)
    heard = []
    for model in (ours, theirs):
        model(batches(1)[0])
        heard.append([*dict.fromkeys(TOLD)])
        TOLD.clear()
    assert heard[0] == heard[1]
    assert len(heard[0]) == 2  # of up and of down
    assert heard[0][0][1:] == ((16, WIDTH), (WIDTH, 1), nn.Linear, LOW)


def test_an_extension_is_told_of_the_parameter_and_of_its_unit() -> None:
    run_ranks(is_told, 4)


def travels_alone() -> None:
    ours, theirs, ctx = both("coded")
    unit = ours.layers[0]._fsdp_unit
    names = [[spec.fqn for spec in bucket.plan.specs] for bucket in unit.buckets]
    assert names == [["norm.weight", "norm.bias", "down.bias"], ["up.weight", "down.weight"]]
    train(ours, theirs, steps=1)
    ctx.stats.reset()
    with torch.no_grad():
        ours(batches(1)[0])
    assert ctx.stats.all_gathers == 4  # one for each layer and the head
    codes, scales = 2 * 16 * WIDTH, (16 + WIDTH) * 8
    gathered = [
        bucket.gathered_nbytes for layer in ours.layers for bucket in layer._fsdp_unit.buckets
    ]
    assert gathered[1::2] == [codes + scales] * 3


def test_all_extensions_of_a_unit_travel_in_one_gather_as_bytes() -> None:
    run_ranks(travels_alone, 2)


def edits_are_seen() -> None:
    """Also those that no operation on the parameter tells of, while full buffers are kept."""
    ours, _, _ = both("rounded", reshard_after_forward=False)
    x = batches(1)[0]
    ours.set_reshard_after_backward(False)
    outputs = []
    for edit in (lambda p: None, lambda p: p.mul_(2), lambda p: p.to_local().mul_(2)):
        with torch.no_grad():
            edit(ours.layers[0].up.weight)
        outputs.append(ours(x))
        outputs[-1].sum().backward()
    with torch.no_grad():
        ours.layers[0].up.weight._local_tensor.data_inside.mul_(2)
    outputs.append(ours(x))
    for before, after in pairwise(outputs):
        assert not torch.equal(before, after)


def test_edits_of_the_inner_tensors_are_seen() -> None:
    run_ranks(edits_are_seen, 2)


def unsharded_edits_are_refused(kind: str) -> None:
    ours, _, ctx = both(kind)
    layer = ours.layers[0]

    def double(module: nn.Module, _: Any) -> None:
        module.weight.detach().mul_(2)

    layer.down.register_forward_pre_hook(double)
    with pytest.raises(RuntimeError, match=r"parameter 'down.weight' of unit 'layers.0.*edited"):
        ours(batches(1)[0])
    ctx.reset()
    layer.down._forward_pre_hooks.clear()

    def give(module: nn.Module, _: Any) -> None:
        for part in parts(module.weight):
            part.data.view(-1)[0] += 1

    layer.down.register_forward_pre_hook(give)
    with pytest.raises(RuntimeError, match=r"parameter 'down.weight' of unit 'layers.0.*edited"):
        ours(batches(1)[0])


@pytest.mark.parametrize("kind", ["rounded", "pair"])
def test_edits_of_unsharded_parameters_are_refused(kind: str) -> None:
    run_ranks(partial(unsharded_edits_are_refused, kind), 2)


def starts_on_meta(kind: str) -> None:
    with torch.device("meta"):
        ours, theirs = Net(kind), Net(kind)
    ctx = FsdpContext(layout=Rows())
    for shard, model in ((partial(fully_shard, ctx=ctx), ours), (torchs_fully_shard, theirs)):
        for module in (*model.layers, model):
            shard(module)
        if model is ours:
            with pytest.raises(RuntimeError, match="is on the meta device: call to_empty"):
                model(batches(1)[0])
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            for part in parts(parameter._local_tensor):
                torch.nn.init.normal_(part, std=0.1, generator=generator)
    ctx.reset()
    train(ours, theirs)


@pytest.mark.parametrize("kind", ["rounded", "coded"])
def test_a_unit_may_start_on_the_meta_device(kind: str) -> None:
    run_ranks(partial(starts_on_meta, kind), 2)


def steps_as_plain(kind: str) -> None:
    """Beside plain parameters with the same gradients, by torch's AdamW."""
    ours, _, _ = both(kind)
    twin = Net("plain")
    ctx = FsdpContext(layout=Rows())
    for module in (*twin.layers, twin):
        fully_shard(module, ctx)
    pairs = list(zip(ours.parameters(), twin.parameters(), strict=True))
    with torch.no_grad():
        for mine, its in pairs:
            its._local_tensor.copy_(parts(mine._local_tensor)[0])
    optimizers = AdamW(ours.parameters()), torch.optim.AdamW(twin.parameters())
    for batch in batches(3):
        ours(batch).square().mean().backward()
        for mine, its in pairs:
            its.grad = copy.deepcopy(mine.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, its in pairs:
        for part in parts(mine._local_tensor):
            torch.testing.assert_close(part, its._local_tensor, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="and Muon computes with plain tensors: give it to AdamW"):
        Muon(ours)


@pytest.mark.parametrize("kind", ["rounded", "pair"])
def test_own_adamw_steps_them_as_plain_ones(kind: str) -> None:
    run_ranks(partial(steps_as_plain, kind), 2)


def is_copied() -> None:
    ours, theirs, _ = both("rounded")
    train(ours, theirs, steps=1)
    train(copy.deepcopy(ours), theirs, steps=1)


def test_a_sharded_model_can_be_copied() -> None:
    run_ranks(is_copied, 2)


def takes_states(kind: str, path: str) -> None:
    ours, theirs, _ = both(kind)
    train(ours, theirs, steps=1)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    other, _, _ = both(kind)
    other.load_state_dict(ours.state_dict())
    check(other, theirs)
    # As FSDP2 has it: DCP saves what the class is to the pickle of torch.
    dcp.save({"model": ours.state_dict()}, checkpoint_id=path)
    with torch.no_grad():
        for parameter in other.parameters():
            for part in parts(parameter._local_tensor):
                part.zero_()
    dcp.load({"model": other.state_dict()}, checkpoint_id=path)
    check(other, theirs)
    train(other, theirs, steps=1)


@pytest.mark.parametrize("kind", ["rounded", "pair"])
def test_states_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    run_ranks(partial(takes_states, kind, str(tmp_path)), 2)


def starts_from_the_first() -> None:
    torch.manual_seed(dist.get_rank())
    model = Net("pair")
    ctx = FsdpContext(layout=Rows(), sync_module_states=True)
    fully_shard(model, ctx)
    torch.manual_seed(0)
    expected = Net("pair")
    for mine, whole in zip(model.parameters(), expected.parameters(), strict=True):
        local = mine._local_tensor
        for one, other in zip(parts(local), parts(whole), strict=True):
            rank, rows = dist.get_rank(), len(other) // 2
            assert torch.equal(one, other[rank * rows : (rank + 1) * rows])
    model(batches(1)[0])


def starts_differ() -> None:
    torch.manual_seed(0)
    model = Net("rounded")
    if dist.get_rank():
        with torch.no_grad():
            model.layers[1].up.weight.data_inside[0, 0] += 1  # type: ignore[union-attr]
    fully_shard(model, FsdpContext(layout=Rows()))
    with pytest.raises(RuntimeError, match=r"'layers.1.up.weight'.*not the same on ranks"):
        model(batches(1)[0])


def test_ranks_may_take_the_values_of_the_first() -> None:
    run_ranks(starts_from_the_first, 2)


def test_ranks_that_start_from_other_values_are_told() -> None:
    run_ranks(starts_differ, 2)


# What is refused


class Unpadded(Rounded):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.data_inside.bfloat16(),), (5,)


class Half(Rounded):
    fsdp_pre_all_gather = property()  # type: ignore[assignment]


class Bare(torch.Tensor):
    pass


def wrapped(cls: Any, rows: int = 4) -> nn.Linear:
    module = nn.Linear(4, rows)
    module.weight = nn.Parameter(cls(module.weight.detach()))
    return module


def refused(module: nn.Module, match: str, error: type[Exception], **options: Any) -> None:
    before = {name: id(each) for name, each in module.named_parameters()}
    ctx = options.pop("ctx", None) or FsdpContext(layout=Rows())
    with pytest.raises(error, match=match):
        fully_shard(module, ctx, **options)
    assert {name: id(each) for name, each in module.named_parameters()} == before
    assert not isinstance(module, FSDPModule)


def what_cannot_be_is_refused() -> None:
    kept = "of which no part can be kept: use True, False or None"
    refused(wrapped(Rounded), kept, ValueError, reshard_after_forward=2)
    fp8 = WirePolicy(torch.float8_e4m3fn)
    refused(wrapped(Rounded), "leave out wire_policy", ValueError, wire_policy=fp8)
    flat = FsdpContext(layout=Flat())
    refused(wrapped(Rounded), r"use FsdpContext\(layout=Rows\(\)\)", ValueError, ctx=flat)
    columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    refused(wrapped(Rounded), "return None or Shard", ValueError, **columns)
    refused(wrapped(Half), "is a Half without fsdp_pre_all_gather;", TypeError)
    bare = wrapped(lambda weight: weight.as_subclass(Bare))
    refused(bare, "is a Bare without fsdp_pre_all_gather and fsdp_post_all", TypeError)
    divided = FsdpContext(
        init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES), layout=Rows(), divide_copies=True
    )
    refused(wrapped(Rounded), "leave out divide_copies", ValueError, ctx=divided)
    sharded = fully_shard(wrapped(Rounded), FsdpContext(layout=Rows()))
    with pytest.raises(RuntimeError, match="of a class of their own: cast it before"):
        sharded.double()


def test_what_cannot_be_is_refused_before_anything_is_changed() -> None:
    run_ranks(what_cannot_be_is_refused, 4)


def methods_come_late() -> None:
    """As in FSDP2, a class may get its methods after fully_shard()."""
    model = fully_shard(wrapped(Wrapped), FsdpContext(layout=Rows()))
    x = torch.randn(2, 4)
    with pytest.raises(
        TypeError, match=r"parameter 'weight' of unit 'Linear.*' is a Wrapped without"
    ):
        model(x)
    local = model.weight._local_tensor  # type: ignore[union-attr]
    local.fsdp_pre_all_gather = partial(Rounded.fsdp_pre_all_gather, local)  # type: ignore
    local.fsdp_post_all_gather = partial(Rounded.fsdp_post_all_gather, local)  # type: ignore
    model(x).sum().backward()
    assert model.weight.grad is not None
    plain = fully_shard(nn.Linear(4, 4), FsdpContext(layout=Rows()))
    local = plain.weight._local_tensor  # type: ignore[union-attr]
    local.fsdp_pre_all_gather = local.fsdp_post_all_gather = None  # type: ignore
    with pytest.raises(TypeError, match=r"of shape \(4, 4\), was given the methods"):
        plain(x)


def test_methods_may_come_after_fully_shard() -> None:
    run_ranks(methods_come_late, 2)


def sends_too_little() -> None:
    """On a rank without padding nothing is wrong. All are told, and none waits."""
    model = fully_shard(wrapped(Unpadded, rows=5), FsdpContext(layout=Rows()))
    with pytest.raises(RuntimeError, match=r"other sizes or dtypes on other ranks, for one of 'w"):
        model(torch.randn(2, 4))


def test_ranks_that_would_send_different_sizes_are_told() -> None:
    run_ranks(sends_too_little, 2)


class Growing(Rounded):
    calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        Growing.calls += 1
        return (self.data_inside.new_zeros(2, Growing.calls).bfloat16(),), (4,)

    def fsdp_post_all_gather(self, outputs: Any, *_: Any, out: Any = None) -> Any:
        return torch.zeros(4, 4), ()


def sends_more_each_time() -> None:
    model = fully_shard(wrapped(Growing), FsdpContext(layout=Rows()))
    match = r"gave \[2, 2\] of torch.bfloat16, and \[2, 1\] of torch.bfloat16 the first time"
    with pytest.raises(RuntimeError, match=match):
        model(torch.randn(2, 4))


def test_sizes_that_change_are_refused() -> None:
    run_ranks(sends_more_each_time, 2)
