"""How the gradients of a unit are reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdp_overlap.comm.streams import streams_of


@dataclass
class ReduceOptions:
    """How a unit's gradients are reduced.

    ``divisor``: what the sum over all ranks is divided by, ``None`` for the number of ranks.
    ``sums_only``: whether collectives must be sums. The division is a step of its own then.
    ``across_copies``: whether backward reduces across copies too, or leaves that to a later one.
    ``hook`` is called with this rank's reduced range before it becomes a gradient, on
    ``hook_stream`` if given.
    """

    divisor: float | None = None
    sums_only: bool = False
    across_copies: bool = True
    hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: torch.Stream | None = None

    def divisors(
        self, shards: int, copies: int, sums: bool = False
    ) -> tuple[float | None, float | None]:
        """The divisors of the reduction among ``shards`` ranks and of the one across ``copies``.
        ``None`` stands for the number of ranks, by a collective that takes a mean. ``sums``:
        whether the one among ``shards`` must be a sum."""
        if self.divisor is not None:
            return self.divisor, 1.0
        divisor = float(shards) if sums or self.sums_only else None
        return divisor, float(copies) if self.sums_only else None

    def call_hook(self, hook: Callable[[torch.Tensor], None], reduced: torch.Tensor) -> None:
        """Lets the user's ``hook`` see, and edit, ``reduced``."""
        if self.hook_stream is None:
            hook(reduced)
            return
        streams = streams_of(reduced.device)
        lane = streams.current_stream()
        self.hook_stream.wait_stream(lane)
        with streams.stream(self.hook_stream):
            hook(reduced)
        lane.wait_stream(self.hook_stream)
