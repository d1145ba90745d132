"""Genuine checkpoints load as by torch's own reader."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
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
