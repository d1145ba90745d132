"""What torch's writers and readers of checkpoints do with sharded tensors: all is there, or it is
refused before anything is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import (
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_overlap import Flat, FsdpContext, PerTensor, TensorAtomic, fully_shard
from fsdp_overlap.checkpoint import (
    SafeFileSystemReader,
    SafeFileSystemWriter,
    ShardedSavePlanner,
    ShardStager,
)
from fsdp_overlap.tensor import ragged_dtensor
from support.checkpoints import as_one, assert_same, build, everything, state_of, train, whole
from support.layouts import LAYOUTS
from support.ranks import run_ranks
from support.tensor_parallel import parallelize, plain
from support.tensor_parallel import shard as shard_transformer


class Shapes(nn.Module):
    """Weights of one to four dimensions, which no number of ranks divides evenly."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(7, 5)
        self.conv = nn.Conv2d(3, 5, 3)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.column = nn.Parameter(torch.randn(11, 1))


def sharded(seed: int, **options: Any) -> Shapes:
    model = Shapes(seed)
    ctx = FsdpContext(**options)
    fully_shard(model.conv, ctx)
    fully_shard(model, ctx)
    return model


def assembled(folder: Path) -> dict[str, Any]:
    """The tensors whose chunks are in the files of ``folder``, each element exactly once."""
    found: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    tensors: dict[str, Any] = {}
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.distcp")]:
        if path.read_bytes().startswith(b"PK"):
            tensors["step"] = torch.load(path)
            continue
        with safe_open(path, "pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                chunk = offsets[name]["saved_offsets"], file.get_tensor(name)
                found.setdefault(name, []).append(chunk)
    for name, parts in found.items():
        ends = [[o + n for o, n in zip(at, part.shape, strict=True)] for at, part in parts]
        tensor = torch.full([max(each) for each in zip(*ends, strict=True)], math.nan)
        for at, part in parts:
            box = tensor[tuple(slice(o, o + n) for o, n in zip(at, part.shape, strict=True))]
            assert bool(box.isnan().all())
            box.copy_(part)
        tensors[name] = tensor
    return tensors


# ---- files of safetensors ----


def _huggingface(folder: str, layout: str, options: dict[str, Any]) -> None:
    with patch.object(ragged_dtensor, "_BYTES_OF_A_CHUNK", (16, 64)):  # as of large tensors
        model = sharded(0, layout=LAYOUTS[layout])
        expected = Shapes().state_dict()
        mapping = {name: 1 + number % 2 for number, name in enumerate(expected)}
        writer = HuggingFaceStorageWriter(
            folder, mapping, save_distributed=True, enable_consolidation=True, **options
        )
        dcp.save(dict(model.state_dict()), storage_writer=writer)
        assert_same(assembled(Path(folder) / "sharded"), expected)
        files = [load_file(path) for path in sorted(Path(folder).glob("*.safetensors"))]
        assert [set(each) for each in files] == [
            {name for name, number in mapping.items() if number == file} for file in (1, 2)
        ]
        assert_same(files[0] | files[1], expected)
        other = sharded(1, layout=LAYOUTS["blocks" if layout == "flat" else "flat"])
        for path in (folder, f"{folder}/sharded"):
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            reader = HuggingFaceStorageReader(path, options["thread_count"])
            dcp.load(other.state_dict(), storage_reader=reader)
            assert_same({name: whole(p) for name, p in other.named_parameters()}, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_huggingface_files_have_every_element_once(
    tmp_path: Path, layout: str, world_size: int
) -> None:
    run_ranks(_huggingface, world_size, str(tmp_path), layout, {"thread_count": world_size})


def _saved_over_another(folder: str) -> None:
    for layout in (Flat(), PerTensor()):
        model = sharded(0, layout=layout)
        writer = HuggingFaceStorageWriter(folder, save_distributed=True)
        dcp.save(dict(model.state_dict()), storage_writer=writer)
    assert_same(assembled(Path(folder)), Shapes().state_dict())


def test_no_file_is_left_of_a_save_before(tmp_path: Path) -> None:
    run_ranks(_saved_over_another, 2, str(tmp_path))


def _optimizer_and_copies(folder: str, **options: Any) -> None:
    model, optimizer = build(1, lambda model: fully_shard(model, FsdpContext(**options)))
    train(model, optimizer, range(2))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    state = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    state |= model.state_dict()
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    expected = {name: whole(value).clone() for name, value in state.items()}
    assert_same(assembled(Path(folder)), expected)


def _divided_copies(folder: str, divide: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _optimizer_and_copies(folder, mesh=mesh, shard_optimizer_over_replicas=divide)


@pytest.mark.parametrize("divide", [False, True])
def test_states_of_optimizers_and_copies_are_in_them(tmp_path: Path, divide: bool) -> None:
    run_ranks(_divided_copies, 4, str(tmp_path), divide)


def _tensor_parallel(folder: str) -> None:
    for layout in (Flat(), TensorAtomic(), PerTensor()):
        expected = {name: p.detach() for name, p in plain(dtype=torch.float32).named_parameters()}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(plain(dtype=torch.float32), mesh["tp"])
        shard_transformer(model, FsdpContext(mesh["dp"], layout=layout))
        path = f"{folder}/{type(layout).__name__}"
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save(dict(model.state_dict()), storage_writer=writer)
        assert_same(assembled(Path(path)), expected)


def test_tiles_of_tensor_parallelism_are_in_them(tmp_path: Path) -> None:
    run_ranks(_tensor_parallel, 4, str(tmp_path))


def _other_writers(folder: str, options: dict[str, Any]) -> None:
    state = dict(sharded(0).state_dict()) | {"step": 3}
    for make in (FileSystemWriter, SafeFileSystemWriter):
        path = f"{folder}/{make.__name__}"
        writer = make(path, serialization_format=SerializationFormat.SAFETENSORS, **options)
        group = dist.new_group()
        saving = dcp.async_save(
            state, storage_writer=writer, process_group=group, async_stager=ShardStager()
        )
        saving.upload_completion.result()
        found = assembled(Path(path))
        assert found.pop("step") == 3
        assert_same(found, Shapes().state_dict())


@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}], ids=str
)
def test_other_writers_of_safetensors_write_every_element(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    run_ranks(_other_writers, 2, str(tmp_path), options)


def _refused(folder: str) -> None:
    model = sharded(0)
    state = dict(model.state_dict())
    scalar = state | {"scale": torch.tensor(2.0)}

    def refuse(match: str, state: dict[str, Any], collectives: bool = True, **options: Any) -> None:
        writer = HuggingFaceStorageWriter(folder, **options)
        with pytest.raises((dcp.CheckpointException, ValueError), match=match):
            dcp.save(state, storage_writer=writer, use_collectives=collectives)
        dist.barrier()
        assert not [path for path in Path(folder).rglob("*") if path.is_file()]

    refuse("'.*' *: it is sharded, which needs save_distributed=True", state)
    refuse("same file, and 2 ranks", {f"{i}": torch.ones(3) for i in range(4)})
    refuse("'step': files of safetensors hold tensors alone", {"step": 3})
    both = {"save_distributed": True, "enable_consolidation": True}
    refuse(r"'scale': .*give it the shape \(1,\)", scalar, **both)
    refuse("with use_collectives=False", state, collectives=False, save_distributed=True)
    # What torch does right is as before.
    dcp.save(scalar, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    loaded: Any = {"scale": torch.tensor(0.0)}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(folder))
    assert loaded["scale"] == 2


def test_what_huggingface_files_would_lose_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    run_ranks(_refused, 2, str(tmp_path))


def _quantized(folder: str) -> None:
    torch.manual_seed(1)
    file = "model.safetensors"
    stored = {
        "0.weight": torch.randn(9, 20).to(torch.float8_e4m3fn),
        "0.weight_scale_inv": torch.rand(3, 5),
    }
    if dist.get_rank() == 0:
        save_file(stored, f"{folder}/{file}")
        index = json.dumps({"weight_map": dict.fromkeys(stored, file)})
        Path(f"{folder}/model.safetensors.index.json").write_text(index)
    dist.barrier()
    twin, model = (nn.Sequential(nn.Linear(20, 9, bias=False)) for _ in range(2))
    fully_shard(model, FsdpContext())
    for target in (twin, model):
        reader = QuantizedHuggingFaceStorageReader(folder, target_dtype=torch.float32, block_size=4)
        dcp.load(dict(target.state_dict()), storage_reader=reader)
    assert twin.state_dict()["0.weight"].unique().numel() > 50
    assert_same({name: whole(p) for name, p in model.named_parameters()}, twin.state_dict())


def test_quantized_files_load(tmp_path: Path) -> None:
    run_ranks(_quantized, 2, str(tmp_path))


# ---- metadata of each rank ----


def _without_collectives(folder: str, layout: str) -> None:
    def shard(model: Any) -> None:
        fully_shard(model, FsdpContext(layout=LAYOUTS[layout]))

    model, optimizer = build(1, shard)
    train(model, optimizer, range(2))
    state = state_of(model, optimizer) | {"scalar": fully_shard(Scalar(2.0)).state_dict()}
    dcp.save(state, checkpoint_id=folder, use_collectives=False)
    other, other_optimizer = build(2, shard)
    state = state_of(other, other_optimizer) | {"scalar": fully_shard(Scalar(0.0)).state_dict()}
    dcp.load(state, checkpoint_id=folder)
    assert whole(state["scalar"]["value"]) == 2
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert_same(everything(other, other_optimizer), everything(model, optimizer))


class Scalar(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["flat", "blocks", "rows", "padded"])
def test_what_is_saved_without_collectives_is_loaded(tmp_path: Path, layout: str) -> None:
    run_ranks(_without_collectives, 4, str(tmp_path), layout)


def _saved_so(folder: str) -> None:
    dcp.save(dict(sharded(0).state_dict()), checkpoint_id=folder, use_collectives=False)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "flat": lambda: sharded(1),
    "whole": lambda: sharded(1, layout=TensorAtomic()),
    "rows": lambda: sharded(1, layout=PerTensor()),
    "FSDP2": lambda: torch_fully_shard(Shapes(1)),
    "other names": lambda: fully_shard(nn.Sequential(Shapes(1)), FsdpContext()),
}


