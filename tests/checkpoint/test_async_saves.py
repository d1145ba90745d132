"""Asynchronous saves with ``ShardStager``: what was there is saved, however training goes on."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, PerTensor, fully_shard
from fsdp_overlap.checkpoint import (
    SafeFileSystemReader,
    SafeFileSystemWriter,
    ShardedSavePlanner,
    ShardStager,
)
from fsdp_overlap.optim import AdamW, OverlapPolicy
from fsdp_overlap.tools.emulator import EmulatedDevice, fake_ranks, running
from support.checkpoints import (
    as_one,
    assert_same,
    build,
    by_layers,
    by_torch,
    everything,
    resume,
    state_of,
    train,
)
from support.emulated import Program
from support.ranks import run_ranks
from support.zoo import shard_layers

ENOUGH = 1 << 20  # bytes, for a copy of all that a rank has


class HeldWriter(SafeFileSystemWriter):
    """Writes no tensor before :attr:`go` is set, and fails at the first one if :attr:`fails`."""

    def __init__(self, path: str, fails: bool = False) -> None:
        super().__init__(path)
        self.go = threading.Event()
        self.planned = threading.Event()
        self.fails = fails

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        resolve = planner.resolve_data

        def resolve_held(item: Any) -> Any:
            self.planned.set()
            assert self.go.wait(30)
            if self.fails and item.tensor_data is not None:
                raise OSError("the disk is full")
            return resolve(item)

        with patch.object(planner, "resolve_data", resolve_held):
            return super().write_data(plan, planner)


def save(state: dict[str, Any], writer: Any, stager: ShardStager, **options: Any) -> Any:
    options.setdefault("process_group", dist.new_group())
    saving = dcp.async_save(state, storage_writer=writer, async_stager=stager, **options)
    return saving.upload_completion


def ended() -> None:
    """Waits until all saves that have ended are known to have."""
    for thread in threading.enumerate():
        if thread.name == "ShardStager":
            thread.join(30)


def nbytes(state: Any) -> int:
    """What this rank has of sharded tensors."""
    if isinstance(state, dict):
        return sum(map(nbytes, state.values()))
    return int(state.to_local().nbytes) if isinstance(state, DTensor) else 0


@contextmanager
def opened_by_waits(stager: ShardStager, writer: HeldWriter) -> Iterator[list[int]]:
    """The writer begins when a step waits for it. Gives what had been copied whenever one did."""
    changed = stager._buffers.changed
    wait, waits = changed.wait, []

    def wait_for_writer(timeout: float | None = None) -> bool:
        waits.append(stager._buffers.nbytes)
        writer.go.set()
        return wait(timeout)

    with patch.object(changed, "wait", wait_for_writer):
        yield waits


# ---- what is saved ----


def tied(model: Any) -> None:
    model.head.weight = model.embedding.weight
    fully_shard(model, FsdpContext())


def by_rows(model: nn.Module) -> None:
    fully_shard(model, FsdpContext(layout=PerTensor()))


def offloaded(model: nn.Module) -> None:
    fully_shard(model, FsdpContext(), offload_policy=CPUOffloadPolicy(pin_memory=False))


WAYS: dict[str, tuple[Callable[[Any], None], Any]] = {
    "our AdamW": (by_layers, AdamW),
    "torch's AdamW": (by_layers, partial(torch.optim.AdamW, fused=True)),
    "rows": (by_rows, AdamW),
    "stepped in backward": (by_layers, partial(AdamW, overlap=OverlapPolicy())),
    "offloaded": (offloaded, torch.optim.AdamW),
    "tied": (tied, AdamW),
    "FSDP2": (by_torch, torch.optim.AdamW),
}


def saved_beside_training(folder: str, way: str, room: int) -> None:
    shard, optimizer_class = WAYS[way]
    model, optimizer = build(1, shard, optimizer_class)
    model.register_buffer("seen", torch.zeros(3))
    train(model, optimizer, range(2))
    expected = everything(model, optimizer)
    state = state_of(model, optimizer) | {"step": 2, "steps": [torch.tensor(2.0), "two"]}
    mine = nbytes(state)
    stager, writer = ShardStager(room), HeldWriter(folder)
    with opened_by_waits(stager, writer) as waits:
        saving = save(state, writer, stager)
        model.seen += 1
        train(model, optimizer, range(2, 4))
    copied = stager._buffers.nbytes
    assert stager.peak_copied_bytes <= room
    if way == "FSDP2":  # not ours: copied within the call
        assert not waits
        assert stager.peak_copied_bytes == 0
    elif room < mine:
        assert waits
        assert max(waits) <= room
    else:
        assert not waits
        assert copied == mine
    writer.go.set()
    saving.result()
    assert stager._buffers.nbytes == 0
    loaded_by = {"our AdamW": by_torch, "tied": tied}.get(way, as_one)
    other, other_optimizer = build(2, loaded_by)
    other.register_buffer("seen", torch.ones(3))
    resume(other, other_optimizer, folder)
    assert_same(everything(other, other_optimizer), expected)
    others: dict[str, Any] = {"step": 0, "steps": [torch.zeros(()), ""]}
    dcp.load(others, checkpoint_id=folder)
    assert others == {"step": 2, "steps": [torch.tensor(2.0), "two"]}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", [ENOUGH, 1000], ids=["room for all", "little room"])
def test_what_was_there_is_saved_and_copies_stay_in_their_bound(
    tmp_path: Path, way: str, room: int
) -> None:
    run_ranks(saved_beside_training, 2, str(tmp_path), way, room)


def saved_twice_at_once(folder: str) -> None:
    model, optimizer = build(1)
    stager = ShardStager(ENOUGH)
    found = []
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        writer = HeldWriter(f"{folder}/{step}")
        state = state_of(model, optimizer)
        found.append((everything(model, optimizer), writer, save(state, writer, stager)))
    train(model, optimizer, range(2, 3))
    assert stager.peak_copied_bytes == 2 * nbytes(state_of(model, optimizer))
    for step in (1, 0):
        expected, writer, saving = found[step]
        writer.go.set()
        saving.result()
        other, other_optimizer = build(2, as_one)
        resume(other, other_optimizer, f"{folder}/{step}")
        assert_same(everything(other, other_optimizer), expected)
    assert stager._buffers.nbytes == 0


def test_two_saves_at_once_save_what_each_was_given(tmp_path: Path) -> None:
    run_ranks(saved_twice_at_once, 2, str(tmp_path))


def saved_by_one_of_two(folder: str, planner: Any) -> int:
    """Of copies, this rank holds those of the pieces that it writes."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(1, lambda model: shard_layers(model, FsdpContext(mesh)))
    train(model, optimizer, range(2))
    expected = everything(model, optimizer)
    stager, writer = ShardStager(ENOUGH), HeldWriter(folder)
    saving = save(state_of(model, optimizer), writer, stager, planner=planner())
    assert writer.planned.wait(30)
    train(model, optimizer, range(2, 4))
    writer.go.set()
    saving.result()
    other, other_optimizer = build(2, as_one)
    resume(other, other_optimizer, folder)
    assert_same(everything(other, other_optimizer), expected)
    assert 0 < stager.peak_copied_bytes < nbytes(state_of(model, optimizer))
    total = torch.tensor(stager.peak_copied_bytes)
    dist.all_reduce(total)
    assert total.item() == nbytes(state_of(model, optimizer))
    return stager.peak_copied_bytes


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, ShardedSavePlanner])
def test_of_copies_of_shards_one_is_copied(tmp_path: Path, planner: Any) -> None:
    run_ranks(saved_by_one_of_two, 2, str(tmp_path), planner)


