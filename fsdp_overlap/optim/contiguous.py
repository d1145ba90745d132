"""Contiguous runs: tensors that lie end to end in memory, so an op can treat them as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, repeat
from operator import attrgetter, is_, is_not, mul, sub
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.features.rows.row_tensor import RowTensor
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, ShardEdits, ShardedParam
from fsdp_overlap.tensor.tiles import is_on_mesh

# A step reads the same attributes of hundreds of parameters: map() does so without a Python frame
# for each.
_grad = attrgetter("grad")
_local = attrgetter("_local_tensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor: a flat range, or its rows. A plain tensor is
    returned as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def compute_device(parameter: torch.Tensor) -> torch.device:
    """Return where what several ranks share of ``parameter`` is computed: on its mesh's device if
    it is offloaded, which multiplies faster than the host, and whose backend communicates."""
    local = local_of(parameter)
    if isinstance(parameter, ShardedParam) and not is_on_mesh(local, parameter._spec):
        return torch.device(parameter.device_mesh.device_type)
    return local.device


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return :func:`local_of` of each tensor."""
    tensors = list(tensors)
    if all(issubclass(cls, DTensor) for cls in set(map(type, tensors))):
        return list(map(_local, tensors))
    return list(map(local_of, tensors))


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[Any]:
    return list(map(_grad, parameters))


def edits_of(parameters: Iterable[torch.Tensor]) -> list[ShardEdits]:
    """Return the edit counters of the param groups that sharded ``parameters`` belong to, each
    once."""
    counters = dict.fromkeys(p.edits for p in parameters if isinstance(p, ShardedParam))
    return [counter for counter in counters if counter is not None]


def with_gradient(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``parameters`` that have a gradient."""
    gradients = gradients_of(parameters)
    if not any(map(is_, gradients, repeat(None))):
        return parameters
    return list(compress(parameters, map(is_not, gradients, repeat(None))))


def find_runs(
    columns: Sequence[Sequence[torch.Tensor]], keys: Sequence[object] | None = None
) -> list[tuple[int, int]]:
    """Return ``(first row, elements)`` of each run of rows that can be treated as one.

    A row has one tensor of each column: a parameter's shard, its gradient's and its states'. The
    tensors of a row have one size and are not empty. Rows form a run if they lie end to end in
    every column, in the same storages, and have equal ``keys``. A row with a tensor that is not
    contiguous must have a key of its own.
    """
    if not columns[0]:
        return []
    numels = [tensor.numel() for tensor in columns[0]]
    starts = [0, *accumulate(numels)]
    origins = [_origins(column, starts) for column in columns]
    marks: Iterable[object] = zip(*origins, *([] if keys is None else [keys]), strict=True)
    first_rows, before = [], None
    for row, mark in enumerate(marks):
        if mark != before:
            first_rows.append(row)
            before = mark
    runs = []
    for first, end in zip(first_rows, [*first_rows[1:], len(numels)], strict=True):
        numel = starts[end] - starts[first]
        if end == first + 1 or all(_has_room(column[first], numel) for column in columns):
            runs.append((first, numel))
        else:
            runs += [(row, numels[row]) for row in range(first, end)]
    return runs


def _origins(column: Sequence[torch.Tensor], starts: Sequence[int]) -> list[int]:
    """Return each row's address minus the bytes of the rows before it: the same for all rows of a
    run."""
    addresses = [tensor.data_ptr() for tensor in column]
    return list(map(sub, addresses, map(mul, starts, repeat(column[0].itemsize))))


def _has_room(first: torch.Tensor, numel: int) -> bool:
    """Return whether the storage of ``first`` has ``numel`` elements from there on. Other storages
    may follow in memory."""
    end = (first.storage_offset() + numel) * first.itemsize
    return end <= first.untyped_storage().nbytes()


def flatten(column: Sequence[torch.Tensor], runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return a view of each run of ``column``, as one tensor."""
    flat = []
    for row, numel in runs:
        first = column[row]
        flat.append(first if first.numel() == numel else first.as_strided((numel,), (1,)))
    return flat


def run_key(parameter: torch.Tensor, key: object) -> object:
    """Return ``key`` for a sharded parameter, and a key of its own for another, which need not be
    contiguous."""
    if isinstance(parameter, RowTensor):  # the gradient may be the user's
        gradient = parameter.grad
        return key if gradient is None or local_of(gradient).is_contiguous() else object()
    return key if isinstance(parameter, RaggedDTensor) else object()
