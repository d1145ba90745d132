"""Exchanges LayerWise matrices of which several ranks hold parts, or replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_overlap.optim.exchange import Exchange, OwnerAssignment, Part
from fsdp_overlap.optim.layer_wise_batches import Batch, Matrix, gradient_of, value_of
from fsdp_overlap.optim.matrices import MatrixChunk, SharedMatrices
from fsdp_overlap.optim.orthogonalization import chunk_views, copy_all
from fsdp_overlap.optim.owner_groups import OwnerGroups


@dataclass(frozen=True, eq=False)
class SharedParameters:
    """Parameters of which several ranks hold the same matrices, or parts of them."""

    parameters: tuple[torch.Tensor, ...]
    rounds: tuple[tuple[tuple[OwnerAssignment, ...], Batch], ...]
    """Which ranks step which matrices in a round, and those that this rank steps."""
    owned: dict[OwnerAssignment, list[Matrix]]


class MatrixExchange(Exchange):
    """Gives owners the values and gradients of matrices, and the holders of their parts the new
    values."""

    label = "LayerWise"
    values_per_element = 2

    def __init__(
        self,
        shared: SharedParameters,
        owner_groups: OwnerGroups,
        step_owned: Callable[[], None],
        assignments: tuple[OwnerAssignment, ...],
        *args: Any,
    ) -> None:
        super().__init__(assignments, *args)
        self._matrices = {one: shared.owned[one] for one in self._owned}
        self._step_owned = step_owned
        self._shards = {}
        """The start of this rank's shard, and its values and gradients, by parameter."""
        for index in dict.fromkeys(one.parameter for one in assignments):
            parameter = shared.parameters[index]
            start = owner_groups.ownership_of(parameter).start
            self._shards[index] = start, (value_of(parameter), gradient_of(parameter))

    def _pack(self, chunks: Sequence[Part]) -> None:
        copy_all(
            [
                (target, source)
                for one, chunk, view in chunks
                for target, source in zip(view, self._own(one, chunk), strict=True)
            ]
        )

    def _step(self, received: Sequence[Part], results: Sequence[Part]) -> None:
        own = [(one, chunk, self._own(one, chunk)) for one, chunk in self._own_chunks()]
        others = [(one, chunk, view.unbind()) for one, chunk, view in received]
        whole = {one: (self._empty(one.matrices), self._empty(one.matrices)) for one in self._owned}
        copy_all(
            [
                (place, part[first:last].view(place.shape))
                for one, chunk, parts in (*own, *others)
                for target, part in zip(whole[one], parts, strict=True)
                for place, first, last in chunk_views(target, chunk)
            ]
        )
        each = [
            (matrix, value, gradient)
            for one, matrices in self._matrices.items()
            for matrix, value, gradient in zip(
                matrices, *(part.chunk(one.matrices.count) for part in whole[one]), strict=True
            )
        ]
        for matrix, value, gradient in each:
            matrix.set(value, gradient)
        self._step_owned()
        for matrix, value, _ in each:
            matrix.drop(value)
        targets = [(one, chunk, values) for one, chunk, (values, _) in own]
        targets += [(one, chunk, view[0]) for one, chunk, view in results]
        copy_all(
            [
                (target[first:last].view(place.shape), place)
                for one, chunk, target in targets
                for place, first, last in chunk_views(whole[one][0], chunk)
            ]
        )

    def _unpack(self, chunks: Sequence[Part]) -> None:
        copy_all([(self._own(one, chunk)[0], view[0]) for one, chunk, view in chunks])

    def _own(self, one: OwnerAssignment, chunk: MatrixChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's values and gradients in ``chunk``."""
        start, (values, gradients) = self._shards[one.parameter]
        elements = slice(chunk.first - start, chunk.last - start)
        return values[elements], gradients[elements]

    def _empty(self, matrices: SharedMatrices) -> torch.Tensor:
        shape = matrices.count * matrices.rows, matrices.columns
        return torch.empty(shape, dtype=self._dtype, device=self._device)
