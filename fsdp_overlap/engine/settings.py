"""What the user asked of a unit after it was made."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_overlap.comm.custom_collectives import CustomComms
from fsdp_overlap.engine.reduce_options import ReduceOptions


@dataclass
class Settings:
    """What the verbs of a module ask of its unit. A copy of a model has the same settings.

    The unit's gradients share the object ``reduce_options``.
    """

    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    reduces_last_only: bool = False
    """Whether only the last backward of a step reduces gradients."""
    is_last_backward: bool = True
    separates_reductions: bool = True
    """Whether reductions run on a process group of their own."""
    uses_group_memory: bool = False
    """Whether full buffers and reduce inputs lie in memory that the backend allocates."""
    uses_symmetric_memory: bool = False
    """Whether what is gathered and reduced travels in symmetric memory."""
    max_reduce_inputs: int | None = None
    comms: CustomComms = field(default_factory=CustomComms)
    reduce_options: ReduceOptions = field(default_factory=ReduceOptions)

    def copy_to(self, other: Settings) -> None:
        """Gives ``other`` the same values. Its ``reduce_options`` stays the object that it is."""
        vars(other).update({**vars(self), "reduce_options": other.reduce_options})
        vars(other.reduce_options).update(vars(self.reduce_options))