# ---- edits that no step makes ----


def edit_parameter(model: Any, state: Any) -> None:
    with torch.no_grad():
        model.layers[1].up.weight.mul_(2)


def edit_memory(model: Any, state: Any) -> None:
    model.layers[1].up.weight.to_local().fill_(2)


def edit_many(model: Any, state: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.layers[1].parameters()), 2.0)


def edit_moments(model: Any, state: Any) -> None:
    state["optimizer"]["state"]["layers.1.up.weight"]["exp_avg"].zero_()


def load_moments(model: Any, state: Any) -> None:
    moments = state["optimizer"]["state"]["layers.1.up.weight"]["exp_avg"]
    moments.__create_chunk_list__()  # as a load does first


def load_weights(model: Any, state: Any) -> None:
    model.load_state_dict(model.state_dict())


EDITS = [edit_parameter, edit_memory, edit_many, edit_moments, load_moments, load_weights]


def edited(folder: str) -> None:
    model, optimizer = build(1)
    train(model, optimizer, range(1))
    stager = ShardStager(ENOUGH)
    for number, edit in enumerate(EDITS):
        for is_guarded in (False, True):
            writer = HeldWriter(f"{folder}/{number} {is_guarded}")
            state = state_of(model, optimizer)
            expected = everything(model, optimizer)
            saving = save(state, writer, stager)
            if is_guarded:
                stager.synchronize_staging()
            edit(model, state)
            writer.go.set()
            if is_guarded:
                saving.result()
                other, other_optimizer = build(2, as_one)
                resume(other, other_optimizer, f"{folder}/{number} {is_guarded}")
                assert_same(everything(other, other_optimizer), expected)
                continue
            with pytest.raises(dcp.CheckpointException) as raised:
                saving.result()
            for error, _ in raised.value.failures.values():
                assert "was edited while it was being saved" in str(error)
                assert ("layers.1." in str(error)) is (edit is not load_weights)
            ended()
            assert stager._buffers.nbytes == 0
            train(model, optimizer, range(1))


