"""Mesh infos: the process groups, layouts and order check of one mesh."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.comm.comm_streams import WorkHandle, has_streams
from fsdp_overlap.comm.process_groups import (
    CommGroups,
    GroupCache,
    can_close,
    communicates,
    end_threads_before_python,
)
from fsdp_overlap.desync.order_check import CheckedParamGroup, OrderCheck
from fsdp_overlap.engine.param import ParamInfo
from fsdp_overlap.layout import LayoutRule, ParamGroupPlan
from fsdp_overlap.layout.plan import Planner, UnitPlanner
from fsdp_overlap.schedule.stats import Stats
from fsdp_overlap.tensor.pending_steps import PendingStep
from fsdp_overlap.tensor.ragged_dtensor import RaggedShard, ShardEdits, contiguous_spec
from fsdp_overlap.torch_internals import DTensorSpec

if TYPE_CHECKING:
    from fsdp_overlap.desync.error_monitor import ErrorMonitor

# ---- The default mesh ----


def default_mesh() -> DeviceMesh:
    """Return a mesh of one dimension over all ranks. Raise RuntimeError if ``torch.distributed`` is
    not initialized."""
    if not dist.is_initialized():
        raise RuntimeError(
            "FsdpContext needs process groups: call torch.distributed.init_process_group() "
            "first, under torchrun, or pass a mesh"
        )
    return init_device_mesh(_device_type(), (dist.get_world_size(),))


def _device_type() -> str:
    """Return the device type of the default process group: the accelerator's, if there is one and
    the group has a backend other than gloo for it, and otherwise the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "cpu"
    # The text is like "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return "cpu" if backends.get(device.type, "gloo") == "gloo" else device.type


# ---- Meshes, and what their ranks share ----


class Stepper(Protocol):
    """Steps shards for an optimizer, apart from its ``step()``."""

    def enqueue_step(self, gradients: Any, mean: torch.Tensor) -> bool:
        """Return whether it uses a reduced gradient, which otherwise becomes ``.grad``."""
        ...

    def reset(self) -> None:
        """Drop what is under way, as ``ctx.reset()`` does."""
        ...


class ParamGroupEdits(ShardEdits):
    """Counts the edits of one param group's shards. Every sharded parameter has it, and so leads to
    its mesh and its ``unit``. ``stepper`` steps the shard apart from its optimizer's ``step()``.
    ``is_ahead``: whether it did before that, and ``pending_step`` is what may not be done."""

    __slots__ = ("is_ahead", "mesh_info", "pending_step", "stepper", "unit")

    def __init__(self, mesh_info: MeshInfo) -> None:
        super().__init__()
        self.mesh_info = weakref.ref(mesh_info)
        self.unit: weakref.ref[Any] | None = None
        self.stepper: Stepper | None = None
        self.pending_step: PendingStep | None = None
        self.is_ahead = False

    def check_not_ahead(self, label: str) -> None:
        """Raise RuntimeError if the shard was stepped before its optimizer's ``step()``, so that
        nobody may gather it."""
        if self.is_ahead:
            raise RuntimeError(
                f"unit {label!r} was stepped in backward and is needed before step(): call "
                "set_is_last_backward(False) before each backward but the last, and evaluate after "
                "step(). If one backward needs a unit several times, as reentrant checkpoints do, "
                "use OverlapPolicy(max_norm=...), which steps after it"
            )

    def finish_step(self) -> None:
        """Block until the shard is stepped, if a thread is to do it.

        Raises:
            RuntimeError: it failed.
        """
        if self.pending_step is not None:
            self.pending_step.wait()
            self.pending_step = None

    def record_trainability(self, parameter: torch.Tensor) -> None:
        super().record_trainability(parameter)
        unit = self.unit() if self.unit is not None else None
        if unit is not None:
            unit.copy_requires_grad(parameter)


def mesh_info_of(edits: ShardEdits | None) -> MeshInfo | None:
    """Return the :class:`MeshInfo` of the param group whose edits these are. ``None`` if there is
    no param group, or its context was freed."""
    return edits.mesh_info() if isinstance(edits, ParamGroupEdits) else None


