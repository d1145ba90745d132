"""One rank whose collectives run on its backend all the same: NCCL's on one GPU.

What one rank's training does without is tried here: communicators, their ends, and their memory.
The same programs run on the emulated device, by the group that behaves as NCCL's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter, ShardStager
from fsdp_overlap.checkpoint.staged_save import StagingBuffers
from fsdp_overlap.comm import process_groups
from fsdp_overlap.comm.collectives import RaggedTensorCollectives
from fsdp_overlap.comm.comm_streams import streams_of
from fsdp_overlap.comm.host_copies import D2HCopy
from fsdp_overlap.comm.process_groups import backend_of, collectives_issued
from fsdp_overlap.engine import param_group
from fsdp_overlap.features.symmetric_memory import SymmetricCollectives
from fsdp_overlap.optim import AdamW, Muon
from fsdp_overlap.tools.emulator import EmulatedDevice, running
from fsdp_overlap.tools.emulator.nccl_like import BACKEND
from support.emulated_twins import Trained
from support.layouts import LAYOUTS
from support.nccl_like import chosen_as_for_nccl
from support.ranks import run_ranks
from support.symmetric import Symmetric
from support.twins import Twins

DEVICES = pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
)

OPTIONS: dict[str, Any] = {"optimizer": AdamW}
MUON: dict[str, Any] = {"optimizer": Muon, "ns_dtype": torch.float64}


@contextmanager
def one_rank(device: str, symmetric: bool = False) -> Iterator[Callable[..., Twins]]:
    """Gives what makes twins on ``device``, whose one rank communicates."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(process_groups, "one_rank_communicates", True))
        if device == "cuda":
            yield lambda **options: Twins.of("layers", device=device, **(OPTIONS | options))
            return
        stack.enter_context(chosen_as_for_nccl())
        found = stack.enter_context(running(EmulatedDevice()))
        if symmetric:
            stack.enter_context(Symmetric())
        yield lambda **options: Trained.of("layers", **(OPTIONS | options))
        assert not found.findings, found.findings[0]


def run_one(program: Callable[..., str | None], device: str, *args: Any) -> None:
    """Runs ``program``, which returns a reason if the machine lacks what it needs."""
    backend = "nccl" if device == "cuda" else BACKEND
    [reason] = run_ranks(program, 1, device, *args, backend=backend)
    if reason:
        pytest.skip(reason)


def comm_streams(twins: Twins) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    groups = twins.ctx.groups
    assert groups.gather is not groups.reduce
    return groups.gather, groups.reduce


def all_use(twins: Twins, kind: type) -> bool:
    param_groups = [param_group for unit in twins.ctx.units for param_group in unit.param_groups]
    return all(isinstance(param_group.collectives, kind) for param_group in param_groups)


def forget_gradients(twins: Twins) -> None:
    for optimizer in (twins.optimizer, twins.twin_optimizer):
        optimizer.zero_grad()


def communicate(device: str, layout: str) -> None:
    for options in (OPTIONS, MUON):
        with one_rank(device) as make:
            twins = make(layout=LAYOUTS[layout], **options)
            twins.ctx.lazy_init()
            issued = [collectives_issued(group) for group in comm_streams(twins)]
            twins.train(3)
            for group, before in zip(comm_streams(twins), issued, strict=True):
                after = collectives_issued(group)
                assert before is not None
                assert after is not None
                assert after >= before + 3 * 4  # of each of the units, in each step
            assert twins.ctx.stats.order_checks == 3
            if device == "cuda":
                split = backend_of(twins.ctx.mesh.get_group(), device)
                assert split.comm_split_count() > 0


@pytest.mark.sampled(2)
@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_right_and_travels(device: str, layout: str) -> None:
    run_one(communicate, device, layout)


def travel_in_lists(device: str) -> None:
    """One rank's ranges are equal, so torch makes no group of them here; the calls are the same."""
    ragged = patch.object(param_group, "choose", lambda *given: RaggedTensorCollectives(given[-1]))
    with ragged, one_rank(device) as make:
        twins = make()
        twins.train(3)
        assert all_use(twins, RaggedTensorCollectives)


