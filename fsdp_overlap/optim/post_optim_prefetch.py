"""Steps first what the next forward needs first, and all-gathers it under the rest of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_overlap.comm.streams import is_capturing
from fsdp_overlap.engine.context import context_of
from fsdp_overlap.engine.unit import unit_of_edits
from fsdp_overlap.optim.spans import edits_of
from fsdp_overlap.tensor.row_tensor import Sharded


class PostOptimPrefetch:
    """The units with which the next forwards are expected to begin, of the contexts that shard the
    parameters of an optimizer's ``groups``. Make it before the parameters are stepped. See Note
    [after a step]."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        units = map(unit_of_edits, edits_of(p for group in groups for p in group["params"]))
        contexts = dict.fromkeys(context_of(unit) for unit in units if unit is not None)
        self._contexts = [ctx for ctx in contexts if ctx.is_initialized and ctx.has_schedule]
        for ctx in self._contexts:
            ctx.schedule.prefetcher.before_step()
        param_groups = [
            param_group
            for ctx in self._contexts
            if (next_units := ctx.schedule.next_units())
            for unit in ctx.units
            if unit in next_units
            for param_group in unit.param_groups
        ]
        self._parameters = [
            p for param_group in param_groups for p in param_group.sharded_parameters
        ]
        self.edits = frozenset(param_group.edits for param_group in param_groups)
        """The edit counters of the units."""
        self._error: Exception | None = None

    def needs(self, parameter: torch.Tensor) -> bool:
        """Return whether ``parameter`` belongs to the units."""
        return isinstance(parameter, Sharded) and parameter.edits in self.edits

    def start(self, stepped: int) -> None:
        """All-gather the units, of whose parameters so many were ``stepped``. Do nothing if others
        of them have gradients too, which another optimizer steps. An error is kept for
        :meth:`finish`, so that a step is never left half-way."""
        if not stepped or stepped < sum(p.grad is not None for p in self._parameters):
            return
        try:
            for ctx in self._contexts:
                # A captured step gathers nothing for the next, which need not be a replay.
                if not is_capturing(ctx.device):
                    ctx.schedule.begin_next_pass()
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Raise the error of :meth:`start`."""
        if self._error is not None:
            raise self._error
