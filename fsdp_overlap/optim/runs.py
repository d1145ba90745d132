"""Runs: tensors that are neighbours in memory, so that an element-wise op can treat them as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, compress, islice, repeat
from operator import add, attrgetter, is_, is_not, le, mul, ne, sub
from typing import Any
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, ShardEdits
from fsdp_overlap.tensor.row_tensor import RowTensor, Sharded

# A step asks hundreds of parameters for the same. What is mapped over a list is asked without a
# Python frame for each.
_grad = attrgetter("grad")
_local = attrgetter("_local_tensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's range of a sharded tensor, flat, or its rows. A plain tensor is returned as it
    is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`local_of` of each tensor."""
    tensors = list(tensors)
    if all(issubclass(each, DTensor) for each in classes_of(tensors)):
        return list(map(_local, tensors))
    return list(map(local_of, tensors))


def classes_of(tensors: Iterable[torch.Tensor]) -> set[type]:
    return set(map(type, tensors))


def numels_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[Any]:
    return list(map(_grad, parameters))


def edits_of(parameters: Iterable[torch.Tensor]) -> list[ShardEdits]:
    """The edits of the buckets that sharded ``parameters`` belong to, each once."""
    found = dict.fromkeys(each.edits for each in parameters if isinstance(each, Sharded))
    return [each for each in found if each is not None]


def with_gradient(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``parameters`` that have a gradient."""
    gradients = gradients_of(parameters)
    if not any(map(is_, gradients, repeat(None))):
        return parameters
    return list(compress(parameters, map(is_not, gradients, repeat(None))))


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
    numels = numels_of(columns[0])
    before = [0, *accumulate(numels)]
    origins = [_origins(places_of(column), before, column[0].itemsize) for column in columns]
    keys = list(zip(marks, *origins, strict=True))
    first_rows = [0, *_changes(keys)]
    ends = [*first_rows[1:], len(numels)]
    lengths = [before[end] - before[first] for first, end in zip(first_rows, ends, strict=True)]
    fits = [_fits([column[row] for row in first_rows], lengths) for column in columns]
    runs = []
    for first, end, numel, *fits_all in zip(first_rows, ends, lengths, *fits, strict=True):
        if end - first == 1 or all(fits_all):
            runs.append((first, numel))
        else:
            runs += [(row, numels[row]) for row in range(first, end)]
    return runs


def places_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _origins(places: list[int], before: list[int], itemsize: int) -> list[int]:
    """Where each row of a column would begin if its run began with the first row, of elements
    ``before`` it: the same place for all of a run."""
    return list(map(sub, places, map(mul, before, repeat(itemsize))))


def _changes(values: Sequence[object]) -> Iterator[int]:
    """The rows whose value differs from the one before."""
    return compress(range(1, len(values)), map(ne, islice(values, 1, None), values))


def _fits(leaders: list[torch.Tensor], numels: list[int]) -> Iterator[bool]:
    """Whether each leader's storage has so many elements from the leader on. What lies right behind
    a leader in memory may belong to another storage."""
    offsets = [leader.storage_offset() for leader in leaders]
    stops = map(mul, map(add, offsets, numels), repeat(leaders[0].itemsize))
    return map(le, stops, [leader.untyped_storage().nbytes() for leader in leaders])


def flatten(column: Sequence[torch.Tensor], runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """One tensor for each run of ``column``, sharing its memory."""
    flat = []
    for first, numel in runs:
        leader = column[first]
        flat.append(leader if leader.numel() == numel else leader.as_strided((numel,), (1,)))
    return flat


class RestingRuns:
    """Runs of rows of which all columns but one rest in memory from step to step, as parameters and
    their states do and gradients do not.

    Runs, and the flat tensors of the columns that rest, are found again only if a tensor lies
    elsewhere than in the step before. They last no longer than the first tensors of the runs, so
    that memory is freed when users let these go.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._marks: list[object] = []
        self._runs: list[tuple[int, int]] = []
        self._numels: list[int] = []
        self._places: list[list[int]] = []
        self._flats: list[list[torch.Tensor]] = []
        """Those of runs of several rows. A row alone is its own flat tensor."""
        self._leaders: list[ref[torch.Tensor]] = []

    def find(
        self,
        resting: Sequence[list[torch.Tensor]],
        moving: list[torch.Tensor],
        marks: list[object],
    ) -> tuple[list[tuple[int, int]], list[list[torch.Tensor]]]:
        """The runs, as :func:`find_runs`, and a flat tensor for each run of each column: the first
        of ``resting``, ``moving``, and the others."""
        places = list(map(places_of, resting))
        if marks != self._marks or places != self._places or not self._hold(resting, moving):
            self._forget()
            runs = find_runs([*resting, moving], marks)
            flats = [flatten(column, runs) for column in resting]
            self._remember(resting, marks, places, runs, flats)
        else:
            runs = self._runs
            flats = [
                self._with_rows_alone(column, known)
                for column, known in zip(resting, self._flats, strict=True)
            ]
        first, *others = flats
        return runs, [first, flatten(moving, runs), *others]

    def _remember(
        self,
        resting: Sequence[list[torch.Tensor]],
        marks: list[object],
        places: list[list[int]],
        runs: list[tuple[int, int]],
        flats: list[list[torch.Tensor]],
    ) -> None:
        self._marks, self._places, self._runs = marks, places, runs
        self._numels = numels_of(resting[0])
        is_long = [self._numels[row] != numel for row, numel in runs]
        self._flats = [list(compress(column, is_long)) for column in flats]
        me = ref(self)

        def forget(_: object) -> None:
            known = me()
            if known is not None:
                known._forget()

        rows = [row for row, _ in compress(runs, is_long)]
        self._leaders = [ref(column[row], forget) for column in resting for row in rows]

    def _with_rows_alone(
        self, column: list[torch.Tensor], flats: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        if len(flats) == len(self._runs):
            return flats
        known = iter(flats)
        return [
            column[row] if numel == self._numels[row] else next(known) for row, numel in self._runs
        ]

    def _hold(self, resting: Sequence[list[torch.Tensor]], moving: list[torch.Tensor]) -> bool:
        """Whether what is known is right for columns whose places are the same as before."""
        long = [row for row, numel in self._runs if numel != self._numels[row]]
        for column, places, flats in zip(resting, self._places, self._flats, strict=True):
            leaders = [column[row] for row in long]
            # Storages may have got other memory, and wrappers other tensors of the same memory.
            if places_of(flats) != [places[row] for row in long]:
                return False
            if [leader.dtype for leader in leaders] != [flat.dtype for flat in flats]:
                return False
        if not moving:
            return True
        before = [0, *accumulate(self._numels)]
        origins = _origins(places_of(moving), before, moving[0].itemsize)
        first_rows, lengths = zip(*self._runs, strict=True)
        leaders = [moving[row] for row in first_rows]
        return set(_changes(origins)) <= set(first_rows) and all(_fits(leaders, list(lengths)))


def marks_of(parameters: Sequence[torch.Tensor], marks: Iterable[object]) -> list[object]:
    """``marks`` for sharded parameters, which may be stepped together with their neighbours. Others
    get a mark of their own, because they need not be contiguous."""
    if classes_of(parameters) <= {RaggedDTensor}:
        return list(marks)
    return list(map(_mark, parameters, marks))


def _mark(parameter: torch.Tensor, mark: object) -> object:
    if isinstance(parameter, RowTensor):  # its gradient may be the user's
        gradient = parameter.grad
        return mark if gradient is None or local_of(gradient).is_contiguous() else object()
    return mark if isinstance(parameter, RaggedDTensor) else object()
