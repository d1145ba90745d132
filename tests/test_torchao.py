"""torchao's float8 training with float8 all-gathers, beside FSDP2 in the same program.

torchao is in the `dev` extra. Its float8 products are emulated, as a CPU has none.
"""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, Rows, fully_shard
from support.ranks import run_ranks
from support.twins import NAMES

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed: pip install -e '.[dev]'"
)

WIDTH, INNER = 16, 32
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
    ctx = FsdpContext(named, layout=Rows())
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
    _, float8 = ours[0]._fsdp_unit.buckets  # type: ignore[union-attr]
    assert float8.gathered_nbytes == 2 * WIDTH * INNER  # a byte each


@pytest.mark.parametrize("precomputes", [False, True], ids=["", "precomputed scales"])
def test_training_equals_fsdp2s(precomputes: bool) -> None:
    run_ranks(partial(trains, precomputes), 2, timeout=IMPORTING)


def test_in_bfloat16_and_kept_until_backward() -> None:
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    run_ranks(partial(trains, True, reshard_after_forward=False, **options), 2, timeout=IMPORTING)


def test_with_copies() -> None:
    run_ranks(partial(trains, True, mesh=(2, 2)), 4, timeout=IMPORTING)
