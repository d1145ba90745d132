"""Contexts as features, optimizers and exports of weights know them."""

from __future__ import annotations

from typing import Protocol, cast

from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.desync.error_monitor import ErrorMonitor
from fsdp_overlap.engine.comm_context import CommContext
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.unit import Context, Unit
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.schedule.stats import Stats


class ModelContext(Context, Protocol):
    """What the units of one model share: an :class:`~fsdp_overlap.FsdpContext`, which says what
    these are."""

    layout: LayoutRule
    is_implicit: bool
    is_uneven: bool
    sync_module_states: bool

    @property
    def stats(self) -> Stats: ...
    @property
    def comm_context(self) -> CommContext: ...
    @property
    def error_monitor(self) -> ErrorMonitor: ...
    @property
    def units(self) -> list[Unit]: ...
    @property
    def mesh_infos(self) -> list[MeshInfo]: ...
    def mesh_info_of(self, mesh: DeviceMesh) -> MeshInfo: ...
    def rest(self) -> None: ...


def model_context_of(unit: Unit) -> ModelContext:
    """Return the context that ``unit`` is in. The unit itself knows it by a smaller protocol."""
    return cast(ModelContext, unit.context)
