"""Claims about two ranks on one device: NCCL's on a GPU, else those that behave as NCCL's do.

Tests that call `run_two` are marked `two_ranks`, by which the GPU suite's part `ranks` finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_overlap.tools.emulator import EmulatedDevice, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from support.emulated_twins import Trained
from support.nccl_like import chosen_as_for_nccl
from support.ranks import run_ranks
from support.twins import Twins

SECONDS = 30.0
"""In which two ranks that take turns on a GPU train a small model many times over."""

DEVICES = pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def run_two(program: Callable[..., object], device: str, *args: Any) -> None:
    """Run `program(device, *args)` on both."""
    is_gpu = device == "cuda"
    backend, timeout = ("nccl", SECONDS) if is_gpu else (BACKEND, 2 * SECONDS)
    run_ranks(_run, 2, program, device, args, backend=backend, timeout=timeout)


def _run(program: Callable[..., object], device: str, args: tuple[Any, ...]) -> None:
    if device == "cuda":
        program(device, *args)
        return
    with chosen_as_for_nccl(), running(EmulatedDevice()) as found:
        program(device, *args)
    assert not found.findings, found.findings[0]


def make_twins(device: str, *args: Any, **options: Any) -> Twins:
    if device == "cuda":
        return Twins(*args, device=device, **options)
    return Trained(*args, **options)
