"""All-gather of parameters with FSDP2's tensor extensions.

What each gives may have any dtypes and sizes. All of a param group travels in one collective, as
bytes, and is copied in before it and out after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import RangeCollectives, own_range
from fsdp_overlap.comm.comm_streams import PendingCollective
from fsdp_overlap.features.extensions.extension import Extension
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.tensor.subclasses import is_subclass

# Where a tensor may begin among bytes, so that they can be seen in its dtype.
ALIGN_BYTES = 16

Kind = tuple[torch.Size, torch.dtype]
"""The size and the dtype of a tensor that travels."""


class SendLayout:
    """Where what a rank sends of a param group lies, whose extensions give ``inputs``."""

    def __init__(self, inputs: Sequence[Sequence[torch.Tensor]]) -> None:
        self.kinds = [_kinds(tensors) for tensors in inputs]
        self.ranges: list[tuple[slice, torch.dtype]] = []
        """The bytes and the dtype of each tensor that is not empty."""
        self.nbytes = 0
        self.has_gaps = False
        for size, dtype in chain.from_iterable(self.kinds):
            stop = self.nbytes + size.numel() * dtype.itemsize
            if stop > self.nbytes:
                self.ranges.append((slice(self.nbytes, stop), dtype))
            self.nbytes = -(-stop // ALIGN_BYTES) * ALIGN_BYTES
            self.has_gaps |= self.nbytes > stop


class ExtensionGather:
    """Gathers the parameters of ``extensions``. ``others`` carry the bytes.

    The sizes of what is sent are those of the first gather, which is :meth:`all_gather_first`.
    """

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self.extensions = extensions
        self.others: RangeCollectives
        self._layout: SendLayout | None = None
        self.outputs: list[list[torch.Tensor]] = []
        """For each parameter, what is gathered of each tensor that its extension gives, flat."""

    @property
    def nbytes(self) -> int:
        """What a rank sends."""
        return self._layout.nbytes if self._layout is not None else 0

    @torch.no_grad()
    def inputs(self) -> list[list[torch.Tensor]]:
        """Return what this rank sends. Collective if an extension makes it so."""
        return [extension.inputs() for extension in self.extensions]

    @torch.no_grad()
    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        """Fill the unsharded parameters. ``full`` and ``shard`` are empty, but ``full`` is where
        compute is."""
        inputs = self.inputs()
        assert self._layout is not None
        self._check(inputs, self._layout)
        return self._gather(inputs, self._layout, full, group, self._fill)

    @torch.no_grad()
    def all_gather_first(
        self, inputs: Sequence[Sequence[torch.Tensor]], full: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        """Gather :attr:`outputs` anew, and make nothing of them."""
        layout = self._layout = SendLayout(inputs)
        ranks = group.size()
        with torch.inference_mode(False):
            self.outputs = [
                [
                    torch.empty(ranks * each.numel(), dtype=each.dtype, device=full.device)
                    for each in tensors
                ]
                for tensors in inputs
            ]
        return self._gather(inputs, layout, full, group, lambda: None)

    def _check(self, inputs: Sequence[Sequence[torch.Tensor]], expected: SendLayout) -> None:
        """Check that what is sent has the dtypes and sizes of the first time.

        Raises:
            RuntimeError: it has not.
        """
        for extension, tensors, before in zip(self.extensions, inputs, expected.kinds, strict=True):
            now = _kinds(tensors)
            if now != before:
                raise RuntimeError(
                    f"fsdp_pre_all_gather of {extension.name} gave {_in_words(now)}, and "
                    f"{_in_words(before)} the first time: what is sent has the same dtypes and "
                    "sizes each time"
                )

    def _gather(
        self,
        inputs: Sequence[Sequence[torch.Tensor]],
        layout: SendLayout,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        then: Callable[[], None],
    ) -> PendingCollective:
        ranks = group.size()
        all_ranks = ParamGroupPlan((), (), (layout.nbytes,) * ranks)
        gathered = torch.empty(all_ranks.numel, dtype=torch.uint8, device=full.device)
        own = own_range(gathered, all_ranks, group)
        if layout.has_gaps:
            own.zero_()  # gaps travel, too
        sources = [each.reshape(-1) for each in chain.from_iterable(inputs) if each.numel()]
        _copy([own[at].view(dtype) for at, dtype in layout.ranges], sources)
        issued = self.others.for_plan(all_ranks).all_gather(gathered, own, group)

        @torch.no_grad()
        def finish() -> torch.Tensor:
            issued.finish()
            rows = gathered.view(ranks, -1)
            outputs = [each for each in chain.from_iterable(self.outputs) if each.numel()]
            for extension in self.extensions:
                extension.allocate_outputs()
            try:
                _copy(
                    [output.view(ranks, -1) for output in outputs],
                    [rows[:, at].view(dtype) for at, dtype in layout.ranges],
                )
                then()
            finally:
                for extension in self.extensions:
                    extension.release_outputs()
            return full

        return PendingCollective(issued.works, finish, issued.group)

    def _fill(self) -> None:
        for extension in self.extensions:
            extension.fill()


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets and not any(map(is_subclass, sources)):
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)  # a class of its own says what that means


def _kinds(tensors: Sequence[torch.Tensor]) -> list[Kind]:
    return [(each.size(), each.dtype) for each in tensors]


def _in_words(kinds: Sequence[Kind]) -> str:
    return ", ".join(f"{list(size)} of {dtype}" for size, dtype in kinds) or "nothing"
