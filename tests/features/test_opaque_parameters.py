"""Frozen parameters of a class of their own, as quantized weights are: their bytes are sharded and
gathered, never cast, and what the class knows beside them stays with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from fsdp_overlap import (
    FsdpContext,
    PerTensor,
    QuantizedCommPolicy,
    TensorAtomic,
    debug,
    fully_shard,
)
from fsdp_overlap.checkpoint import SafeFileSystemReader
from fsdp_overlap.layout import BlockAtomic, Flat, LayoutRule
from support.fake_group import run_on_fake_group
from support.opaque import (
    WIDTH,
    Adapted,
    EightBits,
    FourBits,
    Nibbles,
    build,
    check_same,
    gradients,
    inputs,
    same_bits,
)
from support.ranks import run_ranks

BF16, HALF = torch.bfloat16, torch.float16
LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "whole": TensorAtomic(),
    "rows": PerTensor(),
    "blocks": BlockAtomic(rows=3),
}


def shard(model: Any, ctx: FsdpContext | None = None, **options: Any) -> Any:
    ctx = ctx or FsdpContext()
    for block in model:
        fully_shard(block, ctx, **options)
    return fully_shard(model, ctx, **options)


def loss_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return model(inputs(dtype)).float().square().mean()


def train(model: nn.Module, steps: int = 3) -> list[float]:
    """The losses. Every second step accumulates, and an evaluation comes between."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in range(steps):
        for _ in range(1 + step % 2):
            loss = loss_of(model)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(loss_of(model).item())
        model.train()
    loss_of(model).backward()
    return losses


# ---- training ----


def trained(layout: str, storage: torch.dtype) -> None:
    for reshard in (None, False, True):
        model, twin = build(storage), build(storage)
        ctx = FsdpContext(layout=LAYOUTS[layout])
        shard(model, ctx, reshard_after_forward=reshard)
        with debug.check_parameters(model):
            losses = train(model)
        assert losses == train(twin)
        check_same(gradients(model), gradients(twin))
        assert len(gradients(model)) == 8  # of the adapters alone
        check_bytes(model, twin)
        assert ctx.stats.prefetch_hits > 0


def check_bytes(model: nn.Module, twin: nn.Module) -> None:
    """Two ranks hold a part each, of the dtype it had, and nothing whole is left."""
    held = whole = 0
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        parameter: Any = mine
        assert parameter.dtype == its.dtype, name
        assert same_bits(parameter.full_tensor(), its), name
        held += parameter.to_local().nbytes
        whole += its.nbytes
    assert held < 0.6 * whole
    for module in model.modules():
        if isinstance(module, EightBits):
            assert module.state.codes.untyped_storage().nbytes() == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("layout", "storage"), [("flat", BF16), ("rows", torch.uint8), ("blocks", torch.float32)]
)
def test_training_equals_unsharded_training_to_the_bit(layout: str, storage: torch.dtype) -> None:
    run_ranks(trained, 2, layout, storage)


