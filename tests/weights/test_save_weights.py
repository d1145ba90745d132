"""Files of whole weights, as transformers loads them, written by all ranks."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.comm.comm_streams import mark_enqueued
from fsdp_overlap.comm.threads import thread_pool
from fsdp_overlap.optim import AdamW
from fsdp_overlap.tools.emulator import EmulatedDevice, Stream, running, stream
from fsdp_overlap.weights import save, save_weights
from fsdp_overlap.weights.safetensors_format import DTYPES, INDEX
from support import experts
from support import tensor_parallel as tp
from support.emulated import Seconds
from support.layouts import LAYOUTS
from support.ranks import run_ranks
from support.twins import COPIES, Twins
from support.zoo import Model, Tied, shard_layers


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All weights, each from the file that the index names."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())
    names = dict.fromkeys(index["weight_map"].values())
    assert sorted(names) == sorted(path.name for path in folder.glob("*.safetensors"))
    found = {name: load_file(folder / name) for name in names}
    weights = {name: found[file][name] for name, file in index["weight_map"].items()}
    assert sum(map(len, found.values())) == len(weights)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    return weights


def check(folder: Path, twin: nn.Module, dtype: torch.dtype = torch.float64) -> None:
    wanted = {name: parameter.detach().to(dtype) for name, parameter in twin.named_parameters()}
    found = loaded(folder)
    assert list(found) == list(wanted)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def _saves(folder: str, layout: str, options: dict[str, Any]) -> None:
    twins = Twins(Model, shard_layers, layout=LAYOUTS[layout])
    path = Path(folder) / "deep" / "weights"
    save_weights(twins.model, path, piece_bytes=256, **options)
    check(path, twins.twin, options.get("dtype", torch.float64))
    twins.train(1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_weights_come_from_a_device_in_pieces_beside_compute(dtype: torch.dtype) -> None:
    """Compute on other streams, which is not over, holds up no copy."""
    with running(EmulatedDevice(timing=Seconds({"mm": 100.0}))) as device:
        side, made = Stream(), (torch.randn(6, 7) > 0).to(dtype)
        with stream(side):
            weights = [made.to("emulated"), torch.zeros((), dtype=dtype, device="emulated")]
            copies, ready = save._HostCopies(side.device), mark_enqueued(side.device)
        torch.ones(4, 4, device="emulated") @ torch.ones(4, 4, device="emulated")
        outs = [io.BytesIO() for _ in weights]
        with patch.object(save, "_SLOT_BYTES", 10), thread_pool(1, side.device) as pool:
            for out, weight in zip(outs, weights, strict=True):
                pool.submit(save._write, out, weight, ready, copies).result()
        assert device.host.ends < device.default.ends
        assert not device.findings
    for out, weight in zip(outs, (made, torch.zeros((), dtype=dtype)), strict=True):
        assert out.getvalue() == bytes(weight.view(-1).view(torch.uint8).tolist())


def test_a_weight_of_which_a_write_fails_is_not_freed_under_its_copy() -> None:
    def fail(device: torch.device) -> None:
        weight, out = torch.ones(20, device=device), io.BytesIO()
        out.close()  # as a full disk, which raises too
        with pytest.raises(ValueError, match="closed"):
            save._write(out, weight, mark_enqueued(device), save._HostCopies(device))

    with running(EmulatedDevice()) as emulated, patch.object(save, "_SLOT_BYTES", 32):
        fail(torch.device("emulated", 0))
        torch.ones(20, device="emulated")
        assert not emulated.findings


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_files_have_an_index(layout: str, tmp_path: Path) -> None:
    run_ranks(_saves, 3, str(tmp_path), layout, {"file_bytes": 1000})
    files = sorted(path.name for path in (tmp_path / "deep" / "weights").iterdir())
    assert files[0] == f"model-00001-of-{len(files) - 1:05d}.safetensors"
    assert files[-1] == INDEX
    assert len(files) > 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_small_model_is_one_file_in_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    run_ranks(_saves, 2, str(tmp_path), "flat", {"dtype": dtype})
    [file] = (tmp_path / "deep" / "weights").iterdir()
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def _ties_and_copies(folder: str, **options: Any) -> None:
    twins = Twins(Tied, shard_layers, **options)
    save_weights(twins.model, folder, file_bytes=400)
    dist.barrier()  # ranks with copies have not waited
    check(Path(folder), twins.twin)


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    run_ranks(_ties_and_copies, 2, str(tmp_path))


def _with_copies(folder: str, divide: bool) -> None:
    _ties_and_copies(folder, shard_optimizer_over_replicas=divide, **COPIES)


@pytest.mark.parametrize("divide", [False, True])
def test_of_copies_one_is_written(divide: bool, tmp_path: Path) -> None:
    run_ranks(_with_copies, 4, str(tmp_path), divide)


def _every_dtype(folder: str) -> None:
    model = nn.Linear(1, 1)
    for number, dtype in enumerate(DTYPES):
        model.register_buffer(f"b{number}", torch.ones(2, 3).to(dtype))
    model.register_buffer("empty", torch.ones(0, 3))
    model.register_buffer("scalar", torch.tensor(3))
    wanted = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, FsdpContext())
    save_weights(model, folder)
    found = loaded(Path(folder))
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].view(-1).tolist() == tensor.view(-1).tolist()


def test_every_dtype_that_safetensors_knows(tmp_path: Path) -> None:
    run_ranks(_every_dtype, 2, str(tmp_path))


def _disk_is_full(folder: str) -> None:
    twins = Twins(Model, shard_layers)
    write = save._write
    written: list[int] = []

    def full(out: Any, *rest: Any) -> None:
        written.append(1)
        if twins.rank and len(written) == 3:
            raise OSError(28, "No space left on device")
        write(out, *rest)

    with (
        patch.object(save, "_write", full),
        pytest.raises(RuntimeError, match=r"save_weights: rank 1 could not write: .*No space"),
    ):
        save_weights(twins.model, folder, file_bytes=1000, piece_bytes=256)
    dist.barrier()
    assert list(Path(folder).iterdir()) == []
    twins.train(1)  # without a reset
    save_weights(twins.model, folder, file_bytes=1000)
    assert loaded(Path(folder))


def test_a_rank_that_cannot_write_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    run_ranks(_disk_is_full, 2, str(tmp_path))


def _not_empty(folder: str) -> None:
    model = Model()
    shard_layers(model, FsdpContext())
    kind = RuntimeError if dist.get_rank() else FileExistsError
    with pytest.raises(kind, match=r"has weights already, as model\.safetensors: name an empty"):
        save_weights(model, folder)


def test_weights_that_are_there_stay(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    run_ranks(_not_empty, 2, str(tmp_path))
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def _experts(folder: str) -> None:
    whole, shards, ep = experts.meshes()
    model, twin = experts.Moe(ep), experts.Moe(None)
    experts.shard(model, whole, shards, FsdpContext(whole))
    with pytest.raises(
        ValueError, match=r"'0.experts.weight' has other values on ranks \[1, 3\] than"
    ):
        save_weights(model, folder)
    part = ep.get_local_rank()
    save_weights(model, folder, names=lambda name: name.replace("experts", f"experts.{part}"))
    dist.barrier()
    found = loaded(Path(folder))
    for number, layer in enumerate(twin):
        both = torch.cat([found[f"{number}.experts.{k}.weight"] for k in range(2)])
        assert torch.equal(both, layer.experts.weight)


def test_experts_of_the_same_name_are_refused_and_written_by_names_of_their_own(
    tmp_path: Path,
) -> None:
    run_ranks(_experts, 4, str(tmp_path))


def _tensor_parallel(folder: str) -> None:
    mesh = tp.make_mesh()
    model = tp.parallelize(tp.plain(), mesh["tp"])
    model.norm_of_nobody = nn.LayerNorm(4).double()  # the same on all ranks of tensor parallelism
    tp.shard(model, FsdpContext(mesh["dp"]))
    twin = tp.plain()
    twin.norm_of_nobody = nn.LayerNorm(4).double()
    save_weights(model, folder, file_bytes=2000)
    check(Path(folder), twin)


def test_copies_on_the_ranks_of_tensor_parallelism_are_written_once(tmp_path: Path) -> None:
    run_ranks(_tensor_parallel, 4, str(tmp_path))


def _between_steps(folder: str) -> None:
    twins = Twins(Model, shard_layers, optimizer=AdamW, prefetch_next_forward=True, **COPIES)
    twins.train(2)
    save_weights(twins.model, folder)
    twins.train(2)


def test_ranks_that_do_not_write_train_on_with_those_that_do(tmp_path: Path) -> None:
    run_ranks(_between_steps, 4, str(tmp_path))


def _cannot_rename(folder: str) -> None:
    twins = Twins(Model, shard_layers)

    def rename(path: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")

    with (
        patch.object(Path, "rename", rename if twins.rank else Path.rename),
        pytest.raises(RuntimeError, match=r"save_weights: rank 1 could not write: .*Input/output"),
    ):
        save_weights(twins.model, folder, file_bytes=1000)
    dist.barrier()
    assert list(Path(folder).iterdir()) == []


def test_a_rank_that_cannot_name_its_files_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    run_ranks(_cannot_rename, 2, str(tmp_path))
