"""torch.distributed.checkpoint with sharded models: every tool, any number of ranks, FSDP2's
files."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import BlockAtomic, Flat, FsdpContext, RaggedDTensor, TensorAtomic, fully_shard
from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter
from fsdp_overlap.optim import AdamW
from support.checkpoints import (
    GROUPINGS,
    as_one,
    assert_same,
    build,
    by_torch,
    everything,
    resume,
    state_of,
    train,
    whole,
)
from support.ranks import run_ranks
from support.zoo import Model, shard_layers

# ---- any number of ranks, any grouping, any of the two libraries ----


def part_of_a_run(
    come_from: str | None, go_to: str, grouping: str, steps: range
) -> dict[str, torch.Tensor]:
    model, optimizer = build(1 if come_from is None else 2, GROUPINGS[grouping])
    if come_from is not None:
        resume(model, optimizer, come_from)
    train(model, optimizer, steps)
    dcp.save(state_of(model, optimizer), storage_writer=SafeFileSystemWriter(go_to))
    return everything(model, optimizer)


def test_a_run_that_is_resharded_on_its_way_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    expected = run_ranks(part_of_a_run, 2, None, str(tmp_path / "one"), "layers", range(6))[0]
    come_from = None
    parts = [
        (2, "layers", range(0, 2)),
        (4, "one unit", range(2, 4)),
        (3, "pairs", range(0)),  # a third of a gradient has no exact sum: moved, not trained
        (1, "layers", range(4, 5)),
        (2, "one unit", range(5, 6)),
    ]
    for i, (world_size, grouping, steps) in enumerate(parts):
        go_to = str(tmp_path / str(i))
        found = run_ranks(part_of_a_run, world_size, come_from, go_to, grouping, steps)
        come_from = go_to
    for end in found:
        assert_same(end, expected)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("FSDP2", "layers"),
        ("layers", "FSDP2"),
        ("layers", "not sharded"),
        ("not sharded", "one unit"),
    ],
)
def test_checkpoints_of_fsdp2_and_of_plain_modules_load_and_ours_load_there(
    tmp_path: Path, first: str, second: str
) -> None:
    folder, after = str(tmp_path / "first"), str(tmp_path / "second")
    saved = run_ranks(part_of_a_run, 2, None, folder, first, range(2))[0]
    for loaded in run_ranks(part_of_a_run, 3, folder, after, second, range(0)):
        assert_same(loaded, saved)


def with_plain_state_dicts(folder: str) -> None:
    """As one would write it without the helpers, and read by torch's own reader."""
    model, optimizer = build(1)
    train(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    other, other_optimizer = build(2, as_one)
    train(other, other_optimizer, range(1))  # makes the states to load into
    state = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    assert_same(everything(other, other_optimizer), everything(model, optimizer))
    assert other_optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_plain_state_dicts_are_saved_and_loaded(tmp_path: Path, world_size: int) -> None:
    run_ranks(with_plain_state_dicts, world_size, str(tmp_path))


def with_an_empty_parameter(folder: str) -> None:
    for layout in (Flat(), TensorAtomic(), BlockAtomic(rows=1)):
        model = nn.Sequential(nn.Linear(3, 2))
        model[0].nothing = nn.Parameter(torch.ones(0, 3))
        fully_shard(model, FsdpContext(layout=layout))
        path = f"{folder}/{type(layout).__name__}"
        dcp.save({"model": model.state_dict()}, storage_writer=SafeFileSystemWriter(path))
        dcp.load({"model": model.state_dict()}, storage_reader=SafeFileSystemReader(path))
        dcp.load({"model": model.state_dict()}, checkpoint_id=path)


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_without_elements_are_saved_and_loaded(tmp_path: Path, world_size: int) -> None:
    run_ranks(with_an_empty_parameter, world_size, str(tmp_path))


# ---- the helpers' options ----


def options(optimizer_class: type[torch.optim.Optimizer]) -> None:
    model, optimizer = build(1, optimizer=optimizer_class)
    train(model, optimizer, range(2))
    expected = everything(model, optimizer)
    rank = dist.get_rank()

    full = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=full)
    for name, value in model_state.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, expected[name])

    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_first = get_model_state_dict(model, options=offloaded)
    assert (not on_first) == (rank > 0)
    sharded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(type(value) is RaggedDTensor for value in sharded.values())

    # Whole state dicts on every rank, and on the first alone.
    other, other_optimizer = build(2, as_one, optimizer_class)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=copy.deepcopy(model_state),
        optim_state_dict=copy.deepcopy(optimizer_state),
        options=full,
    )
    assert_same(everything(other, other_optimizer), expected)
    for cpu_offload in (False, True):
        other, other_optimizer = build(3, as_one, optimizer_class)
        other(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        other_optimizer.zero_grad()
        broadcast = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload
        )
        given = copy.deepcopy(model_state) if rank == 0 else {}
        set_model_state_dict(other, given, options=broadcast)
        given = copy.deepcopy(optimizer_state) if rank == 0 else {}
        set_optimizer_state_dict(other, other_optimizer, given, options=broadcast)
        assert_same(everything(other, other_optimizer), expected)
        assert all(type(value) is RaggedDTensor for value in other.parameters())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.AdamW])
