"""What code finds that asks FSDP2 for the state of a module that we sharded.

``torch.distributed.pipelining`` does: our modules are instances of FSDP2's class, so its stages
take them as they take FSDP2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from fsdp_overlap.comm.lanes import Lane
from fsdp_overlap.engine.context import context_of
from fsdp_overlap.engine.unit import Unit, unit_of


class Fsdp2State:
    """Stands where FSDP2 has its ``FSDPState``. It answers what pipelines ask, and raises an error
    for everything else."""

    __slots__ = ("_unit",)

    all_states: Sequence[object] = ()
    """A stage reduces the parameter groups of each of these. There are none, because the callback
    reduces everything."""

    def __init__(self, unit: Unit) -> None:
        object.__setattr__(self, "_unit", unit)

    @property
    def _state_ctx(self) -> Fsdp2State:
        return self

    @property
    def _comm_ctx(self) -> Lane:
        """The same object for units that share lanes, and only for these."""
        return context_of(self._unit).transfers.reduce_lane

    def _root_post_backward_final_callback(self) -> None:
        """Completes the gradients of a step. Stages of torch 2.13 call it where those of 2.15 call
        ``finalize_backward()``."""
        context = context_of(self._unit)
        if context.has_schedule:
            context.schedule.finalization.complete()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name!r} is internal to FSDP2, and {self._unit.module_kind} was sharded by "
            "fsdp_overlap, which has nothing like it. Functions of torch.distributed.fsdp that "
            "read it, such as register_fsdp_forward_method(), have the same name in fsdp_overlap"
        )


def state_of(module: nn.Module) -> Fsdp2State | None:
    """What ``fully_shard.state(module)`` gives. ``None`` if ``module`` is not a unit of ours."""
    unit = unit_of(module)
    return None if unit is None else Fsdp2State(unit)
