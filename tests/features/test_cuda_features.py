"""A steady step of each feature on a GPU: no wait of the host, and nothing read from freed memory.

The same programs run on the emulated device, which notes each wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_overlap import FsdpContext, PerTensor, QuantizedCommPolicy, fully_shard
from fsdp_overlap.comm import process_groups
from fsdp_overlap.layout import BlockAtomic, TensorAtomic
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from fsdp_overlap.tools.emulator import EmulatedDevice, active, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from support.emulated import Program
from support.extensions import Rounded, with_matrices_of
from support.hostile_streams import RANKS, HostileCommStream
from support.nccl_like import chosen_as_for_nccl
from support.ranks import expect_rank_errors, run_ranks
from support.simulated import WORLD, simulate
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
    "offload": {"shard_options": {"offload_policy": CPUOffloadPolicy()}},
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
    with patch.object(process_groups, "one_rank_communicates", True):
        if device == "cuda":
            yield
            return
        with chosen_as_for_nccl(), running(EmulatedDevice()) as found:
            yield
        assert not found.findings, found.findings[0]


# Of offloaded parameters: an edit waits for the gather that reads them, and the end of backward for
# their gradients. Both wait for events, which CUDA's mode does not look at.
OFFLOADED_WAITS = ("wait_on_host", "in wait")


@contextmanager
def no_waits(device: str, but: tuple[str, ...] = ()) -> Iterator[None]:
    """A wait of the host for the device is an error, unless it is in a function of ``but``. Those
    on the emulated device must be there."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    if device == "cpu":
        yield
        return
    active().syncs.clear()
    yield
    waits = list(map(str, active().syncs))
    assert [wait for wait in waits if not wait.endswith(but)] == []
    assert all(any(wait.endswith(name) for wait in waits) for name in but)


def run_ahead(device: str, name: str, reads: bool = False) -> None:
    """``reads``: whether each step reads a parameter, which is a wait."""
    with ready(device):
        program, step = FEATURES[name](device)
        for _ in range(3):
            step()
        with no_waits(device, OFFLOADED_WAITS if name == "offload" else ()):
            for _ in range(2):
                step()
                if reads:
                    next(program.model.parameters()).to_local().sum().item()


DEVICES = pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.mark.sampled(3)
@DEVICES
@pytest.mark.parametrize("name", FEATURES)
def test_the_host_waits_nowhere_in_a_steady_step(device: str, name: str) -> None:
    run_ranks(run_ahead, RANKS, device, name, backend="nccl" if device == "cuda" else BACKEND)


@DEVICES
def test_a_wait_is_found(device: str) -> None:
    backend = "nccl" if device == "cuda" else BACKEND
    # In torch 2.11 an error of CUDA's mode loses its text.
    match = "synchroniz|error return without exception set|AssertionError"
    expect_rank_errors(run_ahead, RANKS, device, "AdamW", True, backend=backend, match=match)


SIMULATED: dict[str, dict[str, Any]] = {
    "flat": {"dims": (WORLD,)},
    "copies": {"dims": (2, 2)},
    "divided copies": {"dims": (2, 2), "shard_optimizer_over_replicas": True},
    "kept parts": {"dims": (WORLD,), "shard_options": {"reshard_after_forward": 2}},
    "Muon": {"dims": (WORLD,), "optimizer": Muon},
}
"""What one rank does without."""


def run_ahead_of_others(device: str, link: object, name: str) -> None:
    _, step = steps(device, **SIMULATED[name])
    for _ in range(3):
        step()
    with no_waits(device):
        for _ in range(2):
            step()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", SIMULATED)
def test_the_host_waits_nowhere_among_simulated_ranks(device: str, name: str) -> None:
    simulate(run_ahead_of_others, device, name)


def parameters_after(device: str, name: str, late_compute: bool | None) -> list[torch.Tensor]:
    program, step = FEATURES[name](device)
    if late_compute is not None:
        program.ctx.comm_stream_factory = lambda comm_stream, device: HostileCommStream(
            device, late_compute
        )
    for _ in range(3):
        step()
    return [parameter.detach().to_local().cpu() for parameter in program.model.parameters()]


def poison(device: str, name: str) -> None:
    """Full buffers hold NaN when they are allocated and when they are freed."""
    with ready(device):
        expected = parameters_after(device, name, None)
        for late_compute in (False, True) if device == "cuda" else (False,):
            found = parameters_after(device, name, late_compute)
            for one, wanted in zip(found, expected, strict=True):
                assert one.isfinite().all()
                torch.testing.assert_close(one, wanted)


@pytest.mark.sampled(3)
@DEVICES
@pytest.mark.parametrize("name", FEATURES)
def test_nothing_reads_memory_before_it_is_filled_or_after_it_is_freed(
    device: str, name: str
) -> None:
    run_ranks(poison, RANKS, device, name, backend="nccl" if device == "cuda" else BACKEND)


EMULATED = """
import torch
from fsdp_overlap.tools.emulator import EmulatedDevice, running
with running(EmulatedDevice()):
    torch.ones(1, device="emulated", requires_grad=True).sum().backward()
torch.ones(1, device="cuda")
"""


@pytest.mark.gpu
def test_a_process_with_an_emulated_device_refuses_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EMULATED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "use CUDA in a process of its own" in done.stderr
