"""Gathers parameters that say themselves how, as FSDP2's tensor extensions do.

What each gives may have any dtypes and sizes. All of a bucket travels in one collective, as bytes,
and is copied in before it and out after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Collectives, Issued, own_range
from fsdp_overlap.layout import BucketPlan, RowsPlan
from fsdp_overlap.tensor.extension import Extension, is_subclass

# Where a tensor may begin among bytes, so that they can be seen in its dtype.
ALIGN_BYTES = 16


@dataclass(frozen=True)
class Piece:
    """Where an extension's tensor lies in what a rank sends, in bytes."""

    start: int
    stop: int
    size: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Pieces:
    """What a rank sends of a bucket: for each parameter, one piece or more. Two are equal if they
    have the same dtypes and sizes."""

    of_each: tuple[tuple[Piece, ...], ...]
    nbytes: int

    @classmethod
    def of(cls, inputs: Sequence[Sequence[torch.Tensor]]) -> Pieces:
        """The pieces that have room for ``inputs``."""
        end, found = 0, []
        for tensors in inputs:
            pieces = []
            for tensor in tensors:
                nbytes = tensor.numel() * tensor.dtype.itemsize
                pieces.append(Piece(end, end + nbytes, tensor.size(), tensor.dtype))
                end += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
            found.append(tuple(pieces))
        return cls(tuple(found), end)

    @property
    def all(self) -> list[Piece]:
        """The pieces that are not empty."""
        return [each for pieces in self.of_each for each in pieces if each.stop > each.start]

    @property
    def has_gaps(self) -> bool:
        return sum(piece.stop - piece.start for piece in self.all) < self.nbytes


class ExtensionGather:
    """Gathers the parameters of ``extensions``. ``others`` carry the bytes.

    The sizes of what is sent are those of the first gather, which is :meth:`all_gather_first`.
    """

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self.extensions = extensions
        self.others: Collectives[BucketPlan]
        self._pieces: Pieces | None = None
        self.outputs: list[list[torch.Tensor]] = []
        """For each parameter, what is gathered of its pieces, flat."""

    @property
    def nbytes(self) -> int:
        """What a rank sends."""
        return self._pieces.nbytes if self._pieces is not None else 0

    @torch.no_grad()
    def inputs(self) -> list[list[torch.Tensor]]:
        """What this rank sends. Collective if an extension makes it so."""
        return [extension.inputs() for extension in self.extensions]

    @torch.no_grad()
    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: RowsPlan, group: dist.ProcessGroup
    ) -> Issued:
        """Fills the unsharded parameters. ``full`` and ``shard`` are empty, but ``full`` is where
        compute is."""
        inputs = self.inputs()
        assert self._pieces is not None
        self._check(inputs, self._pieces)
        return self._gather(inputs, self._pieces, full, group, self._fill)

    @torch.no_grad()
    def all_gather_first(
        self, inputs: Sequence[Sequence[torch.Tensor]], full: torch.Tensor, group: dist.ProcessGroup
    ) -> Issued:
        """Gathers :attr:`outputs` anew, and makes nothing of them."""
        pieces = self._pieces = Pieces.of(inputs)
        ranks = group.size()
        with torch.inference_mode(False):
            self.outputs = [
                [
                    torch.empty(ranks * each.numel(), dtype=each.dtype, device=full.device)
                    for each in tensors
                ]
                for tensors in inputs
            ]
        return self._gather(inputs, pieces, full, group, lambda: None)

    def _check(self, inputs: Sequence[Sequence[torch.Tensor]], expected: Pieces) -> None:
        """Checks that what is sent has the dtypes and sizes of the first time.

        Raises:
            RuntimeError: it has not.
        """
        for extension, now, before in zip(
            self.extensions, Pieces.of(inputs).of_each, expected.of_each, strict=True
        ):
            if now != before:
                raise RuntimeError(
                    f"fsdp_pre_all_gather of {extension.name} gave {_in_words(now)}, and "
                    f"{_in_words(before)} the first time: what is sent has the same dtypes and "
                    "sizes each time"
                )

    def _gather(
        self,
        inputs: Sequence[Sequence[torch.Tensor]],
        pieces: Pieces,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        then: Callable[[], None],
    ) -> Issued:
        ranks = group.size()
        travels = BucketPlan((), (), (pieces.nbytes,) * ranks)
        gathered = torch.empty(travels.numel, dtype=torch.uint8, device=full.device)
        own = own_range(gathered, travels, group)
        if pieces.has_gaps:
            own.zero_()  # gaps travel, too
        sources = [each.reshape(-1) for each in chain.from_iterable(inputs) if each.numel()]
        _copy([own[each.start : each.stop].view(each.dtype) for each in pieces.all], sources)
        issued = self.others.all_gather(gathered, own, travels, group)

        @torch.no_grad()
        def finish() -> torch.Tensor:
            issued.finish()
            rows = gathered.view(ranks, -1)
            outputs = [each for each in chain.from_iterable(self.outputs) if each.numel()]
            _copy(
                [output.view(ranks, -1) for output in outputs],
                [rows[:, each.start : each.stop].view(each.dtype) for each in pieces.all],
            )
            then()
            return full

        return Issued(issued.works, finish, issued.group)

    def _fill(self) -> None:
        for extension in self.extensions:
            extension.fill()


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets and not any(map(is_subclass, sources)):
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)  # a class of its own says what that means


def _in_words(pieces: Sequence[Piece]) -> str:
    return ", ".join(f"{list(piece.size)} of {piece.dtype}" for piece in pieces) or "nothing"