class Faults:
    """Errors of one context, here and on other ranks. The error monitor that knows of them is made
    at the first, or when this rank has waited long: few runs need it.

    It is the watchdog of the context's collectives.
    """

    def __init__(self, mesh_infos: Callable[[], Iterable[MeshInfo]], groups: GroupCache) -> None:
        self._mesh_infos = mesh_infos
        self._groups = groups
        self._monitor: ErrorMonitor | None = None
        _faults.add(self)

    @property
    def monitor(self) -> ErrorMonitor:
        with _making:
            if self._monitor is None:
                from fsdp_overlap.desync.error_monitor import ErrorMonitor

                self._monitor = ErrorMonitor(self._mesh_infos, self._groups, _others)
            return self._monitor

    def check(self) -> None:
        """Raise RuntimeError after a fault that nobody has reset the context since."""
        if self._monitor is not None:
            self._monitor.check()

    def poll(self) -> None:
        self.monitor.poll()

    def explain(self, failure: RuntimeError) -> str:
        return self.monitor.explain(failure)

    def explain_difference(self, unit: str) -> str:
        return self.monitor.explain_difference(unit)


# Those of all contexts, because a rank that waits in the reset of one context does not come to the
# collectives of another.
_faults: weakref.WeakSet[Faults] = weakref.WeakSet()
_making = Lock()


def _others() -> list[ErrorMonitor]:
    return [faults.monitor for faults in list(_faults) if faults._groups.can_close]


def _balanced_planner(world_size: int, layout: LayoutRule) -> UnitPlanner:
    from fsdp_overlap.layout import balanced_planner  # Flat() needs none of it

    return balanced_planner.BalancedPlanner(world_size, layout)


