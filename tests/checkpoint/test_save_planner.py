"""Checkpoints that are planned without the first rank's help, beside those of torch's planner."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_overlap import (
    FsdpContext,
    PerTensor,
    RaggedShard,
    TensorAtomic,
    distribute_tensor,
    fully_shard,
)
from fsdp_overlap.checkpoint import (
    SafeFileSystemReader,
    SafeFileSystemWriter,
    ShardedSavePlanner,
    ShardStager,
    read_metadata,
)
from fsdp_overlap.tools.emulator import fake_ranks
from support import experts, tensor_parallel
from support.ranks import run_ranks
from support.zoo import Model, Odd, shard_layers, shard_odd


def save(state: dict[str, Any], folder: str, **options: Any) -> Metadata:
    planner, writer = ShardedSavePlanner(), SafeFileSystemWriter(folder)
    return dcp.save(state, storage_writer=writer, planner=planner, **options)


def failure(state: dict[str, Any], folder: str, **options: Any) -> str:
    with pytest.raises(dcp.CheckpointException) as raised:
        save(state, folder, **options)
    return "; ".join(str(error) for error, _ in raised.value.failures.values())


def entries(metadata: Metadata) -> dict[str, Any]:
    """What is said of each value, without the order of its parts."""
    found: dict[str, Any] = {}
    for fqn, value in metadata.state_dict_metadata.items():
        path = metadata.planner_data[fqn]
        if not isinstance(value, TensorStorageMetadata):
            found[fqn] = path
            continue
        parts = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks}
        filled = {part for part in parts if 0 not in part[1]} or parts
        found[fqn] = path, value.size, value.properties.dtype, filled
    return found


def loaded(folder: str) -> dict[str, Any]:
    """All tensors of a checkpoint, whole, as a process alone reads them with torch's reader."""
    whole: dict[str, Any] = {
        fqn: torch.full(value.size, 7, dtype=value.properties.dtype)
        for fqn, value in read_metadata(Path(folder)).state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(whole, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return whole


# ---- what is saved is what torch's planner saves ----


def layers(**options: Any) -> nn.Module:
    model = Model()
    shard_layers(model, FsdpContext(**options))
    return model


def odd() -> nn.Module:
    model = Odd()
    shard_odd(model, FsdpContext())
    return model


def by_torch() -> nn.Module:
    model = Model()
    for layer in model.layers:
        torch_fully_shard(layer)
    return torch_fully_shard(model)


def copied(**options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return layers(mesh=mesh, **options)


def copied_by_torch() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return torch_fully_shard(Model(), mesh=mesh)


def with_tensor_parallelism() -> nn.Module:
    mesh = tensor_parallel.make_mesh()
    model = tensor_parallel.parallelize(tensor_parallel.plain(), mesh["tp"])
    return tensor_parallel.shard(model, FsdpContext(mesh["dp"]))


def with_experts() -> nn.Module:
    whole, shards, ep = experts.meshes()
    model = experts.Moe(ep, with_dtensors=True)
    experts.shard(model, whole, shards, FsdpContext(whole))
    return model


MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "ranges": (3, layers),
    "rows": (3, lambda: layers(layout=PerTensor())),
    "whole matrices": (4, lambda: layers(layout=TensorAtomic())),
    "more ranks than elements": (4, odd),
    "FSDP2": (3, by_torch),
    "not sharded": (2, Model),
    "on one rank": (1, layers),
    "copies": (4, copied),
    "copies that are divided": (4, lambda: copied(shard_optimizer_over_replicas=True)),
    "copies of rows": (4, lambda: copied(layout=PerTensor())),
    "copies by FSDP2": (4, copied_by_torch),
    "tensor parallelism": (4, with_tensor_parallelism),
    "experts": (4, with_experts),
}


def saves_as_torch_does(name: str, folder: str) -> None:
    torch.manual_seed(5)
    model = MODELS[name][1]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach().clone()
    optimizer.step()
    rank = dist.get_rank()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "random": {f"rank {rank}": torch.arange(4) + rank, "of all": [1, {"seed": 2}]},
    }
    metadata = save(state, folder + "/ours")
    expected = dcp.save(state, storage_writer=SafeFileSystemWriter(folder + "/torch"))
    assert entries(metadata) == entries(expected)
    assert {index.fqn for index in metadata.storage_data} == entries(expected).keys()
    wholes = {
        f"model.{fqn}": value.full_tensor() if isinstance(value, DTensor) else value
        for fqn, value in state["model"].items()
        if isinstance(value, torch.Tensor)
    }
    dist.barrier()
    saved, others = loaded(folder + "/ours"), loaded(folder + "/torch")
    assert saved.keys() == others.keys()
    assert all(torch.equal(saved[fqn], others[fqn]) for fqn in saved)
    assert all(torch.equal(saved[fqn], value) for fqn, value in wholes.items())
    for each in range(dist.get_world_size()):
        assert torch.equal(saved[f"random.rank {each}"], torch.arange(4) + each)
    # The library's own reader admits it.
    dcp.load(state, storage_reader=SafeFileSystemReader(folder + "/ours"))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", MODELS)
def test_it_saves_what_torchs_planner_saves(name: str, tmp_path: Path) -> None:
    run_ranks(saves_as_torch_does, MODELS[name][0], name, str(tmp_path))


def written_bytes(folder: str) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = fully_shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), mesh=mesh)
    save(model.state_dict(), folder)
    dist.barrier()
    return {path.name: path.stat().st_size for path in Path(folder).glob("*.distcp")}


