"""Weights from files into shards: equal to those in the files, read by each rank in part."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap import CPUOffloadPolicy, FsdpContext, fully_shard
from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.optim import AdamW
from fsdp_overlap.weights import exchange, export_weights, file_reads, load_weights
from fsdp_overlap.weights.chunks import full_chunk, local_chunks
from fsdp_overlap.weights.model_weights import weights_of
from fsdp_overlap.weights.safetensors_format import INDEX
from support.fake_group import run_on_fake_group
from support.layouts import LAYOUTS
from support.ranks import run_ranks
from support.twins import COPIES, Twins
from support.zoo import Model, Tied, shard_layers


def files_of(model: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Write the weights of ``model``, times three, into two files and an index. Return them."""
    weights = {
        name: (tensor.detach() * 3).to(dtype or tensor.dtype).clone()
        for name, tensor in weights_of(model).items()
    }
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, its in halves.items():
        save_file({name: weights[name] for name in its}, folder / file)
    index = {name: file for file, its in halves.items() for name in its}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return weights


def check(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    exported = dict(export_weights(model))
    assert list(exported) == list(weights_of(model))
    for name, tensor in exported.items():
        assert torch.equal(tensor, weights[name].to(tensor.dtype)), name


def held_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    return sum(
        values.numel() * dtype.itemsize
        for tensor in weights_of(model).values()
        for _, values in local_chunks(tensor)
    )


def _loads(folder: str, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = Model()
    if dist.get_rank() == 0:
        files_of(model, Path(folder), dtype)
    weights = {name: (w.detach() * 3).to(dtype) for name, w in weights_of(model).items()}
    dist.barrier()
    shard_layers(model, FsdpContext(layout=LAYOUTS[layout]))
    with patch.multiple(file_reads, _GAP_BYTES=0, _STAGED_BYTES=64, _DIRECT_BYTES=96):
        loaded = load_weights(model, folder)
    check(model, weights)
    assert loaded.nbytes == held_bytes(model, dtype)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_reads_its_shards_and_nothing_else(
    layout: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    run_ranks(_loads, 3, str(tmp_path), layout, dtype)


def _on_one_of(folder: Path, layout: str, weights: dict[str, torch.Tensor]) -> None:
    model = Model()
    shard_layers(model, FsdpContext(layout=LAYOUTS[layout]))
    ranks = dist.get_world_size()
    with patch.object(exchange.WeightExchange, "gather", lambda _, own: [own] * ranks):
        loaded = load_weights(model, folder)
    for name, tensor in weights_of(model).items():
        for chunk, values in local_chunks(tensor):
            assert torch.equal(values, chunk.of(full_chunk(tensor.shape), weights[name])), name
    held = held_bytes(model, next(model.parameters()).dtype)
    assert held <= loaded.nbytes <= 1.05 * held


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_rank_of_many_reads_no_more(layout: str, ranks: int, tmp_path: Path) -> None:
    weights = files_of(Model(), tmp_path)
    run_on_fake_group(_on_one_of, ranks, tmp_path, layout, weights)


def _meta(folder: str) -> None:
    torch.manual_seed(3)
    plain = Model()
    if dist.get_rank() == 0:
        files_of(plain, Path(folder))
    weights = {name: w.detach() * 3 for name, w in weights_of(plain).items()}
    dist.barrier()
    with torch.device("meta"):
        model = Model()
        model.register_buffer("positions", torch.arange(4.0), persistent=False)
    weights |= {"plain.weight": torch.ones(1, 1), "plain.bias": torch.ones(1)}
    if dist.get_rank() == 0:
        extra = {name: weights[name] for name in ("plain.weight", "plain.bias")}
        save_file(extra, Path(folder) / "c.safetensors")
        (Path(folder) / INDEX).unlink()
    dist.barrier()
    shard_layers(model, FsdpContext())
    model.plain = nn.Linear(1, 1, device="meta")  # of no unit
    with pytest.raises(ValueError, match=r"  positions is a buffer on the meta device.*init_buff"):
        load_weights(model, folder)
    assert all(parameter.is_meta for parameter in model.parameters())

    def init(module: nn.Module) -> None:
        module.positions.copy_(torch.arange(4.0))

    load_weights(model, folder, init_buffers=init)
    check(model, weights)
    assert model.positions.tolist() == [0, 1, 2, 3]


def test_a_model_on_the_meta_device_gets_memory(tmp_path: Path) -> None:
    run_ranks(_meta, 2, str(tmp_path))


def _trains_on(folder: str, options: dict[str, Any], of_unit: dict[str, Any]) -> None:
    copies = COPIES if dist.get_world_size() == 4 else {}
    shard = partial(shard_layers, **of_unit)
    twins = Twins(Model, shard, optimizer=AdamW, **copies, **options)
    twins.train(2)
    if dist.get_rank() == 0:
        files_of(twins.twin, Path(folder))
    with torch.no_grad():
        for parameter in twins.twin.parameters():
            parameter.mul_(3)
    dist.barrier()
    loaded = load_weights(twins.model, folder, broadcast_replicas=bool(copies))
    is_copy = bool(copies) and dist.get_rank() >= 2
    assert (loaded.nbytes == 0) == is_copy
    twins.check_parameters(whole=True)
    twins.train(2)


@pytest.mark.parametrize(
    ("options", "of_unit"),
    [
        ({}, {}),
        ({"prefetch_next_forward": True}, {}),
        ({}, {"reshard_after_forward": False}),
        ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ],
    ids=["default", "prefetched", "kept", "offloaded"],
)
def test_training_goes_on_from_what_was_loaded(
    options: dict[str, Any], of_unit: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(_trains_on, 2, str(tmp_path), options, of_unit)


def test_of_replicas_one_reads_if_asked(tmp_path: Path) -> None:
    run_ranks(_trains_on, 4, str(tmp_path), {}, {})


class Fused(nn.Module):
    """Experts as one tensor, transposed, with gate and up side by side; q, k and v in one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(3, 4, 10))  # [expert, in, gate and up]
        self.qkv = nn.Linear(4, 8)
        self.half = nn.Linear(4, 3, bias=False)
        self.register_buffer("scale", torch.zeros(2))


def fuse(files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    experts = [
        torch.cat([files[f"experts.{n}.gate"], files[f"experts.{n}.up"]]).T for n in range(3)
    ]
    return {
        "experts": torch.stack(experts),
        "qkv.weight": torch.cat([files[f"{name}.weight"] for name in "qkv"]),
        "qkv.bias": torch.cat([files[f"{name}.bias"] for name in "qkv"]),
        "half.weight": files["both.weight"][3:],
        "scale": files["scale"],
    }


def _converts(folder: str, layout: str) -> None:
    torch.manual_seed(1)
    shapes = {f"experts.{n}.{kind}": (5, 4) for n in range(3) for kind in ("gate", "up")}
    sizes = {"q": 4, "k": 2, "v": 2}
    shapes |= {f"{name}.weight": (size, 4) for name, size in sizes.items()}
    shapes |= {f"{name}.bias": (size,) for name, size in sizes.items()}
    shapes |= {"both.weight": (6, 4), "scale": (2,)}
    files = {name: torch.randn(shape) for name, shape in shapes.items()}
    if dist.get_rank() == 0:
        save_file(files, Path(folder) / "model.safetensors")
    dist.barrier()
    model = Fused()
    fully_shard(model, FsdpContext(layout=LAYOUTS[layout]))
    load_weights(model, folder, convert=fuse)
    check(model, fuse(files))

    def adds(files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return fuse(files) | {"scale": files["scale"] + 1}

    with pytest.raises(ValueError, match=r"scale: aten.add.Tensor computes it, and only views"):
        load_weights(model, folder, convert=adds)
    check(model, fuse(files))


@pytest.mark.parametrize("layout", ["flat", "rows", "whole"])
def test_what_is_fused_stacked_or_transposed_is_read_in_parts(layout: str, tmp_path: Path) -> None:
    run_ranks(_converts, 3, str(tmp_path), layout)


def _ties(folder: str) -> None:
    model = Tied()
    whole = files_of(model, Path(folder)) if dist.get_rank() == 0 else {}
    dist.barrier()
    weights = {name: w.detach() * 3 for name, w in weights_of(model).items()}
    shard_layers(model, FsdpContext())
    first, other = "embedding.weight", "head.weight"
    if dist.get_rank() == 0:
        (Path(folder) / INDEX).unlink()
        for file in Path(folder).iterdir():
            file.unlink()
        save_file({other: whole.pop(first), **whole}, Path(folder) / "model.safetensors")
    dist.barrier()
    load_weights(model, folder)
    check(model, weights)


def test_a_tied_weight_may_have_either_name(tmp_path: Path) -> None:
    run_ranks(_ties, 2, str(tmp_path))


def _patterns(folder: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wanted = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    if dist.get_rank() == 0:
        in_file = {f"model.layers.{name}": tensor * 3 for name, tensor in wanted.items()}
        save_file(in_file, Path(folder) / "x.safetensors")
    dist.barrier()
    fully_shard(model, FsdpContext())
    load_weights(model, Path(folder) / "x.safetensors", names={r"^(\d)": r"model.layers.\1"})
    check(model, {name: tensor * 3 for name, tensor in wanted.items()})
    some = load_weights(
        model,
        folder,
        names=lambda name: None if "bias" in name else f"model.layers.{name}",
        strict=False,
    )
    assert some.unexpected_keys == ["model.layers.0.bias", "model.layers.1.bias"]


def test_names_may_be_patterns(tmp_path: Path) -> None:
    run_ranks(_patterns, 2, str(tmp_path))


def _problems(folder: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    fully_shard(model, FsdpContext())
    before = dict(export_weights(model))
    if dist.get_rank() == 0:
        in_file = {
            "0.weight": torch.zeros(3, 4),
            "0.bias": torch.zeros(3).to(torch.float8_e4m3fn),
            "count": torch.zeros(2),
            "1.weight": torch.zeros(3, 3),
            "extra": torch.zeros(1),
        }
        save_file(in_file, Path(folder) / "model.safetensors")
    dist.barrier()
    with pytest.raises(ValueError, match="nothing was loaded") as raised:
        load_weights(model, folder)
    assert str(raised.value).splitlines()[1:] == [
        "  count is torch.float32 in the files and torch.int64 in the model: only floating-point "
        "values of 16 bits and more are cast",
        "  0.weight has shape [3, 4] in the files, [3, 3] in the model",
        "  0.bias is torch.float8_e4m3fn in the files and torch.float32 in the model: only "
        "floating-point values of 16 bits and more are cast",
        "  no file has 1.bias",
        "  the model has no extra",
    ]
    check(model, before)


def test_all_that_differs_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    run_ranks(_problems, 2, str(tmp_path))


def _cut(path: Path) -> str:
    os.truncate(path, path.stat().st_size - 1)
    return "is cut off"


def _cut_header(path: Path) -> str:
    os.truncate(path, 20)
    return "is cut off within the header"


def _odd_dtype(path: Path) -> str:
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F3 "', 1))
    return "dtype F3 , which torch does not have"


def _overlaps(path: Path) -> str:
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    first = next(entry for name, entry in header.items() if name != "__metadata__")
    first["data_offsets"][1] += 1
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + length :])
    return "has shape .* and bytes"


def _missing(path: Path) -> str:
    path.unlink()
    return "No such file"


@pytest.mark.parametrize("damage", [_cut, _cut_header, _odd_dtype, _overlaps, _missing])
def test_a_damaged_file_is_named(damage: Callable[[Path], str], tmp_path: Path) -> None:
    model = Model()
    files_of(model, tmp_path)
    says = damage(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=rf"b\.safetensors.*{says}"):
        load_weights(model, tmp_path)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    model = Model()
    files_of(model, tmp_path)
    read = file_reads._read

    def written(*args: Any) -> None:
        read(*args)
        os.utime(tmp_path / "a.safetensors", ns=(1, 1))

    with (
        patch.object(file_reads, "_read", written),
        pytest.raises(CheckpointError, match=r"a\.safetensors was changed while it was read"),
    ):
        load_weights(model, tmp_path)


def _rank_fails(folder: str, broadcast: bool) -> None:
    twins = Twins(Model, shard_layers, **(COPIES if broadcast else {}))
    if dist.get_rank() == 0:
        files_of(twins.twin, Path(folder))
    dist.barrier()

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    read = fail if dist.get_rank() == 1 else file_reads._read
    with (
        patch.object(file_reads, "_read", read),
        pytest.raises(RuntimeError, match=r"load_weights: rank [0123] .*Input/output error"),
    ):
        load_weights(twins.model, folder, broadcast_replicas=broadcast)
    dist.barrier()
    load_weights(twins.model, folder, broadcast_replicas=broadcast)
    check(twins.model, {name: w.detach() * 3 for name, w in weights_of(twins.twin).items()})


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_rank_that_cannot_read_is_named_on_all(broadcast: bool, tmp_path: Path) -> None:
    run_ranks(_rank_fails, 4 if broadcast else 2, str(tmp_path), broadcast)


def _other_files(folder: str) -> None:
    model = Model()
    files_of(model, Path(folder) / str(dist.get_rank()))
    if dist.get_rank():
        path = Path(folder) / "1" / "c.safetensors"
        save_file({"extra": torch.zeros(1)}, path)
        (Path(folder) / "1" / INDEX).unlink()
    shard_layers(model, FsdpContext())
    with pytest.raises(ValueError, match="rank 1 has other files than rank 0"):
        load_weights(model, Path(folder) / str(dist.get_rank()))


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    run_ranks(_other_files, 2, str(tmp_path))


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    model = Model()
    weights = files_of(model, tmp_path)
    seen: list[tuple[int, int]] = []
    with patch.multiple(file_reads, _STAGED_BYTES=64, _DIRECT_BYTES=64):
        load_weights(model, tmp_path, progress=lambda *both: seen.append(both))
    total = sum(tensor.nbytes for tensor in weights.values())
    assert seen[-1] == (total, total)
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert not any(isinstance(tensor, DTensor) for tensor in model.parameters())
