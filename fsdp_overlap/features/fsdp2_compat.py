"""Stand-ins for what other code asks of FSDP2's internals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from fsdp_overlap.comm.comm_streams import CommStream
from fsdp_overlap.engine.context import model_context_of
from fsdp_overlap.engine.unit import Unit


class FSDPState:
    """A stand-in for FSDP2's ``FSDPState``, for code that queries FSDP2 about a module of ours, as
    the stages of ``torch.distributed.pipelining`` do: our modules are instances of FSDP2's class.

    It answers what pipelines ask, and raises an error for everything else.
    """

    __slots__ = ("_unit",)

    _unit: Unit

    all_states: Sequence[object] = ()
    """A stage reduces the parameter groups of each of these. There are none, because the callback
    reduces everything."""

    def __init__(self, unit: Unit) -> None:
        object.__setattr__(self, "_unit", unit)

    @property
    def _state_ctx(self) -> FSDPState:
        return self

    @property
    def _comm_ctx(self) -> CommStream:
        """The same object for units that share comm streams, and only for these."""
        return model_context_of(self._unit).comm_context.reduce_scatter_stream

    def _root_post_backward_final_callback(self) -> None:
        """Complete the gradients of a step. Stages of torch 2.13 call it where those of 2.15 call
        ``finalize_backward()``."""
        context = model_context_of(self._unit)
        if context.has_schedule:
            context.schedule.complete_gradients()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name!r} is internal to FSDP2, and {self._unit.module_class_name} was sharded by "
            "fsdp_overlap, which has nothing like it. Functions of torch.distributed.fsdp that "
            "read it, such as register_fsdp_forward_method(), have the same name in fsdp_overlap"
        )