def test_the_options_of_the_state_dict_helpers_work(
    world_size: int, optimizer: type[torch.optim.Optimizer]
) -> None:
    run_ranks(options, world_size, optimizer)


def torchs_own_still_work() -> None:
    """What these helpers do with FSDP2's DTensors is as before."""
    model, optimizer = build(1, by_torch, torch.optim.AdamW)
    train(model, optimizer, range(1))
    expected = everything(model, optimizer)
    full = StateDictOptions(full_state_dict=True)
    state, optimizer_state = get_state_dict(model, optimizer, options=full)
    for broadcast in (False, True):
        other, other_optimizer = build(2, by_torch, torch.optim.AdamW)
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(other, copy.deepcopy(state), options=how)
        set_optimizer_state_dict(
            other, other_optimizer, copy.deepcopy(optimizer_state), options=how
        )
        assert_same(everything(other, other_optimizer), expected)


def test_the_state_dict_helpers_treat_fsdp2_as_before() -> None:
    run_ranks(torchs_own_still_work, 3)


def on_meta(broadcast: bool) -> None:
    model, _ = build(1)
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    with torch.device("meta"):
        other = Model()
    shard_layers(other, FsdpContext())
    other.to_empty(device="cpu")
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    given = dict(expected) if not broadcast or dist.get_rank() == 0 else {}
    set_model_state_dict(other, given, options=how)
    assert_same({name: whole(value) for name, value in other.state_dict().items()}, expected)


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_model_made_on_the_meta_device_is_filled(broadcast: bool) -> None:
    run_ranks(on_meta, 2, broadcast)


def flattened(folder: str) -> None:
    model, optimizer = build(1)
    train(model, optimizer, range(2))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=flat), checkpoint_id=folder)
    other, other_optimizer = build(2, as_one)
    state = get_optimizer_state_dict(other, other_optimizer, options=flat)
    dcp.load(state, storage_reader=SafeFileSystemReader(folder))
    set_optimizer_state_dict(other, other_optimizer, state, options=flat)
    other.load_state_dict(model.state_dict())
    assert_same(everything(other, other_optimizer), everything(model, optimizer))


def test_flattened_optimizer_states_are_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(flattened, 2, str(tmp_path))


# ---- while training goes on ----


def saved_asynchronously(folder: str) -> None:
    model, optimizer = build(1)
    train(model, optimizer, range(2))
    expected = everything(model, optimizer)
    # A group of the saving thread's own: ranks would not agree on the order of its collectives and
    # those of training.
    group = dist.new_group()
    saving = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder, process_group=group)
    done = getattr(saving, "upload_completion", saving)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    done.result()
    other, other_optimizer = build(2, as_one)
    resume(other, other_optimizer, folder)
    assert_same(everything(other, other_optimizer), expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_async_save_saves_what_was_there_when_it_was_called(
    tmp_path: Path, world_size: int
) -> None:
    run_ranks(saved_asynchronously, world_size, str(tmp_path))


# ---- memory and communication ----

MIB = 1 << 20


class Large(nn.Module):
    """One parameter of 192 MiB: a rank of two holds 96."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6 * 1024, 8 * 1024))


def peak_mib(action: Callable[[], object]) -> float:
    """How much more memory the process held at any moment of ``action`` than before it."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(key)))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = status("VmRSS")
    action()
    return (status("VmHWM") - before) / 1024


def memory_of_saving_and_loading(folder: str) -> tuple[float, float]:
    model = Large()
    ctx = FsdpContext(init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, ctx)
    with torch.no_grad():
        model.weight.to_local().fill_(1.5)
    # What each needs once, not for each byte.
    warm_up = {"small": torch.zeros(3)}
    dcp.save(warm_up, storage_writer=SafeFileSystemWriter(folder + "/warm_up"))
    dcp.load(warm_up, storage_reader=SafeFileSystemReader(folder + "/warm_up"))
    state = {"model": model.state_dict()}
    saving = peak_mib(lambda: dcp.save(state, storage_writer=SafeFileSystemWriter(folder + "/it")))
    with torch.no_grad():
        model.weight.zero_()
    loading = peak_mib(lambda: dcp.load(state, storage_reader=SafeFileSystemReader(folder + "/it")))
    assert bool((model.weight.to_local() == 1.5).all())
    assert ctx.stats.all_gathers == 0
    return saving, loading


def test_saving_and_loading_take_little_memory_and_no_gather(tmp_path: Path) -> None:
    for saving, loading in run_ranks(memory_of_saving_and_loading, 2, str(tmp_path)):
        assert saving < 16  # of 96
        assert loading < 16
