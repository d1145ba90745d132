"""Tensor extensions: what is noticed, what is refused, and what is left after an error."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from fsdp_overlap import Flat, FsdpContext, PerTensor, QuantizedCommPolicy, fully_shard
from support.extension_twins import batches, both, train
from support.extensions import Net, Rounded, Same, Wrapped, parts
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import NAMES


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


def starts_differ() -> None:
    torch.manual_seed(0)
    model = Net("rounded")
    if dist.get_rank():
        with torch.no_grad():
            model.layers[1].up.weight.data_inside[0, 0] += 1  # type: ignore[union-attr]
    fully_shard(model, FsdpContext(layout=PerTensor()))
    with pytest.raises(RuntimeError, match=r"'layers.1.up.weight'.*across ranks"):
        model(batches(1)[0])


def test_ranks_that_start_from_other_values_are_told() -> None:
    run_ranks(starts_differ, 2)


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
    ctx = options.pop("ctx", None) or FsdpContext(layout=PerTensor())
    with pytest.raises(error, match=match):
        fully_shard(module, ctx, **options)
    assert {name: id(each) for name, each in module.named_parameters()} == before
    assert not isinstance(module, FSDPModule)


def what_cannot_be_is_refused() -> None:
    kept = "of which no part can be kept: use True, False or None"
    refused(wrapped(Rounded), kept, ValueError, reshard_after_forward=2)
    fp8 = QuantizedCommPolicy(torch.float8_e4m3fn)
    refused(wrapped(Rounded), "leave out comm_policy", ValueError, comm_policy=fp8)
    flat = FsdpContext(layout=Flat())
    refused(wrapped(Rounded), r"use FsdpContext\(layout=PerTensor\(\)\)", ValueError, ctx=flat)
    columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    refused(wrapped(Rounded), "return None or Shard", ValueError, **columns)
    refused(wrapped(Half), "is a Half without fsdp_pre_all_gather;", TypeError)
    bare = wrapped(lambda weight: weight.as_subclass(Bare))
    refused(bare, "is a Bare without fsdp_pre_all_gather and fsdp_post_all", TypeError)
    divided = FsdpContext(
        init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES),
        layout=PerTensor(),
        shard_optimizer_over_replicas=True,
    )
    refused(wrapped(Rounded), "leave out shard_optimizer_over_replicas", ValueError, ctx=divided)
    sharded = fully_shard(wrapped(Rounded), FsdpContext(layout=PerTensor()))
    with pytest.raises(RuntimeError, match="of a class of their own: cast it before"):
        sharded.double()


def test_what_cannot_be_is_refused_before_anything_is_changed() -> None:
    run_on_fake_group(what_cannot_be_is_refused, 4)


def methods_come_late() -> None:
    """As in FSDP2, a class may get its methods after fully_shard()."""
    model = fully_shard(wrapped(Wrapped), FsdpContext(layout=PerTensor()))
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
    plain = fully_shard(nn.Linear(4, 4), FsdpContext(layout=PerTensor()))
    local = plain.weight._local_tensor  # type: ignore[union-attr]
    local.fsdp_pre_all_gather = local.fsdp_post_all_gather = None  # type: ignore
    with pytest.raises(TypeError, match=r"of shape \(4, 4\), was given the methods"):
        plain(x)


def test_methods_may_come_after_fully_shard() -> None:
    run_ranks(methods_come_late, 2)


def sends_too_little() -> None:
    """On a rank without padding nothing is wrong. All are told, and none waits."""
    model = fully_shard(wrapped(Unpadded, rows=5), FsdpContext(layout=PerTensor()))
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
    model = fully_shard(wrapped(Growing), FsdpContext(layout=PerTensor()))
    match = r"gave \[2, 2\] of torch.bfloat16, and \[2, 1\] of torch.bfloat16 the first time"
    with pytest.raises(RuntimeError, match=match):
        model(torch.randn(2, 4))


def test_sizes_that_change_are_refused() -> None:
    run_ranks(sends_more_each_time, 2)


def raising(name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes method ``name`` of extensions raise. Returns what grows with each call."""
    calls: list[int] = []

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(1)
        raise AssertionError("planted")

    monkeypatch.setattr(Rounded, name, fail)
    return calls


def sends_nothing_before_an_error() -> None:
    """Gloo would write what others send into a full buffer that ctx.reset() has freed."""
    ours, theirs, ctx = both()
    train(ours, theirs, steps=1)
    group = ctx.groups.gather
    before = group._get_sequence_number_for_group()
    with pytest.MonkeyPatch.context() as patch:
        raising("fsdp_pre_all_gather", patch)
        with pytest.raises(AssertionError, match="planted"):
            ours(batches(1)[0])
    of_head = dist.get_world_size()  # a broadcast of what each rank has
    assert group._get_sequence_number_for_group() == before + of_head
    ctx.reset()
    assert ctx.stats.current_full_buffers == 0
    train(ours, theirs, steps=1)


def test_nothing_of_a_unit_is_sent_if_its_extension_raises() -> None:
    run_ranks(sends_nothing_before_an_error, 2)


def drops_a_gather() -> None:
    """The gather of the next unit is under way when a forward raises."""
    ours, theirs, ctx = both()
    train(ours, theirs, steps=1)
    with pytest.MonkeyPatch.context() as patch:
        calls: list[list[int]] = []

        def interrupt(*_: Any) -> None:
            calls.append(raising("fsdp_post_all_gather", patch))
            raise ValueError("of the user")

        handle = ours.layers[0].norm.register_forward_pre_hook(interrupt)
        with pytest.raises(ValueError, match="of the user"):
            ours(batches(1)[0])
        ctx.reset()
        assert calls == [[]]
    handle.remove()
    train(ours, theirs, steps=1)


def test_a_gather_that_nobody_needs_fills_nothing() -> None:
    run_ranks(drops_a_gather, 2)


class Ignoring(Rounded):
    def fsdp_post_all_gather(self, outputs: Any, *rest: Any, out: Any = None) -> Any:
        return super().fsdp_post_all_gather(outputs, *rest)


class Lying(Same):
    """Its unsharded tensor lies in what is gathered, so there is nothing to fill."""

    def fsdp_post_all_gather(self, outputs: Any, *_: Any, out: Any = None) -> Any:
        return outputs[0], (outputs[0],)


def ignores_out() -> None:
    """The parameter would have whatever was in its memory."""
    x = torch.randn(2, 4)
    model = fully_shard(wrapped(Ignoring), FsdpContext(layout=PerTensor()))
    for _ in range(2):
        with pytest.raises(TypeError, match=r"'weight' of unit .* was given out=, and returned"):
            model(x)
    plain = nn.Linear(4, 5)
    lying = copy.deepcopy(plain)
    lying.weight = nn.Parameter(Lying(plain.weight.detach()))
    fully_shard(lying, FsdpContext(layout=PerTensor()))
    for _ in range(2):
        torch.testing.assert_close(lying(x), plain(x))
        with torch.no_grad():
            plain.weight.mul_(2)
            lying.weight.mul_(2)


def test_an_extension_that_ignores_out_is_refused_unless_nothing_is_to_be_filled() -> None:
    run_ranks(ignores_out, 2)
