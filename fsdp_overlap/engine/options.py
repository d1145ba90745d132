"""Settings of a unit: the arguments of fully_shard(), and what methods of its module set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.comm.collectives import Collectives, Transport
from fsdp_overlap.comm.comm_streams import streams_of
from fsdp_overlap.layout import ParamSpec, Plan
from fsdp_overlap.tensor.flat_buffer import MemorySource

# ---- What fully_shard() is told ----


@dataclass(frozen=True)
class UnitOptions:
    """The arguments of :func:`fully_shard` for one unit. ``storage``: where shards rest.
    ``ignored``: the parameters to leave as they are. ``full_mesh``: the mesh of all parallelism
    that parameters lie over, if ``mesh`` is only a part of it. ``is_implicit``: whether the library
    made the unit of itself, ``has_implicit``: whether it made others within it so."""

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    storage: Any
    comm_policy: CommPolicy | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[Any], Any] | None
    ignored: frozenset[nn.Parameter]
    conditional: bool
    full_mesh: Any
    is_implicit: bool = False
    has_implicit: bool = False


# ---- How gradients are reduced ----


@dataclass
class ReduceOptions:
    """How a unit's gradients are reduced.

    ``divisor``: what the sum over all ranks is divided by, ``None`` for the number of ranks.
    ``sums_only``: whether collectives must be sums. The division is a step of its own then.
    ``all_reduce_grads``: whether backward reduces over replicas too, or leaves that to a later one.
    ``hook`` is called with this rank's reduced range before it becomes a gradient, on
    ``hook_stream`` if given.
    """

    divisor: float | None = None
    sums_only: bool = False
    all_reduce_grads: bool = True
    hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: torch.Stream | None = None

    def divisor_among_replicas(self, replicas: int) -> float | None:
        """Return the divisor of the reduction across ``replicas``, which comes after that among
        shards. ``None`` stands for their number, by a collective that takes a mean."""
        if self.divisor is not None:
            return 1.0
        return float(replicas) if self.sums_only else None

    def call_hook(self, reduced: torch.Tensor) -> None:
        """Let the user's ``hook``, which is set, see and edit ``reduced``."""
        hook = self.hook
        assert hook is not None
        if self.hook_stream is None:
            hook(reduced)
            return
        streams = streams_of(reduced.device)
        comm_stream = streams.current_stream()
        self.hook_stream.wait_stream(comm_stream)
        with streams.stream(self.hook_stream):
            hook(reduced)
        comm_stream.wait_stream(self.hook_stream)


# ---- What methods of a module set ----


@dataclass
class UnitSettings:
    """What the methods of a module ask of its unit. A copy of a model has the same settings.

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
    memory_of: Callable[[Any], MemorySource] | None = None
    """Returns where full buffers and reduce inputs of a param group lie, if the user asked for
    that."""
    transport: Transport | None = None
    """What gathers and reduces, if the user asked for other collectives than the backend's."""
    max_reduce_inputs: int | None = None
    reduce_options: ReduceOptions = field(default_factory=ReduceOptions)

    def copy_to(self, other: UnitSettings) -> None:
        """Give ``other`` the same values. Its ``reduce_options`` stays the object that it is."""
        vars(other).update({**vars(self), "reduce_options": other.reduce_options})
        vars(other.reduce_options).update(vars(self.reduce_options))


# ---- How parameters and gradients travel ----


class CommPolicy(Protocol):
    """Sends parameters, gradients or both otherwise than as they are. Equal policies have the same
    ``repr()`` on every rank."""

    def block_numel(self, spec: ParamSpec) -> int:
        """Return the number of neighboring elements that no layout may cut."""
        ...

    def keeps(self, spec: ParamSpec) -> bool:
        """Return whether a parameter that would travel otherwise travels as it is all the same."""
        ...

    def check(self, plan: Plan) -> None:
        """Check that a param group can travel so.

        Raises:
            ValueError: it cannot.
        """
        ...

    def sent_sizes(self, plan: Plan, dtype: torch.dtype, reduced: bool) -> list[int]:
        """Do as :func:`~fsdp_overlap.engine.param_group.sent_sizes`."""
        ...

    def wrap(self, collectives: Collectives, param_group: Any) -> Collectives:
        """Return what gathers and reduces ``param_group``, whose ``collectives`` send it as it
        is."""
        ...
