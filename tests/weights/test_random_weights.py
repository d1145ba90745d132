"""Whole weights and any other placement, of random models on real ranks: bit for bit the values
that the models were made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.weights import (
    DeltaMessage,
    WeightDeltas,
    WeightResharder,
    apply_deltas,
    export_weights,
    load_weights,
)
from support.layouts import LAYOUTS
from support.ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
PLAIN, TENSOR, EXPERTS = "plain", "tensor parallelism", "experts"


@dataclass(frozen=True)
class Weight:
    """``cut`` is the dimension that tensor parallelism cuts, if there is any. ``placements`` is the
    target's: dimensions to cut, or ``None`` for copies. ``target`` says what the target is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_frozen: bool
    is_buffer: bool
    is_tied: bool
    is_left_out: bool
    cut: int | None
    target: str
    target_dtype: torch.dtype
    placements: tuple[int | None, int | None]


@dataclass(frozen=True)
class Drawn:
    """A model, how it lies over ranks, and what is asked of it. ``grid`` has the sizes of the mesh
    of targets, over the last ranks. The number in ``kind`` is along how many ranks units are
    cut beside data parallelism, or copied."""

    world: int
    kind: str
    second: int
    layout: str
    units: tuple[tuple[Weight, ...], ...]
    dtype: torch.dtype | None
    ranks: tuple[int, ...] | None
    piece_bytes: int | None
    prefetch: int
    grid: tuple[int, int]


@st.composite
def weights(draw: Any) -> Weight:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 9]), max_size=3)))
    return Weight(
        shape=shape,
        dtype=draw(st.sampled_from(DTYPES)),
        is_frozen=draw(st.booleans()),
        is_buffer=draw(st.integers(0, 5)) == 0,
        is_tied=draw(st.integers(0, 4)) == 0,
        is_left_out=draw(st.integers(0, 5)) == 0,
        cut=draw(st.sampled_from([None, *range(len(shape))])),
        target=draw(st.sampled_from(["placed", "placed", "whole", "columns"])),
        target_dtype=draw(st.sampled_from(DTYPES)),
        placements=(
            draw(st.sampled_from([None, *range(len(shape))])),
            draw(st.sampled_from([None, *range(len(shape))])),
        ),
    )


@st.composite
def drawn(draw: Any, world: int) -> Drawn:
    kind = draw(st.sampled_from([PLAIN, TENSOR, EXPERTS]))
    units = st.lists(weights(), min_size=1, max_size=4).map(tuple)
    some = st.sets(st.integers(0, world - 1), min_size=1).map(sorted).map(tuple)
    return Drawn(
        world=world,
        kind=kind,
        second=draw(st.sampled_from([n for n in (1, 2, 3, 4) if world % n == 0])),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        units=tuple(draw(st.lists(units, min_size=1, max_size=3))),
        dtype=draw(st.sampled_from([None, *DTYPES])),
        ranks=draw(st.none() | some),
        piece_bytes=draw(st.sampled_from([1, 40, 200, None])),
        prefetch=draw(st.integers(0, 2)),
        grid=draw(st.sampled_from([(a, b) for a in (1, 2) for b in (1, 2, 3) if a * b <= world])),
    )


def name_of(name: str, left_out: set[str]) -> str | None:
    return None if name in left_out else f"model.{name}"


