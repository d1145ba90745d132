"""The context that the units of one model share: comm streams, groups, order and counters."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.comm_streams import (
    CommStream,
    current_device,
    has_streams,
    is_capturing,
    make_comm_stream,
)
from fsdp_overlap.comm.process_groups import CommGroups, GroupCache
from fsdp_overlap.engine import hooks
from fsdp_overlap.engine.comm_context import CommContext
from fsdp_overlap.engine.mesh import Faults, MeshInfo, default_mesh
from fsdp_overlap.engine.param_group import verify_params_across_ranks
from fsdp_overlap.engine.unit import (
    PendingComparisons,
    Unit,
    existing_units,
    name_units,
    sync_requires_grad,
)
from fsdp_overlap.layout import Flat, LayoutRule
from fsdp_overlap.layout.plan import Planner
from fsdp_overlap.schedule.backward import MAX_INPUTS
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.schedule.stats import Stats

if TYPE_CHECKING:
    from fsdp_overlap.desync.error_monitor import ErrorMonitor
    from fsdp_overlap.features.cuda_graphs.captured_steps import CapturedSteps
    from fsdp_overlap.features.desync_monitor import DesyncMonitor
    from fsdp_overlap.features.mesh_groups import GivenGroups, MeshGroups
    from fsdp_overlap.features.pg_options import GroupOptions

T = TypeVar("T")


class FsdpContext:
    """Owns what the units of one model share. Give the same context to every :func:`fully_shard`.

    Args:
        mesh: the device mesh to shard over, of one dimension, or of two, ``(replicate, shard)``. By
            default it has one dimension over all ranks. A unit may have a mesh of its own.
        prefetch: how many all-gathers are enqueued ahead of use, and so how many full buffers exist
            beside those in use. 2 may gain where heavy and light units take turns, as experts do.
            0 takes the least memory, also for reductions, and hides almost nothing on a CPU.
        separate_reduce_scatter_group: whether reduce-scatters get a process group of their own.
            Otherwise they and the all-gathers run one after the other.
        layout: where parameters may be cut: ``Flat()`` anywhere, ``BlockAtomic(rows=...)`` between
            rows, ``TensorAtomic()`` in no matrix, ``PerTensor()`` as FSDP2 does; or a function that
            returns one of these for ``(fqn, spec)``: the parameter's name in its unit, and its
            :class:`~fsdp_overlap.layout.ParamSpec`.
        validate_layouts: whether ranks compare their plans under every layout.
        shard_optimizer_over_replicas: on a mesh ``(replicate, shard)``, whether to shard
            parameters, gradients and optimizer states over replicas too. Shards are gathered among
            replicas once after each step, in the dtype of compute, and all-gathers still run along
            the second dimension.
        sync_module_states: whether all ranks take the parameters and buffers of the first rank of a
            unit's mesh. :func:`fully_shard` is collective then, and needs memory for one more whole
            parameter if the module is not on the mesh's device. Otherwise ranks compare their
            values at the first forward.
        groups: the process groups that collectives run on. :class:`MeshGroups` for the mesh of the
            context, or a mapping from meshes to them.
        pg_options: options of the backend, by comm stream (``"all_gather"``, ``"reduce_scatter"``,
            ``"all_reduce"``), for groups that the library makes; by default those of the mesh's
            groups, with streams of high priority. A mapping changes some of these, as
            ``{"max_ctas": 8}``. Contexts that are given the same object, or equal mappings, share a
            group.
        hang_timeout: on a device with streams, the seconds after which ranks that do not move say
            where they stand (``features/desync_monitor``). ``None``: the backend's timeout ends a
            hang.
        implicit_units: whether a module that a unit around others would own, and that has a
            parameter of 16 MiB or more, becomes a unit of its own, such as an embedding or a head:
            it is gathered before its own forward and reduced after its own backward. Only its own
            forward may read its parameters then, as those of any unit.

    Streams, groups and events are made at first use.

    Raises:
        TypeError: ``groups`` or ``pg_options`` has an unsupported type.
        ValueError: parameters cannot be sharded over the mesh, ``prefetch`` is negative, a group
            does not suit its mesh, or there is no such option.
    """

    is_implicit = False
    """Whether :func:`fully_shard` made the context. Those of one tree are merged."""
    keeps_own_values = False
    """Whether ranks that start from different weights are only warned."""
    is_uneven = False
    """Whether :meth:`uneven` is under way."""
    is_initialized = False
    """Whether :meth:`lazy_init` has nothing left to do."""
    was_initialized = False
    _watches_steps = False
    comm_stream_factory: Callable[[str, torch.device], CommStream] = staticmethod(
        lambda _, device: make_comm_stream(device)
    )
    _monitor: DesyncMonitor | None = None
    _captures: CapturedSteps | None = None

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        *,
        prefetch: int = 1,
        separate_reduce_scatter_group: bool = True,
        layout: LayoutRule = Flat(),  # noqa: B008, frozen
        validate_layouts: bool = False,
        shard_optimizer_over_replicas: bool = False,
        sync_module_states: bool = False,
        groups: MeshGroups | Mapping[DeviceMesh, MeshGroups] | None = None,
        pg_options: Mapping[str, object] | None = None,
        hang_timeout: float | None = 10.0,
        implicit_units: bool = False,
    ) -> None:
        if hang_timeout is not None and not hang_timeout > 0:
            raise ValueError(f"hang_timeout={hang_timeout}: use seconds, or None for no monitor")
        if mesh is not None and mesh.ndim != 1:
            from fsdp_overlap.features.hsdp.mesh import check_mesh

            check_mesh(mesh, shard_optimizer_over_replicas)
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} is not a number of all-gathers; use 0 or more")
        self._mesh = mesh
        self.prefetch = prefetch
        self.layout = layout
        self.validate_layouts = validate_layouts
        self.shard_optimizer_over_replicas = shard_optimizer_over_replicas
        self.sync_module_states = sync_module_states
        self._stats = Stats()
        self._groups = GroupCache(separate_reduce_scatter_group)
        self._given_groups = self._hand_in(groups) if groups is not None else None
        self._pg_options = self._set_options(pg_options) if pg_options else None
        self._refs: list[weakref.ref[Unit]] = []
        """The units by index. They are not kept alive."""
        self._mesh_infos: dict[DeviceMesh, MeshInfo] = {}
        # What the context has does not refer to it. Without a reference cycle, groups are freed
        # together with the context, and not when Python next collects cycles.
        me = weakref.ref(self)
        self.faults = Faults(lambda: own.mesh_infos if (own := me()) else (), self._groups)
        self._groups.watchdog = weakref.ref(self.faults)
        self.toggled: weakref.WeakSet[Unit] = weakref.WeakSet()
        self.pending_comparisons: PendingComparisons = []
        self.hang_timeout = hang_timeout
        self.implicit_units = implicit_units

    def _hand_in(self, groups: MeshGroups | Mapping[DeviceMesh, MeshGroups]) -> GivenGroups:
        from fsdp_overlap.features.mesh_groups import GivenGroups, MeshGroups

        given = {self.mesh: groups} if isinstance(groups, MeshGroups) else groups
        return GivenGroups(self._groups, given)

    def _set_options(self, pg_options: Mapping[str, object]) -> GroupOptions:
        from fsdp_overlap.features.pg_options import GroupOptions

        options = GroupOptions(pg_options)
        options.check(self.mesh)
        options.apply_to(self._groups)
        return options

    def __deepcopy__(self, memo: dict[int, object]) -> FsdpContext:
        """Return a context for a copy of the model, with the same mesh and options and no units
        yet. Without ``sync_module_states``: the copy takes its values from this rank's shards."""
        duplicate = FsdpContext(
            self.mesh,
            prefetch=self.prefetch,
            separate_reduce_scatter_group=self._groups.separate,
            layout=self.layout,
            validate_layouts=self.validate_layouts,
            shard_optimizer_over_replicas=self.shard_optimizer_over_replicas,
            groups=given.by_mesh() if (given := self._given_groups) is not None else None,
            pg_options=own.given if (own := self._pg_options) is not None else None,
            hang_timeout=self.hang_timeout,
            implicit_units=self.implicit_units,
        )
        duplicate.is_implicit = self.is_implicit
        duplicate.keeps_own_values = self.keeps_own_values
        if self.has_schedule and self.schedule.finalizer.is_manual:
            duplicate.schedule.finalizer.set_manual(True)
        return duplicate

    def __repr__(self) -> str:
        """Return the options and a table of the units. Not collective.

        Neighboring units that are alike share a row, whose figures are those of one unit. Bytes
        are those of parameters at rest: ``whole`` counts all of the unit, ``here`` what this rank
        holds. A table of dtypes follows if there are several, or an optimizer."""
        from fsdp_overlap.engine.describe import described
        from fsdp_overlap.features.dtypes import described_dtypes

        flags = "validate_layouts shard_optimizer_over_replicas sync_module_states implicit_units"
        options = [name.replace("_", " ") for name in flags.split() if getattr(self, name)]
        if not self._groups.separate:
            options.insert(0, "one group for gathers and reductions")
        lines = [described(self._mesh, self.layout, self.prefetch, options, self.units)]
        return "\n".join(lines + described_dtypes(self.units))

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of units that have none of their own.

        Raises:
            RuntimeError: no mesh was given and ``torch.distributed`` is not initialized.
        """
        return self._mesh if self._mesh is not None else default_mesh()

    @cached_property
    def device(self) -> torch.device:
        kind = self.mesh.device_type
        return torch.device(kind) if kind == "cpu" else current_device(kind)

    @cached_property
    def has_streams(self) -> bool:
        """Whether compute is enqueued on streams."""
        return has_streams(self.device)

    @cached_property
    def capture_query(self) -> Callable[[], bool] | None:
        return partial(is_capturing, self.device) if self.has_streams else None

    @property
    def error_monitor(self) -> ErrorMonitor:
        return self.faults.monitor

    @property
    def stats(self) -> Stats:
        """What was gathered, reduced and prefetched. ``stats.reset()`` counts anew."""
        return self._stats

    @property
    def groups(self) -> CommGroups:
        """The process groups over :attr:`mesh`."""
        return self.mesh_info_of(self.mesh).groups

    @property
    def mesh_infos(self) -> list[MeshInfo]:
        """The :class:`MeshInfo` of each mesh that units are sharded over, in the order of their
        first units."""
        return [*self._mesh_infos.values()]

    def mesh_info_of(self, mesh: DeviceMesh) -> MeshInfo:
        """Return the :class:`MeshInfo` of ``mesh``.

        Raises:
            ValueError: parameters cannot be sharded over the mesh, or it is of another device.
        """
        if mesh not in self._mesh_infos:
            if mesh.device_type != self.device.type:
                self._refuse_device(mesh)
            if self._pg_options is not None:
                self._pg_options.check(mesh)
            make = MeshInfo if mesh.ndim == 1 else self._replicated_mesh_info()
            parts = self.device, self.layout, self._groups, self.faults, self._stats
            self._mesh_infos[mesh] = make(mesh, *parts)
        return self._mesh_infos[mesh]

    def _refuse_device(self, mesh: DeviceMesh) -> NoReturn:
        raise ValueError(
            f"{mesh} is a mesh of {mesh.device_type}, the context's of {self.device.type}; use one "
            "context for each"
        )

    def _replicated_mesh_info(self) -> Callable[..., MeshInfo]:
        from fsdp_overlap.features.hsdp.mesh import ReplicatedMeshInfo

        return partial(ReplicatedMeshInfo, shards_replicas=self.shard_optimizer_over_replicas)

    @cached_property
    def comm_context(self) -> CommContext:
        """Carry out what the schedule decides."""
        make_comm_stream, device = self.comm_stream_factory, self.device
        return CommContext(
            lambda name: make_comm_stream(name, device),
            self._stats,
            self._mesh_infos.values,
            partial(existing_units, self._refs),
        )

    def finish_reading(self) -> None:
        self.comm_context.finish_reading()

    @property
    def has_schedule(self) -> bool:
        """Whether a forward or backward may have run."""
        return "schedule" in vars(self)

    @cached_property
    def schedule(self) -> Schedule:
        """Decide when units are gathered, released and reduced."""
        schedule_class = Schedule
        for unit in self.units:
            if issubclass(unit.schedule_class, schedule_class):
                schedule_class = unit.schedule_class
        units = self._refs, partial(existing_units, self._refs)
        options = self.prefetch, self.shard_optimizer_over_replicas
        begins = self._what_begins_backwards()
        return schedule_class(self.comm_context, hooks, self._stats, *units, *options, begins)

    def _what_begins_backwards(self) -> Callable[[], None]:
        if self.capture_query is None:
            return partial(sync_requires_grad, self.toggled)
        return partial(_begin_backward, self.toggled, weakref.ref(self), self.capture_query)

    def prepare_for_captures(self) -> CapturedSteps:
        """Take part in captures of graphs from now on."""
        from fsdp_overlap.features.cuda_graphs.captured_steps import watch_captures

        if self._captures is None:
            self._captures = watch_captures(self)
        return self._captures

    @property
    def is_in_capture(self) -> bool:
        """Whether units run in the capture of a graph that is under way."""
        return self._captures is not None and self._captures.is_under_way

    def join_capture(self, unit: Unit | None = None) -> None:
        """Make ``unit``, by default the first of a pass, part of the graph whose capture is under
        way, if one is.

        Raises:
            RuntimeError: the graph cannot hold it. Nothing was changed.
        """
        if self.capture_query is not None and self.capture_query():
            first = unit or next(iter(self.schedule.predicted_units()), None)
            if first is not None:
                self.prepare_for_captures().join(first)

    def plan_layout(
        self,
        units: Sequence[nn.Module | Sequence[nn.Module]],
        *,
        ignored_params: Collection[nn.Parameter] = (),
        meshes: Mapping[nn.Module, DeviceMesh] | None = None,
    ) -> None:
        """Plan the layout of ``units`` together, so that parameters that stay whole are balanced
        over all of them. Each is a module, or a list of modules that will be one unit. Call it
        before :func:`fully_shard`, which otherwise places each unit given those before it. It reads
        shapes alone.

        ``meshes``: the mesh of each unit that will have one of its own, by its first module.

        Raises:
            TypeError: the layout function gives something else than a layout for some parameter.
            ValueError: a module is a unit already, was planned before, or is named twice. Nothing
                is planned then.
        """
        from fsdp_overlap.engine.joint_plans import plan_jointly
        from fsdp_overlap.features.implicit_units import large_modules

        def plans_of(first: nn.Module) -> Planner:
            return self.mesh_info_of((meshes or {}).get(first, self.mesh)).plans

        made = [mesh_info.plans for mesh_info in self.mesh_infos]
        plan_jointly(
            units, ignored_params, plans_of, made, large_modules if self.implicit_units else None
        )

    # Units

    @property
    def units(self) -> list[Unit]:
        """The units that still exist, in the order of their :func:`fully_shard` calls."""
        return existing_units(self._refs)

    def register(self, unit: Unit) -> int:
        """Take ``unit`` in and return its index, the same on every rank."""
        self._refs.append(weakref.ref(unit))
        for param_group in unit.param_groups:
            param_group.edits.unit = self._refs[-1]
            param_group.join(self.mesh_info_of(param_group.mesh_info.mesh))
        self.is_initialized = False
        return len(self._refs) - 1

    def lazy_init(self) -> None:
        """Complete the context before a forward: take in the units of the tree that were given no
        context, find the root, name units as users know them, connect param groups to process
        groups, and compare what ranks start from. Do nothing once that is done, and nothing within
        a backward. Collective over the meshes."""
        if self.is_initialized or hooks.is_in_backward():
            return
        is_complete = not self.is_implicit or self._take_in_units_within()
        units = self.units
        in_order = name_units(units)
        for unit in units:
            unit.update_registrations()
        if any(p._given_grad_dtype is not None for u in units for p in u.sharded_parameters):
            self._sync_grad_dtypes()
        self.was_initialized = True
        for unit in units:
            unit.connect()
            unit.schedule_class.take_in(self.schedule, unit)
        self.schedule.order.registered = [unit.index for unit in in_order if unit.has_parameters]
        self.sync_max_reduce_inputs()
        if self.is_uneven or any(unit.is_conditional for unit in units):
            self._negotiate()
        if self.validate_layouts:
            self._compare_plans()
        param_groups = [param_group for unit in units for param_group in unit.param_groups]
        verify_params_across_ranks(param_groups, self.keeps_own_values)
        if self.has_streams:
            self._watch_device()
        self._watches_steps = self._watches_steps or self._watch_first_steps()
        self.is_initialized = is_complete

    def _watch_first_steps(self) -> bool:
        from fsdp_overlap.first_steps import watch_first_steps

        return watch_first_steps(self)

    def _take_in_units_within(self) -> bool:
        from fsdp_overlap.features.implicit_contexts import take_in_units_within

        return take_in_units_within(self)

    def _sync_grad_dtypes(self) -> None:
        from fsdp_overlap.features.grad_dtypes import sync_grad_dtypes

        sync_grad_dtypes([param_group for unit in self.units for param_group in unit.param_groups])

    def _negotiate(self) -> None:
        from fsdp_overlap.features.uneven.contexts import negotiate

        negotiate(self)

    def _compare_plans(self) -> None:
        from fsdp_overlap.features.plan_checks import compare_plans

        for mesh_info in self.mesh_infos:
            compare_plans(self.units, mesh_info)

    # Ranks that run different forwards

    def shadow(self) -> None:
        """Take part in what other ranks run, in place of a forward and backward, or of a forward in
        evaluation. Parameters have their gradients afterwards: the mean over all ranks, to which
        this one adds zero. Return at once if no rank runs anything.

        Call it in place of a backward alone, too, where nothing that this rank ran has gradients.
        Where other ranks reduce no gradients (``set_requires_gradient_sync(False)``), say so here,
        too.

        Raises:
            RuntimeError: no unit is conditional, and this is outside of :meth:`uneven`.
        """
        from fsdp_overlap.features.uneven.contexts import shadow

        shadow(self)

    def uneven(self) -> AbstractContextManager[None]:
        """Within it ranks may run different numbers of forwards, as ``generate()`` does. A rank
        that leaves first takes part in what the others run, until all leave. All ranks enter it,
        between steps.

        All units run on each rank that runs a forward, unless they are conditional. Each forward
        costs a message of a few bytes between hosts.
        """
        from fsdp_overlap.features.uneven.contexts import uneven

        return uneven(self)

    def until_all_done(self, batches: Iterable[T]) -> Iterator[T | None]:
        """Yield this rank's ``batches``, then ``None`` until all ranks have run out. Call
        :meth:`shadow` in place of the forward and backward of a ``None``, then step the optimizer
        as all ranks do::

            for batch in ctx.until_all_done(loader):
                if batch is None:
                    ctx.shadow()
                else:
                    model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        All ranks iterate, and none leaves the loop early by itself.
        """
        from fsdp_overlap.features.uneven.contexts import until_all_done

        return until_all_done(self, batches)

    def _watch_device(self) -> None:
        """Take part in captures of graphs, and watch for hangs, which on a CPU the host sees."""
        from fsdp_overlap.comm.store_mailbox import has_peers
        from fsdp_overlap.features.cuda_graphs.graphs import before_first_capture
        from fsdp_overlap.features.desync_monitor import DesyncMonitor

        if self._captures is None:
            before_first_capture(self.device, self)
        has_others = any(
            has_peers(g) for mesh_info in self.mesh_infos for g in mesh_info.groups_per_dim
        )
        if self.hang_timeout is None or self._monitor is not None or not has_others:
            return
        comm, context = weakref.ref(self.comm_context), weakref.ref(self)

        def comm_streams() -> Sequence[CommStream]:
            existing = comm()
            return () if existing is None else existing.comm_streams

        def on_hang() -> None:
            if (self := context()) is not None:
                self.require_lazy_init()  # so that the next forward asks

        self._monitor = DesyncMonitor(
            self.device, comm_streams, self.error_monitor, self.hang_timeout, on_hang
        )

    def require_lazy_init(self) -> None:
        """Make the next forward :meth:`lazy_init` again."""
        self.is_initialized = False

    @property
    def max_reduce_inputs(self) -> int:
        """The largest number that the user set on a unit, or the default."""
        asked = filter(None, (unit.settings.max_reduce_inputs for unit in self.units))
        return max(asked, default=MAX_INPUTS if self.prefetch else 1)

    def sync_max_reduce_inputs(self) -> None:
        if self.has_schedule:
            self.schedule.reducer.max_inputs = self.max_reduce_inputs

    # Full buffers that are kept between steps

    def start_param_sync(self) -> None:
        """Enqueue the all-gathers of all full buffers that are kept and stale, and of those that
        the next forward needs first. Call it after ``optimizer.step()``: they run under what comes
        before the next forward, and under the forward itself, which waits unit by unit. Without
        this call, forward gathers them, ``prefetch`` units ahead.

        This method, :meth:`finish_param_sync` and :meth:`release_unsharded` may be called at any
        time, and do nothing if there is nothing to do. They leave alone what a forward or backward
        under way uses. Call them on every rank of the mesh.
        """
        self.lazy_init()
        self.join_capture()
        self.schedule.start_param_sync()

    def finish_param_sync(self) -> None:
        """Do :meth:`start_param_sync`, and make compute wait for all full buffers."""
        self.start_param_sync()
        for unit in self.units:
            unit.wait()

    def release_unsharded(self) -> None:
        """Free the full buffers that are kept, for example before a checkpoint or if memory is
        short. The next use gathers them again. torch's allocator holds what was freed on a GPU:
        ``torch.accelerator.empty_cache()`` gives it to others, and makes the host wait."""
        self.lazy_init()
        self.schedule.release_unsharded()

    def reset(self) -> None:
        """Bring every unit to rest after a forward or backward raised, here or on another rank, so
        that the next iteration works. Gradients that have not reached a sharded ``.grad`` are
        dropped. Others have reached it, so call ``zero_grad()`` too. Call this on every rank of the
        mesh: each rank waits for the others. A rank that still waits for a collective of this one
        learns that it must reset too.

        Raises:
            RuntimeError: a rank did not come within the timeout of the process group, or ranks have
                issued different collectives on a process group that is not the context's own.
        """
        if not self.units:
            return
        self.lazy_init()  # so that a rank on which nothing ran yet meets the others too
        for mesh_info in self.mesh_infos:
            mesh_info.groups  # noqa: B018, collective over the mesh if they were not made yet
        self.error_monitor.wait_for_resets(sys.exception())
        self.rest()
        self._groups.renew()
        if self._captures is not None:
            self._captures.lose_groups()
        self.error_monitor.clear()
        self.require_lazy_init()
        self.lazy_init()  # not only before a forward: a backward of an older graph may come next

    def rest(self) -> None:
        """Bring every unit to rest. Call it only if no rank has more under way than others."""
        if self.has_schedule:  # else nothing ran yet
            self.comm_context.wait_for_comm_streams()
            self.schedule.drop()
            self.comm_context.rest()
        for mesh_info in self.mesh_infos:
            mesh_info.reset()
        self.pending_comparisons.clear()


def _begin_backward(
    toggled: weakref.WeakSet[Unit],
    context: weakref.ref[FsdpContext],
    is_capturing: Callable[[], bool],
) -> None:
    if is_capturing() and (own := context()) is not None:
        own.prepare_for_captures().check_backward()
    sync_requires_grad(toggled)


def context_of(unit: Unit) -> FsdpContext:
    """Return the context that ``unit`` is in. The unit itself knows it by a smaller protocol."""
    context = unit.context
    assert isinstance(context, FsdpContext)
    return context
