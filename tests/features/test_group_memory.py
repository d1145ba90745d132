"""Full buffers and reduce inputs in memory that the backend allocates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.features.group_memory import GroupMemory
from fsdp_overlap.tools.emulator import EmulatedDevice, active, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND, CollectiveCall, NcclLikeGroup
from support.emulated_twins import Trained
from support.ranks import run_ranks
from support.twins import COPIES, Twins, loss_of

STEPS = 100

operations: set[str] = set()
"""By which reduce-scatters reduced. NCCL uses registered memory for sums alone."""


def use_group_memory(twins: Twins, enable: bool = True) -> None:
    for unit in twins.ctx.units:
        unit.modules[0].set_allocate_memory_from_process_group_for_comm(enable)


@contextmanager
def seen(log: list[tuple[str, bool, int]]) -> Iterator[None]:
    """Notes of each gather and reduce-scatter: the kind, whether its group has registered the whole
    buffer, and where that lies."""
    run = NcclLikeGroup._run

    def noting(group: NcclLikeGroup, collective: CollectiveCall, *rest: Any) -> Any:
        kind, writes, reads, *_ = collective
        if kind.startswith("reduce_scatter"):
            operations.add(kind.split()[-1])
        for name, buffer in (("all_gather", writes[:1]), ("reduce_scatter", reads[:1])):
            if kind.startswith(name):
                place = active().address_of(buffer[0])
                log.append((name, group.has_registered(buffer[0]), place))
        return run(group, collective, *rest)

    with patch.object(NcclLikeGroup, "_run", noting):
        yield


def steps_of(twins: Twins, count: int) -> list[list[tuple[str, bool, int]]]:
    """What was seen in each of so many steps."""
    steps = []
    tokens, targets = map(twins.mine, next(twins.batches(1)))
    for _ in range(count):
        log: list[tuple[str, bool, int]] = []
        with seen(log):
            loss_of(twins.model(tokens), targets).backward()
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        steps.append(log)
    return steps


def trains(**options: Any) -> None:
    with running(EmulatedDevice()) as device:
        twins = Trained.of("layers", **options)
        use_group_memory(twins)
        twins.train(3)
        operations.clear()
        [step] = steps_of(twins, 1)
        assert {kind for kind, _, _ in step} == {"all_gather", "reduce_scatter"}
        assert all(is_registered for _, is_registered, _ in step)
        assert operations == {"SUM"}
        use_group_memory(twins, False)
        twins.optimizer.zero_grad()
        [step] = steps_of(twins, 1)
        assert not any(is_registered for _, is_registered, _ in step)
        assert "AVG" in operations
    assert not device.findings, device.findings[0]


def train_all() -> None:
    trains()
    trains(prefetch=0)
    trains(prefetch=2)


@pytest.mark.slow
def test_all_that_travels_is_registered_with_its_group_and_training_is_right() -> None:
    run_ranks(train_all, 2, backend=BACKEND)


def train_copies() -> None:
    trains(**COPIES)


def test_it_is_with_copies_too() -> None:
    run_ranks(train_copies, 4, backend=BACKEND)


def the_same_addresses() -> None:
    with running(EmulatedDevice()) as device:
        twins = Trained.of("layers")
        use_group_memory(twins)
        first, second, *others = steps_of(twins, STEPS)
        [pool] = {memory._pool for d in twins.ctx.mesh_infos for memory in d.memories.values()}
        segments = list(pool.segments)
        assert all(step == second for step in others)
        assert len(first) >= len(second)
        # Registered once: nothing more is taken from the device.
        reserved = device.allocator.reserved
        steps_of(twins, 2)
        assert pool.segments == segments
        assert device.allocator.reserved == reserved
        assert len(segments) == 2  # one for each stream that allocates
        assert twins.ctx.stats.peak_full_buffers <= 4


@pytest.mark.slow
def test_units_find_the_same_addresses_in_a_hundred_steps() -> None:
    run_ranks(the_same_addresses, 2, backend=BACKEND, timeout=200)


def after_a_reset() -> None:
    with running(EmulatedDevice()):
        twins = Trained.of("layers")
        use_group_memory(twins)
        twins.train(1)
        twins.ctx.reset()
        twins.train(1)
        [step] = steps_of(twins, 1)
        assert all(is_registered for _, is_registered, _ in step)


def test_it_is_registered_again_after_a_reset() -> None:
    run_ranks(after_a_reset, 2, backend=BACKEND)


def refused() -> None:
    model = fully_shard(nn.Linear(4, 4), FsdpContext())
    with pytest.raises(ValueError, match=r"allocates no memory on cpu .*leave the call out"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    assert model._fsdp_unit.settings.memory_of is None
    model.set_allocate_memory_from_process_group_for_comm(False)
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match="allocates no memory"):
        GroupMemory([group], model._fsdp_unit.context.device)


@pytest.mark.parametrize("backend", ["gloo", BACKEND])
def test_a_backend_without_memory_of_its_own_is_refused(backend: str) -> None:
    run_ranks(refused, 1, backend=backend)