def test_ranks_with_copies_share_the_writing(tmp_path: Path) -> None:
    sizes = run_ranks(written_bytes, 4, str(tmp_path))[0]
    assert len(sizes) == 4
    assert max(sizes.values()) < 1.1 * min(sizes.values())


def stages(folder: str) -> None:
    """Two stages of a pipeline, which have nothing in common but the number of the step."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = Model()
    shard_layers(model, FsdpContext(mesh["dp"]))
    stage = f"stage {rank // 2}"
    state = {stage: model.state_dict(), "lr": {stage: 0.1 + rank // 2, "of all": 1}, "step": 3}
    save(state, folder)
    dist.barrier()
    saved = loaded(folder)
    assert {fqn.split(".")[0] for fqn in saved} == {"stage 0", "stage 1"}
    whole = {f"{stage}.{fqn}": value.full_tensor() for fqn, value in state[stage].items()}
    assert all(torch.equal(saved[fqn], value) for fqn, value in whole.items())
    read: dict[str, Any] = {"lr": {"stage 0": None, "stage 1": None, "of all": None}, "step": None}
    dcp.load(read, storage_reader=SafeFileSystemReader(folder), no_dist=True)
    assert read == {"lr": {"stage 0": 0.1, "stage 1": 1.1, "of all": 1}, "step": 3}


def test_stages_of_a_pipeline_save_together(tmp_path: Path) -> None:
    run_ranks(stages, 4, str(tmp_path))


def asynchronously(name: str, folder: str) -> None:
    model = MODELS[name][1]()
    expected = {f"model.{fqn}": value.full_tensor() for fqn, value in model.state_dict().items()}
    stager = ShardStager()
    saving = dcp.async_save(
        {"model": model.state_dict()},
        storage_writer=SafeFileSystemWriter(folder),
        planner=ShardedSavePlanner(),
        process_group=dist.new_group(),
        async_stager=stager,
    )
    stager.synchronize_staging()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.upload_completion.result()
    saved = loaded(folder)
    assert all(torch.equal(saved[fqn], value) for fqn, value in expected.items())


@pytest.mark.parametrize("name", ["ranges", "tensor parallelism"])
def test_it_plans_asynchronous_saves(name: str, tmp_path: Path) -> None:
    run_ranks(asynchronously, MODELS[name][0], name, str(tmp_path))


# ---- what cannot be saved is an error ----


def one_rank_leaves_a_tensor_out(folder: str) -> str:
    state = layers().state_dict()
    if dist.get_rank() == 2:
        state.popitem()
    told = failure(state, folder)
    assert not list(Path(folder).glob("*.distcp"))
    return told


def test_a_rank_that_leaves_a_tensor_out_is_named_before_anything_is_written(
    tmp_path: Path,
) -> None:
    for told in run_ranks(one_rank_leaves_a_tensor_out, 3, str(tmp_path)):
        assert "rank 2 of those that save has 20 tensors where rank 0 has 21" in told


def ranges_differ(folder: str) -> str:
    cut = 6 if dist.get_rank() == 0 else 7
    ranges = RaggedShard(((0, 0, cut), (1, cut, 10)))
    sharded = distribute_tensor(torch.ones(10), init_device_mesh("cpu", (2,)), [ranges])
    return failure({"w": sharded}, folder)


def test_ranks_that_cut_otherwise_are_named(tmp_path: Path) -> None:
    for told in run_ranks(ranges_differ, 2, str(tmp_path)):
        assert "or cut otherwise" in told


def not_all_save(folder: str) -> str | None:
    state = layers().state_dict()
    group = dist.new_group([0, 1])
    return failure(state, folder, process_group=group) if dist.get_rank() < 2 else None


def test_all_ranks_of_a_mesh_must_save(tmp_path: Path) -> None:
    for told in run_ranks(not_all_save, 3, str(tmp_path))[:2]:
        assert told is not None
        assert "lie over 3 ranks, of which 2 save them" in told


def experts_of_one_name(folder: str) -> str:
    """Each pair of ranks has an expert of its own, and all call it the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    torch.manual_seed(dist.get_rank() // 2)
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    told = failure(model.state_dict(), folder + "/experts")
    assert not Path(folder + "/experts/.metadata").exists()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    save(model.state_dict(), folder + "/copies")
    dist.barrier()
    assert torch.equal(loaded(folder + "/copies")["weight"], torch.ones(4, 4))
    return told


def test_of_one_name_on_several_meshes_there_may_be_copies_alone(tmp_path: Path) -> None:
    for told in run_ranks(experts_of_one_name, 4, str(tmp_path)):
        assert "'weight' has other values on some ranks" in told


def shared_by_stages(folder: str) -> str:
    """Stages of a pipeline that both have the embedding, each beside a tensor of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ones = distribute_tensor(torch.ones(8), mesh["dp"])
    return failure({"embedding": ones, f"stage {dist.get_rank() // 2}": ones}, folder)


def test_a_name_on_meshes_with_other_tensors_is_an_error(tmp_path: Path) -> None:
    for told in run_ranks(shared_by_stages, 4, str(tmp_path)):
        assert "'embedding' lies over several meshes" in told


def in_other_order(folder: str) -> None:
    state = layers().state_dict()
    named = list(state.items())
    save(dict(named if dist.get_rank() == 0 else reversed(named)), folder)
    dist.barrier()
    saved = loaded(folder)
    assert all(torch.equal(saved[fqn], value.full_tensor()) for fqn, value in named)


def test_the_order_of_names_does_not_matter(tmp_path: Path) -> None:
    run_ranks(in_other_order, 2, str(tmp_path))


def with_another_writer(folder: str) -> None:
    with pytest.raises(dcp.CheckpointException, match="needs storage_writer=SafeFileSystemWriter"):
        dcp.save(
            {"w": torch.ones(3)},
            storage_writer=dcp.FileSystemWriter(folder),
            planner=ShardedSavePlanner(),
        )


def test_another_writer_is_refused(tmp_path: Path) -> None:
    run_ranks(with_another_writer, 2, str(tmp_path))


class KnowsItself:
    """A value that says what is written of it."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        raise AssertionError


def test_a_value_that_alone_knows_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match=r"'model\.w' is a KnowsItself"):
        save({"model": {"w": KnowsItself()}}, str(tmp_path), no_dist=True)


# ---- it stays small ----


def test_what_a_rank_tells_does_not_grow_with_ranks_or_values(tmp_path: Path) -> None:
    def told(ranks: int, values: int) -> int:
        with fake_ranks(ranks):
            model = nn.Linear(64, 64)
            fully_shard(model, FsdpContext(init_device_mesh("cpu", (ranks,))))
            state = {"model": model.state_dict(), "optimizer": {str(n): n for n in range(values)}}
            planner = ShardedSavePlanner()
            planner.set_up_planner(state, SafeFileSystemWriter(tmp_path).storage_meta(), True)
            return len(pickle.dumps(planner.create_local_plan()))

    assert abs(told(2, 1) - told(1024, 1000)) < 10
    assert told(1024, 1000) < 500


def metadata_elsewhere(folder: str) -> None:
    metadata = save(layers().state_dict(), folder)
    sent = pickle.dumps(metadata)
    assert len(sent) < 1000
    assert entries(pickle.loads(sent)) == entries(read_metadata(Path(folder)))


def test_ranks_read_the_metadata_when_they_ask_for_it(tmp_path: Path) -> None:
    run_ranks(metadata_elsewhere, 2, str(tmp_path))
