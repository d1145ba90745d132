"""Genuine checkpoints load as by torch's own reader."""

from __future__ import annotations

import functools
import io
import pickle
import random
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_overlap.checkpoint import (
    SafeFileSystemReader,
    SafeFileSystemWriter,
    read_metadata,
)
from support.ranks import run_ranks
from support.tampering import assert_same, of_bytes
from support.zoo import Model

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


# ---- genuine checkpoints ----

DTYPES = """uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
complex32 complex64 complex128 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz
float8_e8m0fnu float4_e2m1fn_x2""".split()


def everything() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(8, 6)
    shared = torch.randn(5)
    return {
        "dtypes": {name: of_bytes(getattr(torch, name), 3, 5) for name in DTYPES},
        "bool": torch.rand(9) > 0.5,
        "0-dim": torch.tensor(1.5),
        "0-dim view": base[3, 4],
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 3, dtype=torch.int64),
        "empty columns": torch.empty(3, 0),
        "transposed": base.t(),
        "every other": base[::2, 1::3],
        "expanded": shared.expand(4, 5),
        "a row of a transposed": base.t()[:1],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "shared": [shared, shared[2:], shared.view(5, 1)],
        "parameter": nn.Parameter(torch.randn(3)),
        "empty before": [[], torch.ones(2)],
        "numbers": [0, 1, -1, 255, 256, -(1 << 31), 1 << 31, 1 << 100, -(1 << 100)],
        "number": -12,
        "large": 1 << 1000,
        "floats": [0.0, -0.0, 1.5, float("inf"), 1e-300],
        "complex": 1 - 2j,
        "text": "a text, \u00e4\U0001f600\n",
        "none": None,
        "bools": [True, False],
        "nested": [1, (2.0, ["x", (None, ())], {3})],
        "dicts": {"a": {"b": [{"c": 1}, {"d": []}]}, "5": {"e": 2}},
        "ordered": OrderedDict(z=1, a=(1, OrderedDict(y=2))),
        "tuple with dicts": ({"a": [1], 2: None, (1, "x"): 3, 1.5: 4}, {}),
        "tuple with tensors": (torch.ones(3), shared, base.t()),
        "sets": {1, "x", None, (2, 3)},
        "empty set": (set(),),
        "size": torch.Size([3, 4]),
        "sizes": (torch.Size([]),),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "devices": (torch.device("cuda", 1), torch.device("meta")),
    }