@pytest.mark.slow
def test_an_edit_past_every_guard_is_an_error_of_the_save(tmp_path: Path) -> None:
    run_ranks(edited, 2, str(tmp_path))


def edited_under_a_step(folder: str) -> None:
    """An edit before the step, of what the writer has taken already."""
    model, optimizer = build(1)
    train(model, optimizer, range(1))
    stager, writer = ShardStager(ENOUGH), HeldWriter(folder)
    saving = save(state_of(model, optimizer), writer, stager)
    edit_parameter(model, None)
    train(model, optimizer, range(1))
    assert stager._buffers.nbytes == 0  # of a save that has failed nothing is copied
    writer.go.set()
    with pytest.raises(dcp.CheckpointException, match="was edited while it was being saved"):
        saving.result()


def test_a_step_after_such_an_edit_copies_nothing(tmp_path: Path) -> None:
    run_ranks(edited_under_a_step, 2, str(tmp_path))


def loaded_by_rows(folder: str) -> None:
    """A load writes into the memory of a row, where nothing else counts it."""
    model, optimizer = build(1, by_rows)
    train(model, optimizer, range(1))
    dcp.save({"model": model.state_dict()}, storage_writer=SafeFileSystemWriter(folder + "/old"))
    stager, writer = ShardStager(ENOUGH), HeldWriter(folder + "/new")
    saving = save({"model": model.state_dict()}, writer, stager)
    assert writer.planned.wait(30)
    reader = SafeFileSystemReader(folder + "/old")
    dcp.load({"model": model.state_dict()}, storage_reader=reader)
    writer.go.set()
    with pytest.raises(dcp.CheckpointException, match="was edited while it was being saved"):
        saving.result()


def test_a_load_into_rows_is_an_edit(tmp_path: Path) -> None:
    run_ranks(loaded_by_rows, 2, str(tmp_path))


def edited_for_long() -> str:
    """An edit that begins before a piece is taken and is counted when others have been."""
    model, optimizer = build(1, as_one)
    train(model, optimizer, range(1))
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in list(model.parameters())[:3]]
    state = {str(number): each for number, each in enumerate(moments)}
    staged: Any = ShardStager(ENOUGH).stage(state).result()
    items = {n: [i.index for i in v.__create_write_items__(n, v)] for n, v in staged.items()}

    def take(name: str) -> None:
        for index in items[name]:
            staged[name].__get_tensor_shard__(index)

    take("0")
    take("1")
    increment_version(moments[0].to_local())
    with pytest.raises(RuntimeError) as raised:
        take("2")
    return str(raised.value)


def test_an_edit_that_lasts_for_several_pieces_is_found() -> None:
    assert run_ranks(edited_for_long, 1)[0].startswith("'0', or another")


# ---- saves that fail ----


def dropped() -> int:
    """What a step has copied of a save that nobody writes."""
    model, optimizer = build(1)
    train(model, optimizer, range(1))
    stager = ShardStager(ENOUGH)
    staged = stager.stage(state_of(model, optimizer))
    train(model, optimizer, range(1))
    assert stager._buffers.nbytes > 0
    del staged
    gc.collect()
    return stager._buffers.nbytes


def test_what_is_dropped_gives_its_room_back() -> None:
    assert run_ranks(dropped, 1) == [0]


