"""Weights that bitsandbytes has quantized are sharded, trained around, evaluated and saved."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.torch_version import TorchVersion

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, PerTensor, TensorAtomic, fully_shard
from fsdp_overlap.layout import Flat, LayoutRule
from support.clients import example, whole
from support.opaque import check_same, gradients, same_bits
from support.ranks import run_ranks

if find_spec("bitsandbytes") is None:
    pytest.skip("needs bitsandbytes", allow_module_level=True)

from support.bitsandbytes import KINDS, WIDTH, build, statistics, take_statistics

FSDP2_TAKES_BYTES = TorchVersion(torch.__version__) >= (2, 13)
LAYOUTS: dict[str, LayoutRule] = {"flat": Flat(), "whole": TensorAtomic(), "rows": PerTensor()}
FOUR = [kind for kind in KINDS if "int8" not in kind]
STEPS = 3


def shard(model: Any, layout: LayoutRule | None = None, **options: Any) -> Any:
    ctx = FsdpContext(layout=layout or Flat())
    for block in model:
        fully_shard(block, ctx, **options)
    return fully_shard(model, ctx, **options)


def outputs(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same input on every rank: the mean over ranks is that of one, to the bit."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5))
    return model(x.to(dtype)).float()


def train(model: nn.Module) -> list[torch.Tensor]:
    """The outputs in training and in evaluation."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = []
    for _ in range(STEPS):
        found.append(outputs(model))
        found[-1].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(outputs(model))
        model.train()
    outputs(model).square().mean().backward()
    return found


# ---- training ----


def trained(layout: str) -> None:
    for kind in KINDS:
        model, twin = build(kind), build(kind)
        shard(model, LAYOUTS[layout])
        found, expected = train(model), train(twin)
        assert all(map(torch.equal, found, expected)), kind
        check_same(gradients(model), gradients(twin))
        assert len(gradients(model)) == 4
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(mine.full_tensor(), its), kind


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_unsharded_training_to_the_bit(layout: str) -> None:
    run_ranks(trained, 2, layout)


def beside_fsdp2() -> None:
    for kind in FOUR:
        for dtype in (torch.bfloat16, torch.float16):
            policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
            ours, theirs, twin = (build(kind) for _ in range(3))
            shard(ours, mp_policy=policy)
            torchs_fully_shard(theirs[0].base, mp_policy=policy)
            for model in (ours, theirs, twin):
                model[0].base.compute_dtype = torch.float32
            x = torch.ones(2, WIDTH)
            ours[0].unshard()
            found, expected = ours[0].base(x), twin[0].base(x)
            assert torch.equal(found, expected), kind
            ours[0].reshard()
            if "uint8" in kind or ("bfloat16" in kind and dtype is torch.bfloat16):
                assert torch.equal(theirs[0].base(x), expected), kind
            elif "bfloat16" in kind:  # FSDP2 casts what is packed in it
                assert not torch.allclose(theirs[0].base(x), expected, rtol=0.1, atol=0.1), kind
            else:
                with pytest.raises(RuntimeError):
                    theirs[0].base(x)
    theirs = build("int8")
    torchs_fully_shard(theirs[0].base)
    with pytest.raises(AttributeError, match="'CB'"):  # its parameters have no attributes
        theirs[0].base(x)


@pytest.mark.skipif(not FSDP2_TAKES_BYTES, reason="FSDP2 of this torch takes no integers")
def test_no_policy_casts_what_is_packed_and_fsdp2s_do() -> None:
    run_ranks(beside_fsdp2, 2)


def cast() -> None:
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float16):
            model, twin = build(kind), build(kind)
            shard(model).to(dtype)
            for each in twin.parameters():
                if type(each) is nn.Parameter:
                    each.data = each.data.to(dtype)
            assert torch.equal(outputs(model, dtype), outputs(twin, dtype)), kind
            theirs = build(kind)
            if "bfloat16" in kind and dtype is torch.float16:
                for block in theirs:
                    torchs_fully_shard(block)
                assert not torch.equal(outputs(theirs.to(dtype), dtype), outputs(twin, dtype))


def test_a_cast_of_the_sharded_model_leaves_what_is_packed_alone() -> None:
    run_ranks(cast, 2)


# ---- state dicts and checkpoints ----


