"""``set_symm_mem_for_comm()``: what travels lies in memory that ranks have registered together.

No test here has run on a GPU: torch's symmetric memory is stood in for (`support.symmetric`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.tools.emulator import EmulatedDevice, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from fsdp_overlap.torch_internals import symmetric_memory
from support.emulated_twins import Trained
from support.ranks import expect_rank_errors, run_ranks
from support.symmetric import Symmetric
from support.twins import COPIES, Twins, loss_of
from support.zoo import Model, shard_layers

STEPS = 20


def use_symmetric_memory(twins: Twins) -> None:
    for unit in twins.ctx.units:
        unit.modules[0].set_symm_mem_for_comm()


def shards_after(twins: Twins, steps: int) -> list[torch.Tensor]:
    """This rank's parameters after so many steps, with evaluations between, of which one is the
    first forward of all."""
    for step, (tokens, targets) in enumerate(twins.batches(steps)):
        mine = twins.mine(tokens)
        if step % 3 == 0:
            with torch.inference_mode():
                twins.model.eval()(mine)
        loss_of(twins.model.train()(mine), twins.mine(targets)).backward()
        twins.optimizer.step()
        twins.optimizer.zero_grad()
    return [
        param_group.shard.clone() for unit in twins.ctx.units for param_group in unit.param_groups
    ]


def trains() -> None:
    with running(EmulatedDevice()) as device, Symmetric() as symmetric:
        expected = shards_after(Trained.of("dynamic order"), STEPS)
        assert symmetric.registered == []
        symmetric.travelled.clear()
        twins = Trained.of("dynamic order")
        use_symmetric_memory(twins)
        found = shards_after(twins, STEPS)
        assert all(map(torch.equal, found, expected))
        symmetric.check_equal()
        stats = twins.ctx.stats
        assert len(symmetric.travelled) == stats.all_gathers + stats.reduce_scatters
        # One piece for full buffers, one for reduce inputs, one for what is reduced.
        largest = max(
            param_group.full.nbytes for unit in twins.ctx.units for param_group in unit.param_groups
        )
        gather, reduce = twins.ctx.groups.gather.group_name, twins.ctx.groups.reduce.group_name
        assert gather != reduce
        sizes = [(gather, largest), (reduce, largest), (reduce, largest // 2)]
        assert symmetric.registered == sizes
        # A reset leaves the groups, and so the pieces, as they are.
        twins.ctx.reset()
        shards_after(twins, 1)
        assert symmetric.registered == sizes
    assert not device.findings, device.findings[0]


@pytest.mark.slow
def test_ranks_register_the_same_before_it_travels_and_nothing_twice_and_train_as_without() -> None:
    run_ranks(trains, 2, backend=BACKEND, timeout=200)


def trains_with(options: dict[str, Any], **twins: Any) -> None:
    with running(EmulatedDevice()) as device, Symmetric() as symmetric:
        trained = Trained(Model, partial(shard_layers, **options), **twins)
        use_symmetric_memory(trained)
        trained.train(2)
        assert symmetric.registered
    assert not device.findings, device.findings[0]


def trains_in_all_ways() -> None:
    trains_with({}, prefetch=0)
    trains_with({}, prefetch=2)
    trains_with({"offload_policy": CPUOffloadPolicy()})
    trains_with({}, ctx=FsdpContext(separate_reduce_scatter_group=False))


def trains_with_copies() -> None:
    trains_with({}, **COPIES)
    trains_with({}, shard_optimizer_over_replicas=True, **COPIES)
    trains_with({"reshard_after_forward": 2})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "claim"), [(2, trains_in_all_ways), (4, trains_with_copies)])
def test_training_equals_unsharded_training(ranks: int, claim: Callable[[], None]) -> None:
    run_ranks(claim, ranks, backend=BACKEND, timeout=200)


def without_registration(ranks: list[int]) -> None:
    with running(EmulatedDevice()), Symmetric(patience=1.0) as symmetric:
        twins = Trained.of("layers")
        use_symmetric_memory(twins)
        if twins.rank in ranks:
            with patch.object(symmetric_memory, "rendezvous", lambda *_: None):
                shards_after(twins, 1)
        else:
            shards_after(twins, 1)
        symmetric.check_equal()


def test_a_registration_that_is_left_out_is_found() -> None:
    expect_rank_errors(without_registration, 2, [0, 1], match="AssertionError", backend=BACKEND)


@pytest.mark.slow
def test_a_registration_on_one_rank_alone_is_found() -> None:
    with pytest.raises(AssertionError, match="not all ranks register piece 0"):
        run_ranks(without_registration, 2, [1], backend=BACKEND)


def refused() -> None:
    model = fully_shard(nn.Linear(4, 4), FsdpContext())
    with pytest.raises(ValueError, match=r"no symmetric memory on cpu.*out"):
        model.set_symm_mem_for_comm()
    assert model._fsdp_unit.settings.transport is None


@pytest.mark.parametrize("backend", ["gloo", BACKEND])
def test_groups_and_devices_without_it_are_refused(backend: str) -> None:
    run_ranks(refused, 1, backend=backend)


def refused_by_torch() -> None:
    with running(EmulatedDevice()), Symmetric() as symmetric:
        symmetric.set_backend("CUDA")

        def lacking(device: torch.device) -> None:
            raise RuntimeError("did not find backend")

        model = Trained.of("root only").model
        with (
            patch.object(symmetric_memory, "get_mem_pool", lacking),
            pytest.raises(ValueError, match=r"torch 2.* has no .*out \(did not find backend\)"),
        ):
            model.set_symm_mem_for_comm()
        assert symmetric.get_backend(torch.device("emulated")) == "CUDA"
        assert model._fsdp_unit.settings.transport is None


def test_a_torch_without_it_is_refused_and_left_as_it_was() -> None:
    run_ranks(refused_by_torch, 2, backend=BACKEND)


def refused_together() -> None:
    with running(EmulatedDevice()), Symmetric():
        for first, second, argument in (
            ("set_custom_all_gather", "set_symm_mem_for_comm", "NCCL"),
            ("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm", "NCCL"),
            ("set_symm_mem_for_comm", "set_custom_reduce_scatter", object()),
            ("set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm", True),
        ):
            model: Any = Trained.of("root only").model
            getattr(model, first)("NCCL" if first == "set_symm_mem_for_comm" else True)
            with pytest.raises(ValueError, match="and not both"):
                getattr(model, second)(argument)
        with pytest.raises(ValueError, match="use 'NCCL'"):
            Trained.of("root only").model.set_symm_mem_for_comm("CUDA")
        ragged = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).to("emulated")
        fully_shard(ragged, FsdpContext(layout=TensorAtomic()))
        with pytest.raises(ValueError, match=r"of which ranks hold .*layout=Flat\(\)"):
            ragged.set_symm_mem_for_comm()


def test_other_memory_other_backends_and_ragged_shards_are_refused() -> None:
    run_ranks(refused_together, 2, backend=BACKEND)