def one_writer_again(folder: str) -> None:
    """The thread that has written before writes again: what it takes first is not freed."""
    model, optimizer = build(1, as_one)
    train(model, optimizer, range(1))
    writer, stager = SafeFileSystemWriter(folder), ShardStager(ENOUGH)
    for _ in range(2):
        staged = stager.stage({"w": model.head.weight}).result()
        dcp.save(staged, storage_writer=writer)
        whole = {"w": torch.zeros(model.head.weight.shape)}
        dcp.load(whole, storage_reader=SafeFileSystemReader(folder), no_dist=True)
        assert torch.equal(whole["w"], model.head.weight.full_tensor())


def test_a_thread_may_write_one_save_after_the_other(tmp_path: Path) -> None:
    run_ranks(one_writer_again, 1, str(tmp_path))


def test_a_writer_goes_to_another_process(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(SafeFileSystemWriter(tmp_path)))
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert (tmp_path / ".metadata").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("planner", [ShardedSavePlanner, dcp.DefaultSavePlanner])
def test_entries_that_a_thread_of_the_writer_loses_are_an_error(
    tmp_path: Path, planner: Any
) -> None:
    main = threading.current_thread()
    helped = threading.Event()
    resolve = dcp.DefaultSavePlanner.resolve_data

    def resolve_alone(self: Any, item: Any) -> Any:
        if threading.current_thread() is main:
            assert helped.wait(30)
            return resolve(self, item)
        helped.set()
        raise OSError("the disk is full")

    state = {str(number): torch.ones(number) for number in range(1, 9)}
    writer = SafeFileSystemWriter(tmp_path, thread_count=2)
    with (
        patch.object(dcp.DefaultSavePlanner, "resolve_data", resolve_alone),
        pytest.raises(dcp.CheckpointException, match=r"of 8 entries \d were written"),
    ):
        dcp.save(state, storage_writer=writer, planner=planner(), no_dist=True)


def failing(folder: str) -> None:
    model, optimizer = build(1)
    train(model, optimizer, range(1))
    stager = ShardStager(1000)
    writer = HeldWriter(f"{folder}/full", fails=dist.get_rank() == 1)
    with opened_by_waits(stager, writer):
        saving = save(state_of(model, optimizer), writer, stager)
        train(model, optimizer, range(1, 3))  # waits for what never comes
    with pytest.raises(dcp.CheckpointException, match="the disk is full"):
        saving.result()
    saving = save(state_of(model, optimizer), None, stager)  # nowhere
    train(model, optimizer, range(3, 4))
    with pytest.raises(Exception, match="must be specified"):
        saving.result()
    ended()
    assert stager._buffers.nbytes == 0
    expected = everything(model, optimizer)
    writer = HeldWriter(f"{folder}/good")
    writer.go.set()
    save(state_of(model, optimizer), writer, stager).result()
    other, other_optimizer = build(2, as_one)
    resume(other, other_optimizer, f"{folder}/good")
    assert_same(everything(other, other_optimizer), expected)


def test_a_save_that_fails_lets_go_of_everything_and_steps_go_on(tmp_path: Path) -> None:
    run_ranks(failing, 2, str(tmp_path))


def refused() -> None:
    model, optimizer = build(1)
    stager = ShardStager()
    staged = stager.stage(state_of(model, optimizer)).result()
    with pytest.raises(RuntimeError, match="async_checkpointer_type"):
        pickle.dumps(staged)
    value = stager.stage({"weight": model.head.weight}).result()["weight"]
    (item,) = value.__create_write_items__("weight", value)
    value.__get_tensor_shard__(item.index)
    with pytest.raises(RuntimeError, match="can be written once"):
        value.__get_tensor_shard__(item.index)
    with pytest.raises(ValueError, match="max_copied_bytes is a number of bytes, not -1"):
        ShardStager(-1)


def test_what_cannot_be_is_refused() -> None:
    run_ranks(refused, 1)


# ---- on a device with streams ----


def test_beside_a_save_a_step_makes_the_host_wait_nowhere() -> None:
    waits: list[str] = []

    def program() -> None:
        trained = Program()
        trained.train(2)
        batch = trained.batch()
        stager = ShardStager()
        staged = stager.stage({"model": trained.model.state_dict()})
        device.syncs.clear()
        trained.backward(batch)
        trained.step()
        waits.extend(map(str, device.syncs))
        assert staged.done()

    device = EmulatedDevice()
    with fake_ranks(4), running(device):
        program()
    assert waits == []