@DEVICES
def test_lists_travel_asynchronously(device: str) -> None:
    run_one(travel_in_lists, device)


def reset(device: str) -> None:
    with one_rank(device) as make:
        twins = make()
        twins.train(2)
        before = comm_streams(twins)
        twins.ctx.mesh_infos[0].group_cache.abort(before[1].group_name)
        twins.ctx.reset()
        forget_gradients(twins)
        twins.train(2)
        after = comm_streams(twins)
        assert after[0] is before[0]
        assert after[1] is not before[1]


@DEVICES
def test_after_an_abort_and_a_reset_a_new_group_is_used(device: str) -> None:
    run_one(reset, device)


def destroy(device: str) -> None:
    with one_rank(device) as make:
        for _ in range(3):
            twins = make()
            twins.train(1)
            if device == "cuda":
                torch.cuda.synchronize()
            _, reduce = comm_streams(twins)
            del twins
            dist.destroy_process_group(reduce)


@DEVICES
def test_groups_are_destroyed_and_made(device: str) -> None:
    run_one(destroy, device)


def register(device: str) -> str | None:
    """Before any step: the communicators are there when the memory is."""
    with one_rank(device) as make:
        twins = make()
        for unit in twins.ctx.units:
            try:
                unit.modules[0].set_allocate_memory_from_process_group_for_comm(True)
            except ValueError as error:
                return str(error)
        twins.train(3)
        assert any(mesh_info.memories for mesh_info in twins.ctx.mesh_infos)
        twins.ctx.mesh_infos[0].group_cache.abort(comm_streams(twins)[1].group_name)
        twins.ctx.reset()
        forget_gradients(twins)
        twins.train(2)
    return None


@DEVICES
def test_memory_is_registered_before_the_first_step(device: str) -> None:
    run_one(register, device)


def save(device: str, folder: str) -> None:
    """The writer's thread copies one piece, and then training goes on."""
    copied: list[tuple[str, int, int, bool]] = []
    copy = StagingBuffers.copy

    def noting(copies: StagingBuffers, source: torch.Tensor) -> D2HCopy:
        streams = streams_of(source.device)
        before = streams.current_device()
        landing = copy(copies, source)
        thread = threading.current_thread().name
        copied.append((thread, before, streams.current_device(), landing.host.is_pinned()))
        return landing

    with one_rank(device) as make, patch.object(StagingBuffers, "copy", noting):
        twins = make()
        twins.train(2)
        expected = [parameter.detach().to_local().cpu() for parameter in twins.model.parameters()]
        stager = ShardStager(max_copied_bytes=0)  # none ahead of the writer
        saving: Any = dcp.async_save(
            {"model": twins.model.state_dict()},
            storage_writer=SafeFileSystemWriter(folder),
            async_stager=stager,
            process_group=dist.new_group(backend="gloo"),
        )
        twins.train(2)
        saving.upload_completion.result(30)
        assert {pinned for *_, pinned in copied} == {True}
        assert all(before == after for _, before, after, _ in copied)
        assert threading.current_thread().name not in {thread for thread, *_ in copied}
        dcp.load({"model": twins.model.state_dict()}, storage_reader=SafeFileSystemReader(folder))
        for parameter, saved in zip(twins.model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach().to_local().cpu(), saved, rtol=0, atol=0)


@DEVICES
def test_an_asynchronous_save_copies_in_a_thread_that_keeps_its_device(
    device: str, tmp_path: Path
) -> None:
    run_one(save, device, str(tmp_path))


def use_symmetric_memory(device: str) -> str | None:
    with one_rank(device, symmetric=True) as make:
        twins = make()
        for unit in twins.ctx.units:
            try:
                unit.modules[0].set_symm_mem_for_comm()
            except ValueError as error:
                return str(error)
        twins.train(3)
        assert all_use(twins, SymmetricCollectives)
    return None


@DEVICES
def test_symmetric_memory(device: str) -> None:
    run_one(use_symmetric_memory, device)
