"""Runs: tensors that are neighbours in memory, so that an element-wise op can treat them as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.row_tensor import RowTensor
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's range of a sharded tensor, flat, or its rows. A plain tensor is returned as it
    is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def find_runs(
    columns: Sequence[Sequence[torch.Tensor]], marks: Sequence[object]
) -> list[tuple[int, int]]:
    """``(first row, elements)`` of each run of rows that follow each other in memory.

    A row has one tensor of each column: a parameter's range, its gradient's and its states'. The
    tensors of a row have one size and are not empty. Rows form a run if they lie end to end in
    every column, in the same storages, and have equal ``marks``. Such tensors must be contiguous:
    give a row with others a mark of its own.
    """
    if not marks:
        return []
    numels = [tensor.numel() for tensor in columns[0]]
    rows = range(1, len(numels))
    starts = {0} | {row for row in rows if marks[row] != marks[row - 1]}
    for column in columns:
        size = column[0].itemsize
        places = [tensor.data_ptr() for tensor in column]
        starts |= {row for row in rows if places[row] != places[row - 1] + numels[row - 1] * size}
    first_rows = sorted(starts)
    runs = []
    for first, end in zip(first_rows, [*first_rows[1:], len(numels)], strict=True):
        numel = sum(numels[first:end])
        if end - first == 1 or all(_holds(column[first], numel) for column in columns):
            runs.append((first, numel))
        else:
            runs += [(row, numels[row]) for row in range(first, end)]
    return runs


def _holds(leader: torch.Tensor, numel: int) -> bool:
    """Whether the leader's storage has ``numel`` elements from the leader on. What lies right
    behind the leader in memory may belong to another storage."""
    stop = (leader.storage_offset() + numel) * leader.itemsize
    return stop <= leader.untyped_storage().nbytes()


def flatten(column: Sequence[torch.Tensor], runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """One tensor for each run of ``column``, sharing its memory."""
    flat = []
    for first, numel in runs:
        leader = column[first]
        flat.append(leader if leader.numel() == numel else leader.as_strided((numel,), (1,)))
    return flat


def mark_of(parameter: torch.Tensor, mark: object) -> object:
    """``mark`` for a sharded parameter, which may be stepped together with its neighbours. Others
    get a mark of their own, because they need not be contiguous."""
    if isinstance(parameter, RowTensor):  # its gradient may be the user's
        gradient = parameter.grad
        return mark if gradient is None or local_of(gradient).is_contiguous() else object()
    return mark if isinstance(parameter, ShardedTensor) else object()