def _loaded_otherwise(folder: str, makes: list[str]) -> None:
    for make in makes:
        model = OTHERS[make]()
        before = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(dcp.CheckpointException, match=r"use_collectives=False|Missing key"):
            dcp.load(dict(model.state_dict()), checkpoint_id=folder)
        assert_same({name: whole(p).detach() for name, p in model.named_parameters()}, before)


def test_it_is_loaded_as_it_was_saved_or_not_at_all(tmp_path: Path) -> None:
    run_ranks(_saved_so, 3, str(tmp_path))
    run_ranks(_loaded_otherwise, 2, str(tmp_path), ["flat", "whole"])
    run_ranks(_loaded_otherwise, 3, str(tmp_path), ["whole", "rows", "FSDP2", "other names"])


def _incomplete(folder: str) -> None:
    state = dict(sharded(0).state_dict())
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    dist.barrier()
    if dist.get_rank() == 0:
        next(Path(folder).glob("shard-00001-*-part-1.safetensors")).unlink()
    dist.barrier()
    with pytest.raises(dcp.CheckpointException, match="files are missing"):
        dcp.load(
            dict(sharded(1, layout=PerTensor()).state_dict()),
            storage_reader=HuggingFaceStorageReader(folder),
        )


def test_a_file_that_is_missing_is_noticed(tmp_path: Path) -> None:
    run_ranks(_incomplete, 2, str(tmp_path))


def _safe_without_collectives(folder: str) -> None:
    model, _ = build(1, as_one)
    state = dict(model.state_dict())
    for planner in (None, ShardedSavePlanner()):
        writer = SafeFileSystemWriter(f"{folder}/new")
        with pytest.raises(ValueError, match="use torch's FileSystemWriter"):
            dcp.save(state, storage_writer=writer, planner=planner, use_collectives=False)
    assert not Path(f"{folder}/new").exists()
    dcp.save(state, checkpoint_id=folder, use_collectives=False)
    with pytest.raises(dcp.CheckpointException, match=r"use_collectives=False.* FileSystemReader"):
        dcp.load(state, storage_reader=SafeFileSystemReader(folder))


def test_the_safe_writer_refuses_to_save_so(tmp_path: Path) -> None:
    run_ranks(_safe_without_collectives, 2, str(tmp_path))