def owned_whole() -> None:
    model, twin = build(), build()
    shard(model, FsdpContext(layout=TensorAtomic()))
    assert train(model) == train(twin)
    check_same(gradients(model), gradients(twin))
    weights = [module.weight for module in model.modules() if isinstance(module, FourBits)]
    assert all(weight.to_local().numel() in (0, WIDTH * WIDTH // 2) for weight in weights)


def test_a_weight_that_no_layout_cuts_has_one_owner() -> None:
    run_ranks(owned_whole, 2)


def copies(shard_optimizer_over_replicas: bool, reshard: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, twin = build(BF16), build(BF16)
    shard(
        model,
        FsdpContext(mesh, shard_optimizer_over_replicas=shard_optimizer_over_replicas),
        reshard_after_forward=reshard,
    )
    assert train(model) == train(twin)
    check_same(gradients(model), gradients(twin))


@pytest.mark.parametrize(
    ("shard_optimizer_over_replicas", "reshard"), [(False, None), (True, None), (False, 2)]
)
def test_copies_train_as_one(shard_optimizer_over_replicas: bool, reshard: Any) -> None:
    run_ranks(copies, 4, shard_optimizer_over_replicas, reshard)


# ---- dtypes ----


def cast_plain(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """What ``model.to(dtype)`` should do."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def under_a_policy() -> None:
    for storage in (torch.uint8, BF16, HALF, torch.float32):
        for dtype in (BF16, HALF):
            model, twin = build(storage), cast_plain(build(storage), dtype)
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            shard(model, mp_policy=policy)
            for each in (model, twin):
                loss_of(each, dtype).backward()
            assert torch.equal(loss_of(model), loss_of(twin, dtype))
            check_same(gradients(model), gradients(twin))
            assert model[0].base.weight.dtype is storage


def test_a_policys_dtype_is_not_for_bytes_whatever_they_are_stored_as() -> None:
    run_ranks(under_a_policy, 2)


def beside_fsdp2() -> None:
    """FSDP2 computes the same, if its policy has the dtype in which bytes are stored."""
    for param_dtype in (BF16, HALF):
        policy = MixedPrecisionPolicy(param_dtype=param_dtype)
        ours, theirs = nn.Sequential(FourBits(BF16)), nn.Sequential(FourBits(BF16))
        theirs.load_state_dict(ours.state_dict(), strict=False)
        theirs[0].weight.scales = ours[0].weight.scales
        shard(ours, mp_policy=policy)
        scales, whole = theirs[0].weight.scales, theirs[0].weight.whole
        torchs_fully_shard(theirs[0], mp_policy=policy)

        def restore(module: Any, _: Any, scales: Any = scales, whole: Any = whole) -> None:
            """Its parameters are plain, so a client has to note what is beside them."""
            plain = module.weight.data
            module._parameters["weight"] = weight = torch.Tensor._make_subclass(Nibbles, plain)
            weight.scales, weight.whole = scales, whole

        theirs[0].register_forward_pre_hook(restore)
        same = torch.equal(ours(inputs()), theirs(inputs(param_dtype)))
        assert same == (param_dtype is BF16)


def test_fsdp2_casts_them() -> None:
    run_ranks(beside_fsdp2, 2)


def cast_sharded() -> None:
    for storage in (torch.uint8, BF16, torch.float32):
        for dtype in (BF16, HALF, torch.float64, torch.float32):
            model, twin = build(storage), cast_plain(build(storage), dtype)
            shard(model).to(dtype)
            assert model[0].base.weight.dtype is storage
            assert model[0].up.weight.dtype is dtype
            assert torch.equal(loss_of(model, dtype), loss_of(twin, dtype))
            assert same_bits(model[0].base.weight.full_tensor(), twin[0].base.weight)
    model.float()  # also when it has run, as it leaves all as it is
    with pytest.raises(RuntimeError, match=r"cannot become torch\.bfloat16 when it has run"):
        model.bfloat16()
    assert torch.equal(loss_of(model), loss_of(twin))


def test_a_sharded_model_is_cast_without_them() -> None:
    run_ranks(cast_sharded, 2)


def on_the_wire() -> None:
    model, twin = build(BF16), build(BF16)
    for adapted in (model, twin):
        for block in adapted:  # too coarse for what is quantized on the wire
            nn.init.zeros_(block.up.weight)
            nn.init.zeros_(block.down.weight)
    shard(
        model, comm_policy=QuantizedCommPolicy(gather_dtype=torch.float8_e4m3fn, keep=("*scales",))
    )
    assert torch.equal(model(inputs()), twin(inputs()))


def test_a_comm_policy_leaves_them_alone() -> None:
    run_ranks(on_the_wire, 2)


# ---- what is beside the bytes ----


def attributes() -> None:
    for layout in (Flat(), PerTensor()):
        model, twin = build(), build()
        ctx = FsdpContext(layout=layout)
        ctx.plan_layout([*model, model])
        shard(model, ctx)
        weight = model[0].base.weight
        assert torch.equal(weight.largest, twin[0].base.weight.largest)
        assert torch.equal(weight.scales, twin[0].base.weight.scales)
        assert not hasattr(model[1].base.weight, "codes")  # which has no memory now
        with pytest.raises(AttributeError, match="smallest"):
            _ = weight.smallest
        for each in (model, twin):
            each[0].base.weight.scales = each[0].base.weight.scales * 2
        assert torch.equal(loss_of(model), loss_of(twin))
        model.unshard()
        model[0].unshard()
        assert type(model[0].base.weight) is Nibbles
        model[0].base.weight.scales.mul_(2)
        model[0].reshard()
        twin[0].base.weight.scales.mul_(2)
        assert torch.equal(loss_of(model), loss_of(twin))
        del weight.scales
        assert not hasattr(weight, "scales")


def test_attributes_are_those_of_the_parameter_in_both_forms() -> None:
    run_ranks(attributes, 2)


def copied() -> None:
    for has_run in (False, True):
        model, twin = build(BF16), build(BF16)
        shard(model)
        if has_run:
            loss_of(model)
        duplicate = copy.deepcopy(model)
        with torch.no_grad():
            for weight in (w for w in model.parameters() if hasattr(w, "scales")):
                weight.scales.zero_()
                weight.zero_()
        assert torch.equal(loss_of(duplicate), loss_of(twin))
        assert not torch.equal(loss_of(model), loss_of(twin))
        assert train(duplicate) == train(twin)
        duplicate[0].unshard()
        assert type(duplicate[0].base.weight) is Nibbles


def test_a_copy_has_bytes_and_attributes_of_its_own() -> None:
    run_ranks(copied, 2)


# ---- checkpoints ----


def state_dicts() -> None:
    model, twin = build(BF16), build(BF16)
    other = shard(build(BF16, seed=2), FsdpContext(layout=PerTensor()))
    shard(model)
    loss_of(model)
    loss_of(other)
    saved, expected = model.state_dict(), twin.state_dict()
    assert saved.keys() == expected.keys()
    assert "0.base.weight.scales" in saved
    assert get_model_state_dict(model).keys() == saved.keys()
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    extra = trained.keys() - {name for name, p in twin.named_parameters() if p.requires_grad}
    assert extra == {"0.base.weight.scales", "3.base.weight.scales"}  # which are no parameters
    for assign in (False, True):
        assert not other.load_state_dict(saved, strict=False, assign=assign).missing_keys
        for block in (0, 3):
            other[block].base.weight.scales = model[block].base.weight.scales
        assert torch.equal(loss_of(other), loss_of(twin))
        check_bytes(other, twin)
    for name, stored in (("0.base.weight", "bfloat16"), ("1.base.weight", "int8")):
        wrong = {name: model.get_parameter(name).full_tensor().float()}
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=rf"float32.* stored as torch\.{stored}"):
                model.load_state_dict(wrong, strict=False, assign=assign)
    assert torch.equal(loss_of(model), loss_of(twin))


def test_state_dicts_have_the_keys_and_bytes_of_the_unsharded_model() -> None:
    run_ranks(state_dicts, 2)


def save(folder: str) -> None:
    model = shard(build(BF16))
    train(model)
    dcp.save(model.state_dict(), checkpoint_id=folder)


def load(folder: str, layout: str) -> None:
    model, twin = build(BF16, seed=2), build(BF16)
    train(twin)
    shard(model, FsdpContext(layout=LAYOUTS[layout]))
    loss_of(model)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(loss_of(model), loss_of(twin))
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert same_bits(mine.full_tensor(), its), name


def test_what_two_ranks_save_one_and_four_load(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path))
    run_ranks(load, 1, str(tmp_path), "flat")
    run_ranks(load, 4, str(tmp_path), "rows")


def load_of_another_dtype(folder: str) -> None:
    model, twin = shard(build()), build()
    saved = model.get_parameter("1.base.weight").full_tensor().float()
    dcp.save({"1.base.weight": saved}, checkpoint_id=folder)
    state = {"1.base.weight": model.get_parameter("1.base.weight")}
    with pytest.raises(dcp.api.CheckpointException, match=r"float32 .* elements of torch\.int8"):
        dcp.load(state, storage_reader=SafeFileSystemReader(folder))
    assert torch.equal(loss_of(model), loss_of(twin))


def test_our_reader_casts_no_checkpoint_into_them(tmp_path: Path) -> None:
    run_ranks(load_of_another_dtype, 2, str(tmp_path))


# ---- what cannot be right ----


def trainable() -> None:
    model = nn.Sequential(FourBits(BF16))
    model[0].weight.requires_grad_(True)
    fully_shard(model)


def on_meta() -> None:
    model = nn.Sequential(FourBits(BF16))
    elements = model[0].weight.to("meta")
    model[0].weight = torch.Tensor._make_subclass(Nibbles, elements, False)
    fully_shard(model)


def from_the_first() -> None:
    fully_shard(nn.Sequential(FourBits(BF16)), FsdpContext(sync_module_states=True))


def with_a_part() -> None:
    model = EightBits()
    model.weight.codes = model.weight.data[:2]
    fully_shard(model)


REFUSED: dict[Callable[[], None], str] = {
    trainable: "'0.weight' of Sequential is a Nibbles that requires grad.* if they are frozen",
    on_meta: "'0.weight' of Sequential is a Nibbles on meta, and the unit computes on cpu: move",
    from_the_first: "'0.weight' of Sequential is a Nibbles, and sync_module_states=True takes",
    with_a_part: "'weight' of EightBits shares memory with 'codes' of a Bytes",
}


def refuse() -> None:
    for case, match in REFUSED.items():
        with pytest.raises((TypeError, ValueError), match=match):
            case()


def test_what_cannot_be_right_is_refused() -> None:
    run_on_fake_group(refuse, 2)


def refuse_later() -> None:
    model, twin = shard(build(BF16)), build(BF16)
    loss_of(model)
    with pytest.raises(RuntimeError, match=r"'0', .* 'base\.weight' that is a Nibbles: its"):
        model[0].set_unshard_in_backward(False)
    model[2].set_unshard_in_backward(True)
    model[0].base.weight.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a Nibbles in unit '0 .*' has requires_grad=True"):
            model(inputs())
        model[0]._fsdp_unit.context.reset()
    model[0].base.weight.requires_grad_(False)
    assert train(model) == train(twin)


def test_what_is_done_later_is_refused_and_can_be_undone() -> None:
    run_ranks(refuse_later, 2)


class Returns(FourBits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


def returned() -> None:
    model = shard(nn.Sequential(Returns(torch.uint8)))
    with pytest.raises(RuntimeError, match="unit '0' returned a parameter of its own"):
        model(inputs())


def test_a_parameter_that_leaves_its_unit_is_an_error() -> None:
    run_on_fake_group(returned, 2)


class Repacks(FourBits):
    """In evaluation it gives the parameter other memory, as kernels with a format of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.weight.data = self.weight.data.clone()
        return super().forward(x)


def repacked() -> None:
    model = shard(nn.Sequential(Adapted(Repacks(torch.uint8))))
    for _ in range(3):
        loss_of(model)
    with pytest.raises(RuntimeError, match=r"'base\.weight' of unit '0 .* other memory"):
        loss_of(model.eval())


def test_a_parameter_that_evaluation_gives_other_memory_is_an_error_at_once() -> None:
    run_ranks(repacked, 2)
