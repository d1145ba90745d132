"""Messages of weight deltas, and their encoding as the content of safetensors files."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from fsdp_overlap.weights.safetensors_format import TORCH_DTYPES, header_of
from fsdp_overlap.weights.save import bytes_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightDelta(NamedTuple):
    """New values of some elements of a weight.

    ``values`` is flat. ``indices`` are the places of its elements in the full weight of ``shape``,
    flattened: int32, or int64 for a weight of more than 2**31 - 1 elements. If it is ``None``, they
    are adjacent, from ``start`` on.
    """

    name: str
    shape: tuple[int, ...]
    values: torch.Tensor
    indices: torch.Tensor | None = None
    start: int = 0

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def positions(self) -> torch.Tensor:
        """Return ``indices``, or those of adjacent values."""
        if self.indices is not None:
            return self.indices
        stop, dtype = self.start + self.values.numel(), index_dtype(self.shape)
        return torch.arange(self.start, stop, dtype=dtype, device=self.values.device)


@dataclass
class DeltaMessage:
    """What leads from the weights of version ``base`` to those of ``version``. If ``base`` is 0,
    ``deltas`` has all values of all weights, and applies to any version."""

    version: int
    base: int
    deltas: Iterable[WeightDelta]

    def __iter__(self) -> Iterator[WeightDelta]:
        return iter(self.deltas)

    @classmethod
    def merged(cls, messages: Iterable[DeltaMessage]) -> DeltaMessage:
        """Return the message that has the deltas of ``messages``, those of all ranks that send.

        Raises:
            ValueError: they are of different versions, or against different ones.
        """
        messages = list(messages)
        versions = sorted({(message.version, message.base) for message in messages})
        if len(versions) != 1:
            raise ValueError(
                f"ranks send (version, base) {versions}, and all must be of one: give all of them "
                "dense=True and the same version="
            )
        return cls(*versions[0], [delta for message in messages for delta in message])


def index_dtype(shape: tuple[int, ...]) -> torch.dtype:
    """Return the dtype of positions in a tensor of ``shape``."""
    return torch.int32 if prod(shape) < 1 << 31 else torch.int64


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return a view of ``values`` as integers, which are equal if all bits are."""
    return values.view(_BITS[values.dtype.itemsize])


def batches(deltas: Iterable[WeightDelta], max_bytes: int) -> Iterator[list[WeightDelta]]:
    """Yield ``deltas`` on the host, in lists of at most ``max_bytes``, or of one."""
    batch: list[WeightDelta] = []
    room = max_bytes
    for delta in deltas:
        if batch and delta.nbytes > room:
            yield batch
            batch, room = [], max_bytes
        room -= delta.nbytes
        indices = None if delta.indices is None else delta.indices.cpu()
        batch.append(delta._replace(values=delta.values.cpu(), indices=indices))
    if batch:
        yield batch


def encode(version: int, base: int, batch: list[WeightDelta]) -> list[Any]:
    """Return the content of a safetensors file, in parts. Delta *i* of ``batch`` has the tensors
    ``i.values`` and, unless its values are adjacent, ``i.indices``. The metadata has the versions,
    and as JSON the name, the shape and the start of each delta."""
    tensors: dict[str, torch.Tensor] = {}
    for number, delta in enumerate(batch):
        tensors[f"{number}.values"] = delta.values
        if delta.indices is not None:
            tensors[f"{number}.indices"] = delta.indices
    # The largest elements first, so that all can be viewed in the file's memory.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    described = [(delta.name, delta.shape, delta.start) for delta in batch]
    header = header_of(
        ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered),
        {
            "version": str(version),
            "base": str(base),
            "deltas": json.dumps(described),
        },
    )
    return [header, *(bytes_of(tensor) for _, tensor in ordered)]


def decode(content: torch.Tensor) -> list[WeightDelta]:
    """Return the deltas of which :func:`encode` made ``content``, bytes on the host, as views."""
    address = content.data_ptr()
    start = 8 + int.from_bytes(ctypes.string_at(address, 8), "little")
    entries = json.loads(ctypes.string_at(address + 8, start - 8))

    def tensor(name: str) -> torch.Tensor | None:
        if (entry := entries.get(name)) is None:
            return None
        first, last = entry["data_offsets"]
        return content[start + first : start + last].view(TORCH_DTYPES[entry["dtype"]])

    deltas: list[WeightDelta] = []
    for number, (name, shape, first) in enumerate(json.loads(entries["__metadata__"]["deltas"])):
        values = tensor(f"{number}.values")
        assert values is not None
        deltas.append(WeightDelta(name, tuple(shape), values, tensor(f"{number}.indices"), first))
    return deltas
