"""A steady step of each feature on a GPU: no wait of the host, and nothing read from freed memory.

The same programs run on the emulated device, which notes each wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap import FsdpContext, QuantizedCommPolicy, fully_shard
from fsdp_overlap.comm import group_facts
from fsdp_overlap.emulator import EmulatedDevice, active, running
from fsdp_overlap.layout import BlockAtomic, PerTensor, TensorAtomic
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from support.emulated import Program
from support.extensions import Rounded, with_matrices_of
from support.hostile_lanes import RANKS, HostileLane
from support.nccl_like import BACKEND, chosen_as_for_nccl
from support.ranks import expect_rank_errors, run_ranks
from support.zoo import Model

Feature = Callable[[str], tuple[Program, Callable[[], None]]]
FEATURES: dict[str, Feature] = {}
"""A program on a device, and a step of it."""


def steps(
    device: str,
    clips: bool = False,
    microbatches: int = 1,
    dims: tuple[int, ...] = (RANKS,),
    **options: Any,
) -> tuple[Program, Callable[[], None]]:
    """A program on ``device``, and a step of it."""
    program = Program(device=device, dims=dims, **options)
    batches = [program.batch() for _ in range(microbatches)]

    def step() -> None:
        for place, batch in enumerate(batches):
            if microbatches > 1:
                program.model.set_requires_gradient_sync(place == microbatches - 1)
            program.backward(batch)
        if clips:
            clip_grad_norm_(program.model.parameters(), 1.0)
        program.step()

    return program, step


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW of torch": {"optimizer": torch.optim.AdamW},
    "Muon": {"optimizer": Muon},
    "Muon, whole": {"optimizer": Muon, "layout": TensorAtomic()},
    "clipping": {"clips": True},
    "accumulation": {"microbatches": 3},
    "bfloat16": {"shard_options": {"mp_policy": LOW}},
    "rows": {"layout": PerTensor()},
    "blocks": {"layout": BlockAtomic(rows=2)},
    "no prefetch": {"prefetch": 0},
    "two ahead": {"prefetch": 2},
    "kept after forward": {"shard_options": {"reshard_after_forward": False}},
    "gathered in 8 bits": {
        "shard_options": {"comm_policy": QuantizedCommPolicy(torch.float8_e4m3fn)}
    },
    "extension": {"build": partial(with_matrices_of, Rounded, Model), "layout": PerTensor()},
    "checkpointed": {"name": "checkpointed"},
    "mesh of two dimensions": {"dims": (RANKS, 1)},
}


def late_memory(device: str) -> tuple[Any, Callable[[], None]]:
    """A model that began on the meta device."""

    class Late(Program):
        def __init__(self) -> None:
            torch.manual_seed(7)
            self.device, self.ctx = device, FsdpContext()
            with torch.device("meta"):
                self.model = Model()
            for module in (*self.model.layers, self.model):
                fully_shard(module, self.ctx)
            self.model.to_empty(device=device)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    torch.nn.init.constant_(parameter, 0.02)
            self.optimizer = AdamW(self.model.parameters(), lr=0.01)

    program = Late()
    batch = program.batch()

    def step() -> None:
        program.backward(batch)
        program.step()

    return program, step


FEATURES.update({name: partial(steps, **options) for name, options in OPTIONS.items()})
FEATURES["late memory"] = late_memory


@contextmanager
def ready(device: str) -> Iterator[None]:
    """One rank communicates too, so that its steps are those of many."""
    with patch.object(group_facts, "one_rank_communicates", True):
        if device == "cuda":
            yield
            return
        with chosen_as_for_nccl(), running(EmulatedDevice()) as found:
            yield
        assert not found.findings, found.findings[0]


@contextmanager
def no_waits(device: str) -> Iterator[None]:
    """A wait of the host for the device is an error."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    active().syncs.clear()
    yield
    assert not active().syncs, list(map(str, active().syncs))


def run_ahead(device: str, name: str, reads: bool = False) -> None:
    """``reads``: whether each step reads a parameter, which is a wait."""
    with ready(device):
        program, step = FEATURES[name](device)
        for _ in range(3):
            step()
        with no_waits(device):
            for _ in range(2):
                step()
                if reads:
                    next(program.model.parameters()).to_local().sum().item()


DEVICES = pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@DEVICES
@pytest.mark.parametrize("name", FEATURES)
def test_the_host_waits_nowhere_in_a_steady_step(device: str, name: str) -> None:
    run_ranks(run_ahead, RANKS, device, name, backend="nccl" if device == "cuda" else BACKEND)


@DEVICES
def test_a_wait_is_found(device: str) -> None:
    backend = "nccl" if device == "cuda" else BACKEND
    match = "synchroniz|AssertionError"
    expect_rank_errors(run_ahead, RANKS, device, "AdamW", True, backend=backend, match=match)


def parameters_after(name: str, late_compute: bool | None) -> list[torch.Tensor]:
    program, step = FEATURES[name]("cuda")
    if late_compute is not None:
        program.ctx.lane_factory = lambda lane, device: HostileLane(device, late_compute)
    for _ in range(3):
        step()
    return [parameter.detach().to_local().cpu() for parameter in program.model.parameters()]


def poison(name: str) -> None:
    """Full buffers hold NaN when they are allocated and when they are freed."""
    with ready("cuda"):
        expected = parameters_after(name, None)
        for late_compute in (False, True):
            for found, wanted in zip(parameters_after(name, late_compute), expected, strict=True):
                torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEATURES)
def test_nothing_reads_memory_before_it_is_filled_or_after_it_is_freed(name: str) -> None:
    run_ranks(poison, RANKS, name, backend="nccl")