class Check:
    """One example, on one rank. ``whole`` are the values, by name in the model."""

    def __init__(self, example: Drawn, folder: Path) -> None:
        self.example = example
        self.folder = folder
        self.whole: dict[str, torch.Tensor] = {}
        self.left_out: set[str] = set()
        self.of: dict[str, Weight] = {}
        sizes = example.world // example.second, example.second
        names = ("replicate", "shard") if example.kind == PLAIN else ("data", "second")
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.model = nn.Module()
        generator = torch.Generator().manual_seed(5)
        last: tuple[str, nn.Parameter] | None = None
        for at, unit in enumerate(example.units):
            module = nn.Module()
            self.model.add_module(f"unit{at}", module)
            for number, weight in enumerate(unit):
                name = f"w{number}"
                if weight.is_tied and last is not None and last[0] == f"unit{at}":
                    module.register_parameter(name, last[1])
                    continue
                values = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                self.whole[f"unit{at}.{name}"] = values
                self.of[f"unit{at}.{name}"] = weight
                if weight.is_left_out:
                    self.left_out.add(f"unit{at}.{name}")
                if weight.is_buffer:
                    module.register_buffer(name, values.clone())
                    continue
                parameter = nn.Parameter(self.cut(values, weight), not weight.is_frozen)
                module.register_parameter(name, parameter)
                last = f"unit{at}", parameter
        self.shard()

    def cut(self, values: torch.Tensor, weight: Weight) -> torch.Tensor:
        """A DTensor over the second dimension of the mesh, or a tensor of its own."""
        is_cut = weight.cut is not None and self.example.kind in (TENSOR, EXPERTS)
        if not is_cut:
            return values.clone()
        dim = 0 if self.example.kind == EXPERTS else weight.cut
        placements = [Shard(dim)]
        return distribute_tensor(values, self.mesh["second"], placements, src_data_rank=None)

    def shard(self) -> None:
        kind, layout = self.example.kind, LAYOUTS[self.example.layout]
        if kind == PLAIN and self.example.second < self.example.world:
            ctx = FsdpContext(self.mesh, layout=layout)
        elif kind == TENSOR:
            ctx = FsdpContext(self.mesh["data"], layout=layout)
        else:
            ctx = FsdpContext(layout=layout)
        for number, module in enumerate(self.model.children()):
            if not list(module.parameters()):
                continue
            if kind == EXPERTS and any(isinstance(p, DTensor) for p in module.parameters()):
                fully_shard(module, ctx, mesh=self.mesh["data"])
            elif number % 2:
                fully_shard(module, ctx)
        fully_shard(self.model, ctx)

    def wanted(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, values in self.whole.items():
            if name not in self.left_out:
                yield name, f"model.{name}", values

    def check(self) -> None:
        dtype, piece_bytes = self.example.dtype, self.example.piece_bytes
        deltas = WeightDeltas(
            self.model,
            dtype=dtype or torch.bfloat16,
            names=lambda name: name_of(name, self.left_out),
            delta_bytes=piece_bytes or 1000,
        )
        targets = {
            name: torch.full_like(values, 3, dtype=dtype or torch.bfloat16)
            for _, name, values in self.wanted()
        }
        for number in range(2):  # the second time by the plan that was kept
            self.check_export()
            self.check_deltas(deltas, targets, number)
            with torch.no_grad():
                for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                    tensor.mul_(2)
                    self.whole[name] = self.whole[name] * 2
        self.check_resharding()
        self.check_loading()

    def check_export(self) -> None:
        example = self.example
        exported = list(
            export_weights(
                self.model,
                dtype=example.dtype,
                ranks=example.ranks,
                names=lambda name: name_of(name, self.left_out),
                prefetch=example.prefetch,
                piece_bytes=example.piece_bytes,
            )
        )
        wanted = list(self.wanted())
        if example.ranks is not None and dist.get_rank() not in example.ranks:
            assert exported == []
            return
        assert sorted(name for name, _ in exported) == sorted(name for _, name, _ in wanted)
        got = dict(exported)
        for name, asked, values in wanted:
            expected = values.to(example.dtype or values.dtype)
            assert got[asked].dtype == expected.dtype, name
            assert torch.equal(got[asked], expected), name

    def check_deltas(
        self, deltas: WeightDeltas, targets: dict[str, torch.Tensor], version: int
    ) -> None:
        """What all ranks send, each value once."""
        each: list[Any] = [None] * self.example.world
        sent = list(deltas.changes(dense=self.example.prefetch == 2))
        dist.all_gather_object(each, sent)
        everything = [delta for of_rank in each for delta in of_rank]
        base = 0 if self.example.prefetch == 2 else version
        assert apply_deltas(targets, DeltaMessage(version + 1, base, everything), version)
        for name, asked, values in self.wanted():
            assert torch.equal(targets[asked], values.to(targets[asked].dtype)), name
            places = [d.positions() for d in everything if d.name == asked]
            numel = torch.cat(places).unique().numel() if places else 0
            assert sum(place.numel() for place in places) == numel, name

    def check_resharding(self) -> None:
        world, (rows, columns) = self.example.world, self.example.grid
        ranks = torch.arange(world - rows * columns, world).view(rows, columns)
        mesh = DeviceMesh("cpu", ranks)
        is_target = mesh.get_coordinate() is not None
        target: dict[str, torch.Tensor] = {}
        expected: dict[str, torch.Tensor] = {}
        if is_target:
            for name, asked, values in self.wanted():
                weight = self.of[name]
                right = values.to(weight.target_dtype)
                target[asked], expected[asked] = self.place(right, weight, mesh)
        resharding = WeightResharder(
            self.model,
            target or None,
            names=lambda name: name_of(name, self.left_out),
            piece_bytes=self.example.piece_bytes,
        )
        for _ in range(2):
            for tensor in target.values():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.fill_(-3)
            resharding.run()
            for asked, tensor in target.items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(local, expected[asked]), asked

    def check_loading(self) -> None:
        """From a file in other dtypes, into the model with its edits."""
        in_file: dict[str, torch.Tensor] = {}
        for name, asked, values in self.wanted():
            in_file[asked] = (values * 3).to(self.of[name].target_dtype)
            self.whole[name] = in_file[asked].to(values.dtype)
        path = self.folder / "model.safetensors"
        if dist.get_rank() == 0:
            save_file(in_file, path)
        dist.barrier()
        load_weights(
            self.model,
            path,
            names=lambda name: name_of(name, self.left_out),
            broadcast_replicas=self.example.prefetch == 1,
        )
        self.check_export()
        dist.barrier()

    def place(
        self, right: torch.Tensor, weight: Weight, mesh: DeviceMesh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A target for the values ``right``, and what its memory should hold."""
        if weight.target == "columns" and right.ndim:  # a part of what is fused along columns
            size = right.shape[-1]
            fused = right.new_zeros(*right.shape[:-1], size + 3)
            return fused[..., 1 : 1 + size], right
        if weight.target != "placed":
            return torch.zeros_like(right), right
        placements: list[Placement] = [
            Replicate() if dim is None else Shard(dim) for dim in weight.placements
        ]
        empty, held = (
            distribute_tensor(values, mesh, placements, src_data_rank=None)
            for values in (torch.zeros_like(right), right)
        )
        return empty, held.to_local()


def check_all(examples: list[Drawn], folder: Path) -> None:
    for example in examples:
        try:
            Check(example, folder).check()
        except Exception as error:
            raise AssertionError(f"rank {dist.get_rank()}: {example}: {error!r}") from error


# Nothing is shrunk: ranks that wait for each other would take minutes, and one model says enough.
@pytest.mark.slow
@settings(max_examples=4, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_random_models_on_real_ranks(data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 4))
    examples = data.draw(st.lists(drawn(world), min_size=6, max_size=6))
    with TemporaryDirectory() as folder:
        run_ranks(check_all, world, examples, Path(folder))
