"""All-gathers the first units of the next forward while the optimizer steps the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_overlap.comm.comm_streams import is_capturing
from fsdp_overlap.engine.context import model_context_of
from fsdp_overlap.engine.unit import unit_of_edits
from fsdp_overlap.optim.contiguous import edits_of
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam


class PostOptimPrefetch:
    """The units that the next forwards need first, of the contexts that shard the parameters of an
    optimizer's ``groups``. To be made before the parameters are stepped: see
    Note [after a step]."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        units = map(unit_of_edits, edits_of(p for group in groups for p in group["params"]))
        contexts = dict.fromkeys(model_context_of(unit) for unit in units if unit is not None)
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
        return isinstance(parameter, ShardedParam) and parameter.edits in self.edits

    def start(self, stepped: int) -> None:
        """All-gather the units if ``stepped`` is the number of their parameters with gradients, and
        no other optimizer is to step some. An error is kept for :meth:`finish`, so that the step is
        completed."""
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