def states() -> None:
    for kind in KINDS:
        model, twin = build(kind), build(kind)
        shard(model)
        for _ in range(2):  # also after a forward, which moves statistics of int8
            saved, expected = model.state_dict(), twin.state_dict()
            assert saved.keys() == expected.keys()
            check_same(statistics(model), statistics(twin))
            assert torch.equal(outputs(model), outputs(twin))
        duplicate = copy.deepcopy(model)
        assert torch.equal(outputs(duplicate), outputs(twin))
        if kind in FOUR:
            assert get_model_state_dict(model).keys() == expected.keys()
            options = StateDictOptions(
                full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
            )
            found = get_model_state_dict(model, options=options)
            if dist.get_rank() == 0:
                adapters = {name for name in found if "up" in name or "down" in name}
                assert found.keys() - adapters == statistics(twin).keys()
            if FSDP2_TAKES_BYTES:
                theirs = build(kind)
                torchs_fully_shard(theirs)
                assert not statistics(theirs)  # lost


def test_state_dicts_have_what_stands_beside_the_bytes() -> None:
    run_ranks(states, 2)


def save(folder: str) -> None:
    for index, kind in enumerate(KINDS):
        model = shard(build(kind))
        train(model)
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{index}")


def load(folder: str, layout: str) -> None:
    for index, kind in enumerate(KINDS):
        # What is quantized twice has numbers in a text, whose size DCP expects to find again.
        model, twin = build(kind, seed=1 if "twice" in kind else 2), build(kind)
        train(twin)
        shard(model, LAYOUTS[layout])
        outputs(model)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{index}")
        take_statistics(model, state)
        assert torch.equal(outputs(model), outputs(twin)), kind
        check_same(statistics(model), statistics(twin))


def test_what_two_ranks_save_one_loads(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path))
    run_ranks(load, 1, str(tmp_path), "rows")


def assigned() -> None:
    for kind in KINDS:
        # What is assigned to a Linear8bitLt has no statistics, as it says.
        for assign in (False, True) if kind in FOUR else (False,):
            model, twin = shard(build(kind, seed=2)), build(kind)
            state = twin.state_dict()
            model.load_state_dict(state, strict=False, assign=assign)
            take_statistics(model, dict(state))
            assert torch.equal(outputs(model), outputs(twin)), (kind, assign)


def test_state_dicts_of_the_unsharded_model_are_loaded() -> None:
    run_ranks(assigned, 2)


# ---- what evaluation does on some CPUs ----


def repacked() -> None:
    import bitsandbytes as bnb

    if not bnb.functional.has_avx512bf16():
        return
    model = build("nf4 in uint8")
    for block in model:
        block.base.support_avx512bf16_for_cpu = True
    shard(model)
    outputs(model)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"'base\.weight' of unit '\d .* other memory"),
    ):
        outputs(model.eval())


def test_an_evaluation_that_repacks_is_an_error() -> None:
    run_ranks(repacked, 2)


# ---- the example ----


def tuned(folder: str, bits: int) -> None:
    with example("qlora_training") as program:
        ours, losses = program.run(Path(folder) / "ours", STEPS, bits)
        if bits == 4 and FSDP2_TAKES_BYTES:  # it cannot run the other
            _, expected = program.run(Path(folder) / "theirs", STEPS, bits, is_fsdp2=True)
            assert losses == pytest.approx(expected, rel=1e-5)
        dist.barrier()  # until the first rank has written
        loaded = program.load(Path(folder) / "ours", bits)
        trained = {name: each for name, each in whole(ours.model).items() if "lora" in name}
        found = dict(loaded.named_parameters())
        assert trained
        for name, value in trained.items():
            assert torch.equal(found[name], value), name
        assert all(torch.any(value) for name, value in trained.items() if "lora_B" in name)
        tokens = program.batch(STEPS, torch.device("cpu"))
        for model in (ours.model, loaded):
            model.eval()
        with torch.no_grad():
            assert torch.equal(ours.model(tokens).logits, loaded(tokens).logits)
        stats = ours.ctx.stats
        stats.reset()
        with torch.no_grad():
            ours.model(tokens)
        assert stats.all_gather_bytes == sum(each.nbytes for each in whole(ours.model).values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft and transformers")
def test_the_example_trains_and_saves_adapters(tmp_path: Path, bits: int) -> None:
    run_ranks(tuned, 2, str(tmp_path), bits, timeout=150)
    names = {path.name for path in (tmp_path / "ours" / "adapters").iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
