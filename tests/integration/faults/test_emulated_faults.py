"""Every allocation and every collective of a training step fails once, on the emulated device."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp_overlap
from fsdp_overlap.desync.error_monitor import ErrorMonitor
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.optim import Muon, clip_grad_norm_
from fsdp_overlap.tools.emulator import (
    EmulatedDevice,
    IssuedCollective,
    compare_issued,
    fake_ranks,
    running,
)
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from support.emulated import Program
from support.emulated_twins import Trained
from support.fuzz_errors import UNFINISHED
from support.ranks import run_ranks
from support.twins import COPIES, loss_of
from support.zoo import Model, shard_layers

LIBRARY = str(Path(fsdp_overlap.__file__).parent)

# What is allocated, by the file and the function of the library that is under way then.
ALLOCATIONS = {
    ("comm_context.py", "allocate_input"): "reduce input",
    ("collectives.py", "reduce_scatter"): "result of a reduction",
    ("order_check.py", "_issue"): "order check",
    ("kept_parts.py", "keep"): "kept part",
    ("param_group.py", "begin_gather"): "full buffer",
}


class PlannedError(RuntimeError):
    """As NCCL's."""


class Fault:
    """The n-th allocation of the library, or the n-th collective, fails."""

    def __init__(self, device: EmulatedDevice, of_collectives: bool) -> None:
        self.device = device
        self.of_collectives = of_collectives
        self.error = PlannedError if of_collectives else torch.OutOfMemoryError
        self.kinds: set[str] = set()
        """What has failed."""
        self._left = 0

    @contextmanager
    def at(self, position: int) -> Iterator[None]:
        self._left = position
        name = "issuing" if self.of_collectives else "allocating"
        setattr(self.device, name, self._count)
        try:
            yield
        finally:
            setattr(self.device, name, None)

    def _count(self, what: object) -> None:
        kind = str(what).split()[0] if self.of_collectives else kind_of_allocation()
        if kind is None:
            return
        self._left -= 1
        if self._left == 0:
            self.kinds.add(kind)
            raise self.error(f"planned, of {kind}")


