"""torchao's float8 training with float8 all-gathers, beside FSDP2 in the same program.

torchao is in the `dev` extra. Its float8 products are emulated, as a CPU has none.
"""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_overlap import Flat, FsdpContext, PerTensor, fully_shard
from support.ranks import run_ranks
from support.twins import NAMES

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed: pip install -e '.[dev]'"
)

WIDTH, INNER = 16, 32
PACKED = 256  # NF4's scales are in blocks of 256 blocks of 64
IMPORTING = 180.0  # torchao, on a busy machine


def float8_model() -> nn.Sequential:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(3)
    layers = [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)
        )
        for _ in range(3)
    ]
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    converted: nn.Sequential = convert_to_float8_training(nn.Sequential(*layers), config=config)
    return converted


def local(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    held = tensor._local_tensor
    return getattr(held, "_tensor", held)


def trains(precomputes: bool, mesh: tuple[int, ...] | None = None, **options: Any) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    ours = float8_model()
    theirs = copy.deepcopy(ours)
    named = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=NAMES)
    ctx = FsdpContext(named, layout=PerTensor())
    for module in (*ours, ours):
        fully_shard(module, ctx, **options)
    for module in (*theirs, theirs):
        torchs_fully_shard(module, mesh=named, **options)
    models = ours, theirs
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for batch in torch.randn(4, 16, WIDTH, generator=generator):
        losses = []
        for model in models:
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss)
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert type(mine._local_tensor) is type(its._local_tensor), name  # type: ignore[attr-defined]
            torch.testing.assert_close(local(mine.grad), local(its.grad), rtol=1e-5, atol=1e-7)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            if precomputes:
                precompute_float8_dynamic_scale_for_fsdp(model)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(local(mine), local(its), rtol=1e-5, atol=1e-6)
    _, float8 = ours[0]._fsdp_unit.param_groups  # type: ignore[union-attr]
    assert float8.gathered_nbytes == 2 * WIDTH * INNER  # a byte each


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precomputes", [False, True], ids=["", "precomputed scales"])
def test_training_equals_fsdp2s(precomputes: bool) -> None:
    run_ranks(partial(trains, precomputes), 2, timeout=IMPORTING)


def test_in_bfloat16_and_kept_until_backward() -> None:
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    run_ranks(partial(trains, True, reshard_after_forward=False, **options), 2, timeout=IMPORTING)


class Adapted(nn.Module):
    """A frozen weight in four bits, and an adapter on top."""

    def __init__(self) -> None:
        super().__init__()
        from torchao.quantization import NF4Tensor

        weight = NF4Tensor.from_tensor(torch.randn(2 * PACKED, PACKED) / 8, 64, 256)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Linear(PACKED, 4, bias=False)
        self.up = nn.Linear(4, 2 * PACKED, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        both: torch.Tensor = linear_nf4(inputs, self.weight) + self.up(self.down(inputs))
        return both[..., :PACKED] * both[..., PACKED:].sigmoid()


def trains_adapters() -> None:
    torch.manual_seed(4)
    ours = nn.Sequential(*[Adapted() for _ in range(3)])
    unsharded, theirs = copy.deepcopy(ours), copy.deepcopy(ours)
    ctx = FsdpContext(layout=PerTensor())
    for module in (*ours, ours):
        fully_shard(module, ctx)
    for module in (*theirs, theirs):
        torchs_fully_shard(module)
    models = ours, theirs, unsharded
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for each in models
    ]
    batches = torch.randn(3, 8, PACKED, generator=torch.Generator().manual_seed(5))
    for batch in batches:  # the same on all ranks, so that the twin's gradients are the mean
        losses = [model(batch).square().mean() for model in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] == losses[1]
        torch.testing.assert_close(losses[0], losses[2])
    numel = 2 * PACKED * PACKED
    [packed] = [b for b in ours[0]._fsdp_unit.param_groups if b.is_extension]  # type: ignore[union-attr]
    assert packed.gathered_nbytes < 0.6 * numel  # four bits each, and scales


def test_adapters_train_on_weights_in_four_bits() -> None:
    run_ranks(trains_adapters, 2, timeout=IMPORTING)


@pytest.mark.slow
def test_with_copies() -> None:
    run_ranks(partial(trains, True, mesh=(2, 2)), 4, timeout=IMPORTING)


def steps_with_states_of_few_bits(layout: Any, folder: str) -> None:
    """An optimizer of torchao makes states for a rank's part, as DTensors. So it does what it does
    to a plain parameter of that part."""
    from torchao import optim

    torch.manual_seed(6)
    first = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 66), nn.Linear(66, 257))
    for kind in (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8):
        model = copy.deepcopy(first)
        fully_shard(model, FsdpContext(layout=layout))
        parts = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
        ours, plain = kind(model.parameters(), lr=1e-2), kind(parts, lr=1e-2)
        for batch in torch.randn(3, 4, 128):
            model(batch).square().mean().backward()
            for part, parameter in zip(parts, model.parameters(), strict=True):
                part.grad = parameter.grad.to_local().clone()
            with torch.compiler.set_stance("force_eager"):
                ours.step()
                plain.step()
            ours.zero_grad()
        for part, parameter in zip(parts, model.parameters(), strict=True):
            assert torch.equal(parameter.to_local(), part)
        unsharded = copy.deepcopy(first)
        unsharded.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        assert torch.equal(model(batch), unsharded(batch))  # it gathers what was stepped
        states = get_optimizer_state_dict(model, ours)
        if isinstance(layout, PerTensor):
            dcp.save(states, checkpoint_id=folder)
        else:
            with pytest.raises(dcp.CheckpointException, match=r"save .*layout=PerTensor\(\)"):
                dcp.save(states, checkpoint_id=folder)


@pytest.mark.parametrize("layout", [Flat(), PerTensor()], ids=repr)
def test_optimizer_states_of_few_bits(layout: Any, tmp_path: Path) -> None:
    run_ranks(steps_with_states_of_few_bits, 2, layout, str(tmp_path), timeout=IMPORTING)