class MeshInfo:
    """One mesh that param groups of a context are spread over.

    Its ranks share process groups and plans, check the order of their collectives, and tell each
    other which parameters have a gradient on some rank. Parameters are sharded along ``mesh``, of
    one dimension.
    """

    shard_size: int
    """The number of ranks that parameters are sharded among."""
    shard_rank: int
    """This rank's place among these."""
    num_places: int
    """The number of ranks in plans."""
    plan_rank: int
    """This rank's place in plans."""
    num_replicas = 1
    """The number of ranks that hold each shard."""
    shards_replicas = False
    """Whether the ranks that hold replicas of a shard divide it."""
    has_late_gradients = False
    """Whether some gradients are given to parameters only at the end of backward."""
    _flags = 0
    reading: WorkHandle | None = None
    """The last all-gather that reads a shard on the host."""

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        layout: LayoutRule,
        groups: GroupCache,
        faults: Faults,
        stats: Stats,
    ) -> None:
        end_threads_before_python()
        self.mesh = mesh
        self.device = device
        self.find_places()
        self.plans = Planner(self.num_places, layout, _balanced_planner)
        """Plans over all ranks that hold different elements at rest."""
        self.group_cache = groups
        self.faults = faults
        self._stats = stats
        self._members: list[weakref.ref[CheckedParamGroup]] = []
        self.memories: dict[Any, Any] = {}
        """Memory that is registered with groups of the mesh, until these are renewed."""

    def find_places(self) -> None:
        """Find this rank's place among those that parameters are sharded over."""
        self.num_places = self.shard_size = self.mesh.size()
        self.plan_rank = self.shard_rank = self.mesh.get_local_rank()

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh of one dimension that parameters are sharded over."""
        return self.mesh

    @cached_property
    def tensor_mesh(self) -> DeviceMesh:
        """The mesh that sharded tensors lie over."""
        return self.mesh

    @cached_property
    def communicates(self) -> bool:
        """Whether anything travels among the ranks of the mesh."""
        return any(map(communicates, self.mesh.get_all_groups()))

    @cached_property
    def groups(self) -> CommGroups:
        """The process groups of the mesh. The first read makes them, which is collective over it,
        so all its ranks read them at one point."""
        return self.make_groups(separate=True)

    def make_groups(self, separate: bool) -> CommGroups:
        """Return process groups of the mesh. Collective over it at the first call."""
        return self.group_cache.get(self.mesh, separate)

    @property
    def groups_per_dim(self) -> list[dist.ProcessGroup]:
        """Groups that together connect all ranks. Empty if :attr:`groups` were not made yet."""
        return self.groups.per_dim if "groups" in vars(self) else []

    @property
    def groups_to_check(self) -> list[dist.ProcessGroup]:
        """The groups on which ranks ask each other before the first collective."""
        groups = self.groups
        return groups.to_confirm if self.order_check.confirms else groups.per_dim

    @cached_property
    def order_check(self) -> OrderCheck:
        shard = self.mesh.get_group(self.mesh.ndim - 1)
        confirms = self.communicates and can_close(shard, self.device.type)
        make = self._confirming_check if confirms else OrderCheck
        check = make(self.device, self.faults.explain_difference, self.syncs_unused_params)
        check.has_gradient = bytearray(self._flags)
        return check

    def _confirming_check(
        self, device: torch.device, explain: Callable[[str], str], at_once: bool
    ) -> OrderCheck:
        from fsdp_overlap.desync.confirmation import ConfirmingOrderCheck

        me = weakref.proxy(self)
        groups, confirmed = lambda: me.groups.to_confirm, self._stats.count_confirmation
        return ConfirmingOrderCheck(device, explain, at_once, groups, confirmed)

    @cached_property
    def syncs_unused_params(self) -> bool:
        """Whether the end of backward knows which parameters have a gradient on some rank, without
        waiting for a GPU."""
        return not has_streams(self.device) or not self.communicates

    def range_shard(self, plan: ParamGroupPlan, fqn: str) -> RaggedShard:
        """Return which rank of :attr:`tensor_mesh` holds which range of the parameter ``fqn`` of
        ``plan``."""
        return RaggedShard(tuple(plan.ranges(fqn)))

    def spec(self, item: ParamInfo, placement: Placement, dtype: torch.dtype) -> DTensorSpec:
        """Return how the sharded form of a parameter lies over :attr:`tensor_mesh`, and over its
        own mesh too if it has one. ``placement`` is that along the dimension of the mesh that
        shards."""
        if item.make_spec is not None:
            return item.make_spec(self, item, placement, dtype)
        placements = self.placements(placement)
        return contiguous_spec(self.tensor_mesh, placements, item.parameter.shape, dtype)

    def placements(self, placement: Placement) -> tuple[Placement, ...]:
        """Return the placements over :attr:`tensor_mesh` of which ``placement`` is the last."""
        return (placement,)

    def register(self, param_group: CheckedParamGroup, parameters: int) -> tuple[int, int]:
        """Take in ``param_group``, which has so many ``parameters``. Call it in the same order on
        every rank of the mesh. Return the param group's index, and where the flags of its
        parameters begin."""
        index, first_flag = len(self._members), self._flags
        self._members.append(weakref.ref(param_group))
        self._flags += parameters
        if "order_check" in vars(self):
            self.order_check.record_new_param_group()
            self.order_check.has_gradient = bytearray(self._flags)
        return index, first_flag

    def groups_for(self, separate: bool) -> CommGroups:
        """Return the process groups of a param group. Collective over the mesh at the first call.

        ``separate``: whether its reductions run on a group of their own.
        """
        if separate or self.order_check.confirms:  # needed from the first collective on
            groups = self.groups
        return groups if separate else self.make_groups(separate=False)

    @property
    def labels(self) -> list[str]:
        """The names of all param groups in order, also of those that are gone."""
        members = (ref() for ref in self._members)
        return ["(deleted)" if member is None else member.label for member in members]

    @property
    def signature(self) -> tuple[int, int]:
        """The number of param groups so far, and of parameters in them."""
        return len(self._members), self._flags

    def finish_reading(self) -> None:
        """Block the host until shards that rest on it were copied to the device. They may be
        edited then."""
        if self.reading is not None:
            self.reading.wait_on_host()
            self.reading = None

    def reset(self) -> None:
        """Forget what was issued, and the groups. Call it on every rank."""
        self.order_check.drop()
        vars(self).pop("groups", None)
        self.memories.clear()
        self.has_late_gradients = False
        self.reading = None
