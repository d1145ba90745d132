"""Whatever is damaged, on one rank or all: refused, or without effect."""

from __future__ import annotations

import contextlib
import re
import shutil
import struct
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_overlap import FsdpContext
from fsdp_overlap.checkpoint import (
    CheckpointError,
    SafeFileSystemReader,
    SafeFileSystemWriter,
)
from support.ranks import run_ranks
from support.tampering import (
    DATA,
    SHA,
    assert_same,
    check_failures,
    load,
    original,
    target,
    tensors,
)
from support.zoo import Model, shard_layers

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


# ---- any damage ----


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, int | None, float]:
    """A file, and a bit to flip or none, and where, in parts of the file."""
    name = draw(st.sampled_from([".metadata", SHA, DATA]))
    bit = draw(st.none() | st.integers(0, 7))
    return name, bit, draw(st.floats(0, 1, exclude_max=True))


def do(damage: tuple[str, int | None, float], folder: Path) -> None:
    name, bit, part = damage
    data = bytearray((folder / name).read_bytes())
    position = int(part * len(data))
    if bit is None:
        del data[position:]
    else:
        data[position] ^= 1 << bit
    (folder / name).write_bytes(data)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damages())
def test_whatever_is_flipped_or_cut_is_refused_or_does_not_matter(
    genuine: Path, tmp_path: Path, damage: tuple[str, int | None, float]
) -> None:
    folder = Path(shutil.copytree(genuine, tmp_path / "checkpoint", dirs_exist_ok=True))
    do(damage, folder)
    state = target()
    try:
        load(folder, state)
    except CheckpointException as error:
        check_failures(error)
        assert_same(state, target())
    else:
        assert_same(state, original())


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(damages().filter(lambda damage: damage[0] != SHA), min_size=1, max_size=3))
def test_without_a_checksum_the_metadata_may_lie_but_not_surprise(
    genuine: Path, tmp_path: Path, several: list[tuple[str, int | None, float]]
) -> None:
    """What is refused is refused as planned, and nothing is touched: where other names, numbers or
    shapes make sense as well, it is torch's planner that refuses."""
    folder = Path(shutil.copytree(genuine, tmp_path / "checkpoint", dirs_exist_ok=True))
    (folder / SHA).unlink()
    for damage in several:
        with contextlib.suppress(IndexError):  # nothing is left of that file
            do(damage, folder)
    state = target()
    try:
        load(folder, state)
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            assert type(failure) is CheckpointError or re.search(
                "Missing key in checkpoint|Size mismatch between saved|Invalid checkpoint metadata",
                str(failure),
            ), repr(failure)
        assert_same(state, target())


@pytest.mark.slow
def test_without_verification_only_the_elements_of_tensors_are_believed(folder: Path) -> None:
    """All damage of one bit: refused, without effect, or in the elements."""
    state = target()
    data = (folder / DATA).read_bytes()
    changed = 0
    for position in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 16
        (folder / DATA).write_bytes(flipped)
        reader = SafeFileSystemReader(folder, verify=False)
        try:
            dcp.load(state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            check_failures(error)
        else:
            assert (state["step"], state["name"]) == (7, "a run")
            changed += not all(map(torch.equal, tensors(state), tensors(original())))
    assert changed


# ---- ranks ----


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Model()
    shard_layers(model, FsdpContext())
    return model


def save_model(folder: str) -> None:
    state = {"model": build(1).state_dict()}
    dcp.save(state, storage_writer=SafeFileSystemWriter(folder))


def refuse_on_all_ranks(folder: str) -> list[str]:
    model = build(2)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model": model.state_dict()}, storage_reader=SafeFileSystemReader(folder))
    after = [parameter.to_local() for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    failures = caught.value.failures
    assert {type(error) for error, _ in failures.values()} == {CheckpointError}
    return [f"{rank}: {error}" for rank, (error, _) in failures.items()]


def test_one_damaged_file_is_refused_by_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run_ranks(save_model, 2, str(folder))
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    header = data.index(b"archive/data/0") - 30
    name, padding = struct.unpack("<2H", data[header + 26 : header + 30])
    data[header + 30 + name + padding] ^= 1
    file.write_bytes(data)
    first, second = run_ranks(refuse_on_all_ranks, 2, str(folder))
    assert first == second
    assert len(first) == 1
    assert re.match(r"1: .*/__1_0.distcp, 'model\..*' is damaged: the checksum of rec", first[0])


def test_one_missing_file_is_refused_by_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run_ranks(save_model, 2, str(folder))
    (folder / "__1_0.distcp").unlink()
    for failures in run_ranks(refuse_on_all_ranks, 2, str(folder)):
        assert [re.sub("No such.*", "", line) for line in failures] == [
            f"{rank}: {folder}/.metadata: {folder}/__1_0.distcp: " for rank in range(2)
        ]
