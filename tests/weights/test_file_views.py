"""Conversions of files' tensors, traced on the meta device: every element comes from where the same
program in plain torch takes it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_overlap.weights.chunks import full_chunk
from fsdp_overlap.weights.file_views import ViewTracer
from fsdp_overlap.weights.safetensors_format import FileTensor


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, FileTensor]:
    return {
        name: FileTensor(name, Path("file"), tensor.dtype, tuple(tensor.shape), 0)
        for name, tensor in tensors.items()
    }


def program(tensors: Mapping[str, torch.Tensor], draw: random.Random) -> torch.Tensor:
    """Some views, ``cat`` and ``stack``, the same for the same ``draw``."""
    x = tensors[draw.choice(sorted(tensors))]
    for _ in range(draw.randint(1, 6)):
        kind = draw.choice(["transpose", "cat", "stack", "narrow", "flatten", "interleave", "copy"])
        dim = draw.randrange(x.dim()) if x.dim() else None
        if kind == "stack":
            x = torch.stack([x, x], draw.randrange(x.dim() + 1))
        elif kind == "flatten":
            x = x.reshape(-1)
        elif kind == "copy":
            x = x.contiguous().unsqueeze(draw.randrange(x.dim() + 1))
        elif dim is None:
            continue
        elif kind == "transpose":
            x = x.transpose(dim, draw.randrange(x.dim()))
        elif kind == "cat":
            other = tensors["u"] if x.shape == tensors["v"].shape else x
            x = torch.cat([x, other, x], dim)
        elif kind == "narrow":
            start = draw.randrange(x.shape[dim])
            x = x.narrow(dim, start, draw.randint(1, x.shape[dim] - start))
        elif x.shape[dim] % 2 == 0:
            x = x.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).reshape(x.shape)
    return x


@given(st.integers(0, 2**32), st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=3))
def test_every_element_is_traced_to_its_place(seed: int, shape: list[int]) -> None:
    tensors = {"u": torch.randn(4, 6), "v": torch.randn(4, 6), "t": torch.randn(shape)}
    wanted = program(tensors, random.Random(seed))
    tracer = ViewTracer(described(tensors))
    with tracer:
        traced = program(tracer.tensors, random.Random(seed))
    found = torch.full(wanted.shape, torch.nan)
    for chunk, file_tensor, view in tracer.pieces(traced):
        source = tensors[file_tensor.name]
        target = chunk.of(full_chunk(found.shape), found)
        assert target.isnan().all()  # no element comes twice
        target.copy_(source.as_strided(view.shape, view.stride(), int(view.storage_offset())))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (lambda x: x + 1, "aten.add.Tensor computes it"),
        (lambda x: x.half(), "aten._to_copy.default computes it"),
        (lambda x: torch.cat([x, x.half()]), "aten.cat.default casts or permutes it"),
        (lambda x: torch.cat([x, x], out=torch.empty(8, 6, device="meta")), "cat.out writes to it"),
        (lambda x: x.view(torch.int32), "it is viewed in another dtype"),
        (lambda x: torch.cat([x, x]).view(torch.int16), "it is viewed in another dtype"),
        (lambda x: torch._neg_view(x), "negated"),
        (lambda x: x.as_strided((4, 6), (6, 1), 1), "beyond its end"),
        (lambda x: torch.zeros_like(x), "aten.zeros_like.default computes it"),
        (lambda x: torch.empty_like(x).copy_(x), "aten.copy_.default writes to it"),
    ],
)
def test_what_is_computed_is_refused(compute: object, says: str) -> None:
    tracer = ViewTracer(described({"u": torch.randn(4, 6)}))
    assert callable(compute)
    with tracer:
        traced = compute(tracer.tensors["u"])
    with pytest.raises(ValueError, match=says + ".*only views, cat, stack and copies"):
        list(tracer.pieces(traced))


def test_a_tensor_of_no_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor of a file is in it"):
        list(ViewTracer({}).pieces(torch.zeros(2, device="meta")))