def blank(value: Any) -> Any:
    """Of the same structure as DCP sees it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.nbytes, dtype=torch.uint8).view(value.dtype).view(value.shape)
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list) and any(isinstance(i, (dict, list, torch.Tensor)) for i in value):
        return [blank(item) for item in value]
    return None


def plain_values() -> dict[str, Any]:
    """Those that are neither tensors nor numbers, and what trainers keep them in."""
    generator = np.random.default_rng(1)
    moment = datetime(2026, 11, 25, 2, 4, 57, 123456)
    return {
        "bytes": [b"", b"b", pickle.dumps({"epoch": 3}), bytes(range(256)) * 9000],
        "bytearray": (bytearray(), bytearray(b"x\xff")),
        "states of random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        "state of a generator": np.random.Generator(np.random.MT19937(3)).bit_generator.state,
        "another": generator.bit_generator.state,
        "numbers of numpy": [np.float64(0.5), np.int8(-3), np.bool_(True), np.complex64(1j)],
        "text of numpy": (np.str_("\u00e4b"), np.bytes_(b"a\0b")),
        "arrays": [
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.ones((2, 3))),
            np.zeros((0, 3)),
        ],
        "more arrays": (
            np.array(3),
            np.arange(3, dtype=">i4"),
            np.array(["a", "bc"]),
            np.eye(2)[1:],
        ),
        "times": [moment, moment.date(), moment.time(), timedelta(-1, 2, 3)],
        "zones": (
            moment.replace(tzinfo=UTC),
            moment.replace(tzinfo=timezone(timedelta(1) / 3, "x")),
        ),
        "paths": (Path("a"), Path("/a/b"), Path(), PurePosixPath("c"), PureWindowsPath("c:/d")),
        "ranges": [range(3), range(9, -5, -2), slice(None), slice(1, None, -1)],
        "frozen": (frozenset(), frozenset({(2, 3)})),
        "keys": ({Path("a"): 1, b"x": 2, moment: 3}, {timedelta(3)}),
        "nested": ({"a": [np.float32(1), (b"x", {"b": slice(0, 2)})]}, torch.ones(2)),
    }


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, SafeFileSystemWriter])
def test_plain_values_load_as_they_were(writer: Any, tmp_path: Path) -> None:
    state = plain_values()
    dcp.save(state, storage_writer=writer(tmp_path))
    loaded: dict[str, Any] = blank(state)
    dcp.load(loaded, storage_reader=SafeFileSystemReader(tmp_path))
    # Types, dtypes and elements. Arrays of another byte order come back in this machine's.
    for name, value in pickle.loads(pickle.dumps(state)).items():
        assert repr(loaded[name]) == repr(value), name
    arrays = zip(loaded["arrays"], state["arrays"], strict=True)
    assert all(one.flags.f_contiguous == other.flags.f_contiguous for one, other in arrays)
    loaded["arrays"][0][0] = 7  # they can be edited
    file = io.BytesIO(b"abc")
    file.seek(2)
    dcp.save({"file": file}, storage_writer=writer(tmp_path / "file"))
    dcp.load(loaded := {"file": None}, storage_reader=SafeFileSystemReader(tmp_path / "file"))
    assert (loaded["file"].tell(), loaded["file"].getvalue()) == (2, b"abc")


class Color(Enum):
    RED = 1


Pair = namedtuple("Pair", "first second")


def deep() -> dict[str, Any]:
    state: dict[str, Any] = {"x": torch.ones(1)}
    for _ in range(120):
        state = {"x": state}
    return state


REFUSED: dict[str, Callable[[], Any]] = {
    "an enum": lambda: Color.RED,
    "a named tuple": lambda: Pair(1, 2),
    "deep inside": lambda: ({"a": [1, (Color.RED,)]},),
    "a class": lambda: Color,
    "a function": lambda: len,
    "a lambda": lambda: lambda: 1,
    "an exception": lambda: ValueError("x"),
    "a generator": lambda: np.random.default_rng(1),
    "a generator of torch": torch.Generator,
    "an array of objects": lambda: np.array([None, 1], dtype=object),
    "an array of records": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "a large range": lambda: range(1 << 80),
    "a set of sets": lambda: {frozenset({1})},
    "a giant number": lambda: 1 << 5000,
    "deep tuples": lambda: functools.reduce(lambda inner, _: (inner,), range(120), ()),
    "a queue": lambda: deque([1]),
    "a tensor that conjugates": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    "deep keys": deep,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_reader_would_refuse_is_not_written(name: str, tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "it": REFUSED[name]()}
    for planner in (None, DefaultSavePlanner(flatten_state_dict=name == "deep keys")):
        with pytest.raises(CheckpointException, match="SafeFileSystemReader would refuse"):
            dcp.save(state, storage_writer=SafeFileSystemWriter(tmp_path), planner=planner)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["an enum", "a queue", "a quantized tensor"])
def test_one_value_that_is_refused_does_not_keep_the_others_from_loading(
    name: str, tmp_path: Path
) -> None:
    state = {"weight": torch.ones(2), "it": REFUSED[name]()}
    dcp.save(state, checkpoint_id=tmp_path)
    loaded = {"weight": torch.zeros(2), "it": None if name != "a quantized tensor" else state["it"]}
    reader = SafeFileSystemReader(tmp_path)
    with pytest.raises(CheckpointException, match=r"'it': .*(Leave it out|cannot copy)"):
        dcp.load(loaded, storage_reader=reader)
    assert not loaded["weight"].any()
    del loaded["it"]
    dcp.load(loaded, storage_reader=reader)
    assert loaded["weight"].all()


def refused_on_one_rank(folder: str) -> None:
    state = {"weight": torch.ones(2), "it": Color.RED if dist.get_rank() else 3}
    with pytest.raises(CheckpointException, match=r"'it', of type Color"):
        dcp.save(state, storage_writer=SafeFileSystemWriter(folder))
    dist.barrier()
    assert not list(Path(folder).rglob("*.distcp"))


def test_all_ranks_refuse_what_one_has(tmp_path: Path) -> None:
    run_ranks(refused_on_one_rank, 2, str(tmp_path))


def load_both(folder: Path, make: Callable[[], dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
    loaded = []
    for reader in (dcp.FileSystemReader(folder), SafeFileSystemReader(folder)):
        state = make()
        planner = DefaultLoadPlanner(**kwargs)
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())
        loaded.append(state)
    assert_same(*loaded)
    return loaded[1]


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, SafeFileSystemWriter])
def test_genuine_checkpoints_load_as_by_torch(writer: Any, tmp_path: Path) -> None:
    state = everything()
    dcp.save(state, storage_writer=writer(tmp_path), no_dist=True)
    loaded = load_both(tmp_path, lambda: blank(everything()))
    del state["parameter"], loaded["parameter"]
    assert_same(loaded, state)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_files_loads(threads: int, tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=threads > 1, thread_count=threads)
    dcp.save(everything(), storage_writer=writer, no_dist=True)
    load_both(tmp_path, lambda: blank(everything()))


def test_state_dicts_that_are_not_flattened_load_as_by_torch(tmp_path: Path) -> None:
    """Each of their dicts is one value, with tensors inside."""
    state = everything()
    del state["parameter"], state["shared"][1:]
    dcp.save(
        {"all": state, "plain": torch.ones(3)},
        storage_writer=dcp.FileSystemWriter(tmp_path),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    loaded = load_both(
        tmp_path,
        lambda: {"all": None, "plain": torch.zeros(3)},
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    assert_same(loaded["all"], state)
    first, second = loaded["all"]["shared"][0], loaded["all"]["tuple with tensors"][1]
    assert first.data_ptr() == second.data_ptr()


def test_a_state_dict_made_from_the_checkpoint_is_that_of_torch(tmp_path: Path) -> None:
    dcp.save(everything(), storage_writer=SafeFileSystemWriter(tmp_path), no_dist=True)
    loaded = [
        _load_state_dict_from_keys(storage_reader=reader)
        for reader in (dcp.FileSystemReader(tmp_path), SafeFileSystemReader(tmp_path))
    ]
    assert_same(*loaded)
    assert loaded[0]["empty before"][1].tolist() == [1, 1]


def test_large_metadata_and_values_load(tmp_path: Path) -> None:
    """Those that are looked through for holes."""
    state = {"x" * 600 + str(n): n for n in range(2000)} | {"text": "y" * (3 << 20)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    assert (tmp_path / ".metadata").stat().st_size > 1 << 20
    load_both(tmp_path, lambda: dict.fromkeys(state))


def test_metadata_is_that_of_torch(genuine: Path) -> None:
    ours, theirs = read_metadata(genuine), dcp.FileSystemReader(genuine).read_metadata()
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, item in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[name]
        assert type(item) is type(other)
        if isinstance(item, TensorStorageMetadata):
            assert item.properties.dtype == other.properties.dtype
            assert (item.size, item.chunks) == (other.size, other.chunks)


def sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = [torch.arange(35.0).view(7, 5), torch.arange(12).view(3, 4), torch.ones(1, 2)]
    state: dict[str, Any] = {
        f"{number}, {placement}": distribute_tensor(value, mesh, [placement])
        for number, value in enumerate(values)
        for placement in (Shard(0), Shard(1), Replicate())
    }
    torch.manual_seed(0)
    fsdp2 = Model()
    for layer in fsdp2.layers:
        torch_fully_shard(layer)
    torch_fully_shard(fsdp2)
    return state | {"fsdp2": fsdp2.state_dict(), "plain": torch.arange(3), "rank": 3}


def blank_sharded() -> dict[str, Any]:
    state = sharded()
    for value in [*state.values(), *state["fsdp2"].values()]:
        if isinstance(value, torch.Tensor):
            value.zero_()
    return state | {"rank": None}


def load_sharded(folder: str) -> None:
    dcp.save(sharded(), checkpoint_id=folder)
    assert_same(load_both(Path(folder), blank_sharded), sharded())


def test_sharded_tensors_of_torch_load_as_by_torch(tmp_path: Path) -> None:
    run_ranks(load_sharded, 2, str(tmp_path))
