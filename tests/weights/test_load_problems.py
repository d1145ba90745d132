"""What cannot be loaded is refused on all ranks alike, and leaves what was there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.weights import export_weights, load_weights
from fsdp_overlap.weights.chunks import full_chunk
from fsdp_overlap.weights.file_views import ViewTracer
from fsdp_overlap.weights.safetensors_format import FileTensor
from support.opaque import FourBits
from support.ranks import run_ranks

WEIGHT = torch.arange(6.0).view(2, 3)


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Positions(nn.Module):
    """With a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("positions", torch.arange(3.0), persistent=False)


def fill(module: nn.Module) -> None:
    module.positions.copy_(torch.arange(3.0))


def _init_buffers(folder: str, defect: str) -> None:
    rank = dist.get_rank()
    with torch.device("meta"):
        model = Positions()
    fully_shard(model, FsdpContext())

    def init(module: nn.Module) -> None:
        if defect == "raises" and rank == 1:
            raise KeyError("boom")
        if defect == "forgets":
            return
        fill(module)

    kind: Any = KeyError if rank == 1 and defect == "raises" else RuntimeError
    match = "boom" if defect == "raises" else "gave no values to positions"
    for _ in range(2):  # no memory of the first is taken for values by the second
        with pytest.raises(kind, match=match):
            load_weights(model, folder, init_buffers=init)
        assert model.positions.is_meta
    load_weights(model, folder, init_buffers=fill)
    assert torch.equal(model.weight.full_tensor(), WEIGHT)
    assert model.positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize("defect", ["raises", "forgets"])
def test_buffers_without_values_are_refused(defect: str, tmp_path: Path) -> None:
    run_ranks(_init_buffers, 2, str(save(tmp_path, weight=WEIGHT)), defect)


