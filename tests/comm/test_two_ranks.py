"""Two ranks of NCCL train right: on one GPU, which they share, or on two.

Ranks of one GPU talk through sockets (`support/ranks.py`). That is slow, but it is NCCL, with its
order, its watchdog and its communicators. The same claims run on the emulated device.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fsdp_overlap import PerTensor, QuantizedCommPolicy, fully_shard
from fsdp_overlap.layout import BlockAtomic, Flat, LayoutRule, TensorAtomic
from fsdp_overlap.optim import AdamW, LayerWise, Muon, clip_grad_norm_, exchange
from support.captured import OPTIMIZERS, replay_steps
from support.quantized import quantize_twin
from support.ranks import RankError
from support.twins import same
from support.two_ranks import DEVICES, make_twins, run_two
from support.zoo import ZOO, Model, shard_layers

pytestmark = pytest.mark.two_ranks


def train(device: str, name: str, iterations: int, options: dict[str, Any]) -> None:
    make_twins(device, *ZOO[name], **options).train(iterations)


@DEVICES
def test_a_first_step(device: str) -> None:
    try:
        run_two(train, device, "layers", 1, {})
    except RankError as error:
        if device == "cuda":  # all others would hang as well
            pytest.exit(f"two ranks do not train a step: {error}", returncode=1)
        raise


MODELS = "nested units", "tied parameters", "checkpointed", "dynamic order"


@DEVICES
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_unsharded(device: str, name: str) -> None:
    run_two(train, device, name, 3, {})


EXACT = {"optimizer": Muon, "ns_dtype": torch.float64}
MODES: dict[str, dict[str, Any]] = {
    "nothing ahead": {"prefetch": 0},
    "two ahead": {"prefetch": 2},
    "our AdamW": {"optimizer": AdamW},
    "Muon": EXACT,
    "Muon, blocks": {**EXACT, "layout": BlockAtomic(rows=2)},
    "Muon, whole": {**EXACT, "layout": TensorAtomic()},
    "Muon, rows": {**EXACT, "layout": PerTensor()},
    "rows": {"layout": PerTensor()},
    "copies": {"mesh": (2, 1)},
    "divided copies": {
        "mesh": (2, 1),
        "shard_optimizer_over_replicas": True,
        "optimizer": AdamW,
    },
}


@pytest.mark.sampled(2)
@DEVICES
@pytest.mark.parametrize("mode", MODES)
def test_modes_train_as_unsharded(device: str, mode: str) -> None:
    run_two(train, device, "layers", 3, MODES[mode])


def step_whole_matrices(device: str, layout: LayoutRule) -> None:
    twins = make_twins(device, *ZOO["layers"], layout=layout)
    twins.optimizer, twins.twin_optimizer = (
        LayerWise(model, partial(torch.optim.Adafactor, lr=0.05), torch.optim.AdamW)
        for model in (twins.model, twins.twin)
    )
    with patch.object(exchange, "ROUND_ELEMENTS", 60):
        twins.train(3)


@DEVICES
@pytest.mark.parametrize("layout", [Flat(), TensorAtomic(), PerTensor()], ids=repr)
def test_optimizers_of_whole_matrices(device: str, layout: LayoutRule) -> None:
    run_two(step_whole_matrices, device, layout)


def clip(device: str) -> None:
    twins = make_twins(device, *ZOO["layers"])
    for batch in twins.batches(3):
        twins.backward(*batch)
        found = clip_grad_norm_(twins.model.parameters(), 0.1)
        expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
        same(found, expected, "norm")
        twins.check_gradients()
        twins.step()


@DEVICES
def test_gradients_are_clipped(device: str) -> None:
    run_two(clip, device)


@pytest.mark.sampled(4)
@DEVICES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_of_a_captured_step_equal_the_step(device: str, name: str) -> None:
    run_two(replay, device, name)


def replay(device: str, name: str) -> None:
    replay_steps(name, device, replays=6)


EITHER = pytest.mark.parametrize("layout", [BlockAtomic(rows=1), PerTensor()], ids=repr)


def gather_in_8_bits(device: str, dtype: torch.dtype, layout: LayoutRule) -> None:
    policy = QuantizedCommPolicy(dtype)
    shard = partial(shard_layers, comm_policy=policy)
    quantize_twin(make_twins(device, Model, shard, layout=layout), policy).train(3)


@pytest.mark.sampled(4)
@DEVICES
@EITHER
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_weights_travel_in_8_bits(device: str, dtype: torch.dtype, layout: LayoutRule) -> None:
    run_two(gather_in_8_bits, device, dtype, layout)


def reduce_in_few_bits(device: str, dtype: torch.dtype, layout: LayoutRule) -> None:
    """Gradients that codes can say exactly: those of a row are equal, and powers of two."""
    policy = QuantizedCommPolicy(reduce_dtype=dtype, powers_of_two=dtype.itemsize == 1)
    shard = partial(fully_shard, comm_policy=policy)
    twins = make_twins(device, partial(nn.Linear, 6, 8), shard, layout=layout)
    x = torch.ones(2, 6, dtype=torch.double, device=device)
    for scale in (1.0, 128.0):
        for model in (twins.model, twins.twin):
            (scale * model(x)).sum().backward()
        twins.check_gradients()
        twins.step()


@DEVICES
@EITHER
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16], ids=str)
def test_gradients_travel_in_few_bits(device: str, dtype: torch.dtype, layout: LayoutRule) -> None:
    run_two(reduce_in_few_bits, device, dtype, layout)