def kind_of_allocation() -> str | None:
    """``None`` for one that the model, or the optimizer, asks for."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        kind = ALLOCATIONS.get((path.name, frame.f_code.co_name))
        if kind is not None and str(path).startswith(LIBRARY):
            return kind
        frame = frame.f_back
    return None


def fail_everywhere(fault: Fault, step: Callable[[], object], recover: Callable[[], None]) -> int:
    """Each position of ``step`` in turn, until there are no more. Returns how many there were."""
    position = 1
    while True:
        try:
            with fault.at(position):
                step()
        except fault.error as error:
            try:
                error.__traceback__ = None  # whose frames keep what is to be freed
                recover()
            except BaseException as after:
                after.add_note(f"after position {position}, {error}")
                raise
        else:
            return position - 1
        position += 1


MODES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "shards": ({"optimizer": Muon}, {"all_to_all"}),
    "copies": ({"dims": (2, 2), "reduce_dtype": torch.float64}, set()),
    "divided copies": ({"dims": (2, 2), "shard_optimizer_over_replicas": True}, set()),
    "kept parts": ({"shard_options": {"reshard_after_forward": 2}}, {"kept part"}),
    "offloaded": ({"shard_options": {"offload_policy": CPUOffloadPolicy()}}, set()),
}
ALWAYS = {"all_gather", "reduce_scatter", "all_reduce"} | {
    "full buffer",
    "reduce input",
    "result of a reduction",
    "order check",
}


def fail_and_go_on(options: dict[str, Any]) -> set[str]:
    with running(EmulatedDevice()) as device:
        program = Program(build=lambda: Model(layers=1), **options)

        def step() -> None:
            program.backward()
            clip_grad_norm_(program.model.parameters(), 1.0)
            program.step()

        for _ in range(3):
            step()
        gc.collect()
        steady = device.allocator.allocated
        stats = program.ctx.stats

        def recover() -> None:
            program.ctx.reset()
            program.model.zero_grad()
            for _ in range(2):
                assert stats.current_full_buffers == stats.current_reduce_inputs == 0
                step()
            if device.allocator.allocated != steady:
                gc.collect()  # what the error kept
            assert device.allocator.allocated == steady
            assert not device.findings, "\n".join(map(str, device.findings))

        failed = set()
        for of_collectives in (False, True):
            fault = Fault(device, of_collectives)
            assert fail_everywhere(fault, step, recover) > 5
            failed |= fault.kinds
        return failed


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODES)
def test_after_a_fault_anywhere_training_goes_on_in_order_and_nothing_leaks(name: str) -> None:
    options, more = MODES[name]
    with fake_ranks(4):
        failed = fail_and_go_on(options)
    assert not (ALWAYS | more) - failed


def fail_with_values(**options: Any) -> tuple[set[str], list[IssuedCollective]]:
    """The forward and backward fail at the same place on every rank."""
    with running(EmulatedDevice()) as device:
        twins = Trained(lambda: Model(layers=1), shard_layers, **options)
        twins.train(2)
        tokens, targets = map(twins.mine, next(twins.batches(1)))

        def step() -> None:
            loss_of(twins.model(tokens), targets).backward()

        def recover() -> None:
            twins.model.zero_grad()
            try:
                twins.train(1)  # right without a reset, or refused
            except RuntimeError as error:
                refused.append(str(error))
                twins.ctx.reset()
                twins.check_rest()
                twins.model.zero_grad()
                twins.train(1)

        failed: set[str] = set()
        refused: list[str] = []
        for of_collectives in (False, True):
            fault = Fault(device, of_collectives)
            positions = fail_everywhere(fault, step, recover)
            assert 0 < len(refused) < positions
            assert all(UNFINISHED in each for each in refused)
            refused.clear()
            failed |= fault.kinds
            twins.model.zero_grad()
        assert not device.findings, "\n".join(map(str, device.findings))
        return failed, device.issued


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (2, {"layout": TensorAtomic(), "prefetch": 0}), (4, COPIES)],
)
def test_after_a_fault_on_all_ranks_the_numbers_are_right(
    world_size: int, options: dict[str, Any]
) -> None:
    claim = partial(fail_with_values, **options)
    seen = run_ranks(claim, world_size, backend=BACKEND, timeout=120)
    assert not any(ALWAYS - failed for failed, _ in seen)
    assert compare_issued([issued for _, issued in seen]) is None


def raise_in_hooks(is_manual: bool) -> None:
    """On a device hooks run where reductions are issued, before anything waits for them."""
    with running(EmulatedDevice()) as device:
        twins = Trained.of("layers")
        twins.model.set_manual_backward_finalization(is_manual)
        tokens, targets = map(twins.mine, next(twins.batches(1)))

        def finalize() -> None:
            if is_manual:
                twins.model.finalize_backward()

        def step() -> None:
            loss_of(twins.model(tokens), targets).backward()
            finalize()

        for parameter in twins.model.parameters():
            hook = parameter.register_post_accumulate_grad_hook(raise_planned)
            with pytest.raises(PlannedError):
                step()
            hook.remove()
            for refused in (lambda: twins.model(tokens), *[finalize] * is_manual):
                with pytest.raises(RuntimeError, match=UNFINISHED):
                    refused()
            twins.ctx.reset()
            twins.model.zero_grad()
            for batch in twins.batches(2):
                twins.backward(*batch)
                finalize()
                twins.check_gradients()
                twins.check_rest()
                twins.step()
        assert not device.findings, "\n".join(map(str, device.findings))


def raise_planned(_: torch.Tensor) -> None:
    raise PlannedError


@pytest.mark.slow
@pytest.mark.parametrize("is_manual", [False, True])
def test_a_hook_that_raised_on_a_device_is_not_forgotten(is_manual: bool) -> None:
    run_ranks(raise_in_hooks, 2, is_manual, backend=BACKEND, timeout=120)


def reset_twice() -> None:
    """Rank 0 is late to compare itself, when the other has come to its next reset already."""
    apart = ErrorMonitor._apart

    def late(*args: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(0.3)
        return apart(*args)

    with running(EmulatedDevice()):
        twins = Trained.of("layers")
        twins.train(1)
        with patch.object(ErrorMonitor, "_apart", late):
            twins.ctx.reset()
            twins.ctx.reset()
        twins.train(1)


def test_a_reset_compares_ranks_as_they_were_when_they_met() -> None:
    run_ranks(reset_twice, 2, backend=BACKEND)