def _replicas(folder: str, broadcast: bool, defect: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(3, 2)
    fully_shard(model, FsdpContext(mesh, sync_module_states=True))
    rank = dist.get_rank()
    path = Path(folder) / str(rank)
    names: Any = None
    if defect == "missing" and rank == 0:
        save(path, weight=WEIGHT, bias=torch.ones(2))
    elif defect != "missing":
        more = {"more": torch.ones(1)} if defect == "other" and rank else {}
        values = WEIGHT + (defect == "older" and rank)  # of another step
        save(path, weight=values, bias=torch.ones(2), **more)
    if defect == "names" and rank:
        names = lambda name: None if name == "bias" else name  # noqa: E731
    kind: Any = {
        "missing": CheckpointError if rank else RuntimeError,
        "other": ValueError,
        "older": ValueError,
        "names": ValueError,
    }[defect]
    match = {
        "missing": "No such file",
        "other": "rank 1 has other files than rank 0",
        "older": "rank 1 has other files than rank 0",
        "names": "rank 1 has other arguments than rank 0",
    }[defect]
    with pytest.raises(kind, match=match):
        load_weights(model, path, names=names, strict=False, broadcast_replicas=broadcast)


@pytest.mark.parametrize(
    ("broadcast", "defect"),
    [
        (False, "missing"),
        (True, "missing"),
        (False, "other"),
        (True, "other"),
        (False, "older"),
        (True, "names"),
    ],
)
def test_replicas_load_the_same_or_nothing(broadcast: bool, defect: str, tmp_path: Path) -> None:
    run_ranks(_replicas, 2, str(tmp_path), broadcast, defect)


def _sums(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(3, 2, bias=False)
    fully_shard(model, FsdpContext(mesh))
    sum_of_ranks = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    model.register_buffer("sums", sum_of_ranks)
    with pytest.raises(TypeError, match="are supported, and parts as distribute_tensor"):
        load_weights(model, folder)
    assert sum_of_ranks.to_local().tolist() == [1, 1]


def test_sums_that_are_still_to_be_taken_are_refused(tmp_path: Path) -> None:
    run_ranks(_sums, 2, str(save(tmp_path, weight=WEIGHT, sums=torch.ones(2))))


def test_a_weight_on_the_meta_device_that_is_left_out_stays_there(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.note = "kept"
    save(tmp_path, weight=WEIGHT)
    load_weights(model, tmp_path, names=lambda name: None if name == "bias" else name)
    assert model.bias.is_meta
    assert torch.equal(model.weight, WEIGHT)
    assert model.weight.note == "kept"
    model.weight.sum().backward()
    optimizer.step()  # has the parameter that got memory
    assert torch.equal(model.weight, WEIGHT - 1)


def test_what_is_referred_to_weakly_is_named(tmp_path: Path) -> None:
    lstm = nn.LSTM(2, 2)
    save(tmp_path, **{name: tensor.detach() for name, tensor in lstm.named_parameters()})
    with torch.device("meta"):
        model = nn.LSTM(2, 2)
    with pytest.raises(RuntimeError, match=r"weight_ih_l0 is of no unit.*nn.LSTM: call to_empty"):
        load_weights(model, tmp_path)
    load_weights(model.to_empty(device="cpu"), tmp_path)
    x = torch.ones(1, 1, 2)
    assert torch.equal(model(x)[0], lstm(x)[0])


def _quantized(folder: str) -> None:
    model = nn.Sequential(FourBits(torch.uint8), nn.Linear(16, 2, bias=False))
    fully_shard(model, FsdpContext())
    codes = dict(export_weights(model))["0.weight"]
    with pytest.raises(ValueError, match=r"0.weight is quantized.*load it before fully_shard"):
        load_weights(model, folder)
    load_weights(model, folder, names=lambda n: None if n == "0.weight" else n, strict=False)
    exported = dict(export_weights(model))
    assert torch.equal(exported["0.weight"], codes)
    assert torch.equal(exported["1.weight"], torch.ones(2, 16))


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    """Elements of other weights with the scales of these would be wrong without a word."""
    codes = FourBits(torch.uint8).weight.detach().clone().as_subclass(torch.Tensor)
    save(tmp_path, **{"0.weight": torch.zeros_like(codes), "1.weight": torch.ones(2, 16)})
    run_ranks(_quantized, 2, str(tmp_path))


class TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.two.weight = self.one.weight


def test_of_tied_weights_that_differ_in_the_files_none_is_taken(tmp_path: Path) -> None:
    model, names = TiedPair(), ("one.weight", "two.weight")
    save(tmp_path, **dict(zip(names, (WEIGHT, WEIGHT.clone()), strict=True)))
    load_weights(model, tmp_path)
    assert torch.equal(model.two.weight, WEIGHT)
    save(tmp_path, **dict(zip(names, (WEIGHT, WEIGHT + 1), strict=True)))
    with pytest.raises(ValueError, match=r"one.weight is one.weight and two.weight in the files"):
        load_weights(model, tmp_path, strict=False)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"num_threads": 0}, ValueError, "num_threads=0: give 1 or more"),
        ({"names": {".+": "weight"}}, ValueError, "names= gives weight and bias the name weight"),
        ({"convert": lambda _: None}, TypeError, "convert= returned a NoneType"),
        ({"convert": lambda _: {"weight": [1]}}, TypeError, "convert= made 'weight' a list"),
    ],
)
def test_wrong_arguments_change_nothing(
    options: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    save(tmp_path, weight=WEIGHT)
    with pytest.raises(error, match=says):
        load_weights(model, tmp_path, **options)
    assert model.weight.is_meta


class Wrapper(torch.Tensor):
    """Its elements are elsewhere."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_tensors_whose_class_alone_knows_their_elements_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("weight", Wrapper())
    save(tmp_path, weight=WEIGHT)
    with pytest.raises(TypeError, match="'weight' is a Wrapper, whose class alone knows"):
        load_weights(model, tmp_path)


def _shape(header: dict[str, Any]) -> None:
    header["weight"]["shape"] = [2.0, 3]


def _true(header: dict[str, Any]) -> None:
    header["weight"]["shape"] = [True, 6]


@pytest.mark.parametrize("damage", [_shape, _true])
def test_sizes_are_numbers(damage: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    import json

    path = save(tmp_path, weight=WEIGHT) / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    damage(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"model.safetensors.*shape and offsets of 'weight'"):
        load_weights(nn.Linear(3, 2, bias=False), tmp_path)


def test_of_interleaved_weights_the_ranks_part_alone_is_traced() -> None:
    tensors = {name: FileTensor(name, Path("f"), torch.float32, (4096, 2), 0) for name in "ab"}
    tracer = ViewTracer(tensors)
    with tracer:
        both = torch.stack([tracer.tensors["a"], tracer.tensors["b"]], 1).reshape(8192, 2)
    part = full_chunk((8192, 2))._replace(offsets=(4000, 0), sizes=(6, 2))
    assert len(list(tracer.pieces(part.of(full_chunk(both.shape), both)))) == 6
