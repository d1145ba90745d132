"""Launch all-gathers, reduce-scatters and frees on comm streams, as the schedule decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import all_gather_coalesced
from fsdp_overlap.comm.comm_streams import (
    CommStream,
    ComputeEvent,
    DeviceWorkHandle,
    PendingCollective,
    WorkHandle,
    profiler_range,
)
from fsdp_overlap.comm.process_groups import alive
from fsdp_overlap.desync.order_check import ALL_GATHER, N_KINDS
from fsdp_overlap.engine.grads import CommPart, ParamGroupGradients, Part
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param_group import ParamGroup, ParamGroupState
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.schedule import interface
from fsdp_overlap.schedule.stats import Stats
from fsdp_overlap.torch_internals import profiler_enabled

SHADOW = " (shadow)"
"""Follows a unit's name in the trace of a rank that does not run it."""

# ---- All-gathers of a unit ----


def gathers_of(unit: Unit, again: bool = False) -> list[tuple[str, list[ParamGroup]]]:
    """Return what is to be gathered of a unit that is not up to date, or ``again``: the name of
    each collective, and its param groups. A param group that is asked to keep a part goes alone,
    because it may travel among other ranks than the rest."""
    waiting = [group for group in unit.param_groups if again or not group.is_up_to_date]
    together: dict[dist.ProcessGroup | ParamGroup, list[ParamGroup]] = {}
    for param_group in waiting:
        key = param_group if param_group.gatherer.goes_alone else param_group.groups.gather
        together.setdefault(key, []).append(param_group)
    return [
        (param_groups[0].label if len(param_groups) == 1 else unit.name, param_groups)
        for param_groups in together.values()
    ]


def _issue(param_groups: Sequence[ParamGroup]) -> PendingCollective:
    """Gather param groups of one group: in one launch those that can, and each of the others."""
    of_groups = [(param_group, param_group.gather_tensors()) for param_group in param_groups]
    group = param_groups[0].groups.gather
    if coalesced := [tensors for _, tensors in of_groups if tensors is not None]:
        outputs, inputs = (list(chain.from_iterable(side)) for side in zip(*coalesced, strict=True))
        if len({tensor.dtype for tensor in inputs}) > 1:
            sides = outputs, inputs
            outputs, inputs = ([tensor.view(torch.uint8) for tensor in side] for side in sides)
        all_gather_coalesced((outputs, inputs), group)
    # Users' extensions may raise. So they come before what gloo writes into full buffers, which
    # ctx.reset() frees.
    rest = [param_group for param_group, tensors in of_groups if tensors is None]
    rest.sort(key=lambda param_group: not param_group.is_extension)
    others = [each.gatherer.collective_op(each)[0]() for each in rest]

    def finish() -> torch.Tensor:
        for other in others:
            other.finish()
        return param_groups[0].full.flat

    return PendingCollective([work for other in others for work in other.works], finish, group)


def _cancel_gather(unit: Unit, param_groups: Sequence[ParamGroup]) -> None:
    for param_group in param_groups:
        param_group.cancel_gather()
    unit.find_state()


# ---- What the schedule decides ----


class CommContext:
    """Owns the comm streams of one context and does on them what its schedule decides: the
    :class:`~fsdp_overlap.schedule.interface.CommOps`, which says what its methods do.

    It counts in ``stats``, and notes for the other ranks what it issues. ``make_comm_stream`` makes
    the comm stream of a name. ``mesh_infos`` and ``units`` list those of the context."""

    exchange_messages: Callable[[bytes], interface.Replies] | None = None
    """Exchanges messages between the hosts of all ranks, if they do."""

    def __init__(
        self,
        make_comm_stream: Callable[[str], CommStream],
        stats: Stats,
        mesh_infos: Callable[[], Iterable[MeshInfo]],
        units: Callable[[], Sequence[Unit]],
    ) -> None:
        self._make_comm_stream = make_comm_stream
        self._stats = stats
        self._mesh_infos = mesh_infos
        self._units = units
        self._use_comm_streams(make_comm_stream("all_gather"), make_comm_stream("reduce_scatter"))
        self._unread: dict[ParamGroup, DeviceWorkHandle] = {}
        """All-gathers for other ranks that compute has to wait for before it edits shards, oldest
        first."""
        self._parts: dict[type[CommPart], CommPart] = {}
        """What features have under way."""

    @cached_property
    def all_reduce_stream(self) -> CommStream:
        """The comm stream of what travels between ranks with replicas, on a mesh ``(replicate,
        shard)``. Made at first use."""
        return self._make_comm_stream("all_reduce")

    @property
    def comm_streams(self) -> list[CommStream]:
        """The comm streams that were made."""
        made = [self.all_gather_stream, self.reduce_scatter_stream]
        return [*made, self.all_reduce_stream] if "all_reduce_stream" in vars(self) else made

    def share_comm_streams_of(self, other: CommContext) -> None:
        """Communicate on the comm streams of ``other``."""
        self._use_comm_streams(other.all_gather_stream, other.reduce_scatter_stream)
        self.all_reduce_stream = other.all_reduce_stream

    def _use_comm_streams(self, gather: CommStream, reduce: CommStream) -> None:
        # The last three are of the schedule's CommOps.
        self.all_gather_stream = gather
        self.reduce_scatter_stream = reduce
        self.runs_ahead = reduce.runs_ahead
        self.after_compute = gather.after_compute
        self.record_compute_event = gather.record_compute_event

    def part(self, kind: type[Part]) -> Part:
        """Return the part of the class ``kind``. It is made at the first call."""
        if kind not in self._parts:
            self._parts[kind] = kind()
        return cast(Part, self._parts[kind])

    is_profiled = staticmethod(profiler_enabled)
    profiler_range = staticmethod(profiler_range)

    # Full buffers

    def exchange(self, message: bytes) -> interface.Replies:
        assert self.exchange_messages is not None
        return self.exchange_messages(message)

    def gather(
        self, unit: interface.ScheduledUnit, again: bool = False, shadow: bool = False
    ) -> None:
        assert isinstance(unit, Unit)
        stats, comm_stream = self._stats, self.all_gather_stream
        # A single one is due, or asked for again: else nobody would call this.
        for label, param_groups in unit.single_all_gather or gathers_of(unit, again):
            for param_group in param_groups:
                if param_group.edits.stepper is not None:
                    param_group.finish_step()
                order_check = param_group.mesh_info.order_check
                code = param_group.index * N_KINDS + ALL_GATHER
                order_check.record(code, param_group, param_group.compute_dtype)
                stats.all_gather_bytes += param_group.gathered_nbytes
                if param_group.gatherer.prepares:
                    param_group.gatherer.prepare(self.all_reduce_stream)
            stats.all_gathers += 1
            try:
                for param_group in param_groups:
                    stats.current_full_buffers += param_group.begin_gather(comm_stream)
                held = stats.current_full_buffers
                stats.peak_full_buffers = max(stats.peak_full_buffers, held)
                if len(param_groups) == 1:
                    issue, accept, nbytes = param_group.gatherer.collective_op(param_group)
                else:
                    issue, accept = partial(_issue, param_groups), None
                    nbytes = sum(param_group.comm_nbytes for param_group in param_groups)
                name = label + SHADOW if shadow else label
                work = comm_stream.enqueue("all_gather", name, issue, accept, nbytes)
                for param_group in param_groups:
                    param_group.record_gather(work)
                unit.is_gathered = True
            except BaseException:
                _cancel_gather(unit, param_groups)
                raise

    def prepare_gathers(self, unit: interface.ScheduledUnit) -> None:
        assert isinstance(unit, Unit)
        for param_group in unit.param_groups:
            if param_group.gatherer.prepares:
                param_group.finish_step()
                param_group.gatherer.prepare(self.all_reduce_stream)

    def wait_for_prepared(self, raised: bool) -> None:
        for unit in self._units():
            for param_group in unit.param_groups:
                if param_group.gatherer.prepares:
                    with suppress(RuntimeError) if raised else nullcontext():
                        param_group.gatherer.wait_for_prepared()

    def free(self, unit: interface.ScheduledUnit, after: ComputeEvent, waits: bool = True) -> None:
        assert isinstance(unit, Unit)
        for param_group in unit.param_groups:
            if param_group.state is not ParamGroupState.SHARDED:
                param_group.free(self.all_gather_stream, after, waits)
                self._stats.current_full_buffers -= not param_group.full.keeps_storage
        unit.is_gathered = False

    def free_unread(self, unit: interface.ScheduledUnit) -> None:
        assert isinstance(unit, Unit)
        for param_group in unit.param_groups:
            self._unread.pop(param_group, None)  # another comes later
            if (work := param_group.leave_unread()) is not None:
                self._unread[param_group] = work
        self.free(unit, None)

    def wait_for_unread(self) -> None:
        if self._unread:
            last = [*self._unread.values()][-1]
            last.wait()  # and for all that is before it on the comm stream
            self._unread.clear()

    def forbid_old_graphs(self, unit: interface.ScheduledUnit, modules: Collection[int]) -> None:
        assert isinstance(unit, Unit)
        inner = (m for module in unit.modules if id(module) in modules for m in module.modules())
        tables = {id(module._parameters) for module in inner}
        for edits in unit.unsharded_edits:
            edits.forbid_old_graphs(tables)

    def keep_storage(self, unit: Unit, keep: bool) -> None:
        """Say whether full buffers of ``unit`` keep their memory while it is sharded."""
        for param_group in unit.param_groups:
            param_group.full.keeps_storage = keep
            if not keep and param_group.full.allocated and not param_group.is_gathered:
                self._stats.current_full_buffers -= 1
                self.all_gather_stream.free(
                    param_group.label,
                    param_group.full,
                    self.all_gather_stream.record_compute_event(),
                )

    # Gradients

    def allocate_input(self, gradients: interface.Gradients) -> None:
        assert isinstance(gradients, ParamGroupGradients)
        gradients.reduce_scatter_input.allocate()
        stats = self._stats
        stats.current_reduce_inputs = held = stats.current_reduce_inputs + 1
        stats.peak_reduce_inputs = max(stats.peak_reduce_inputs, held)

    def reduce(self, gradients: interface.Gradients) -> WorkHandle:
        assert isinstance(gradients, ParamGroupGradients)
        self._stats.reduce_scatters += 1
        self._stats.reduce_scatter_bytes += gradients.reduced_nbytes
        param_group = gradients.param_group
        if param_group in self._unread:  # hooks may edit the shard as soon as it is reduced
            self.reduce_scatter_stream.after_work(self._unread[param_group])
        check, dtype = param_group.mesh_info.order_check, gradients.reduce_scatter_input.flat.dtype
        check.has_reduced = True
        kind = gradients.kinds[gradients.reduce_options.all_reduce_grads]
        code = param_group.index * N_KINDS + kind
        check.record(code, param_group, dtype)
        return gradients.reduce(self)

    def finish(self, gradients: interface.Gradients, work: interface.ReductionWork) -> None:
        assert isinstance(gradients, ParamGroupGradients)
        work.wait()
        self._stats.current_reduce_inputs -= 1
        gradients.reduce_scatter_input.free()

    def abandon(
        self, reductions: Iterable[tuple[interface.Gradients, interface.ReductionWork]]
    ) -> None:
        for _, work in reductions:
            with suppress(RuntimeError):  # a collective failed
                work.abandon()  # what the comm stream reads is about to be freed
        for part in self._parts.values():
            part.abandon()

    def finish_backward(self) -> None:
        for part in self._parts.values():
            part.finish()
        agreed: dict[MeshInfo, Sequence[int]] = {}
        failure: RuntimeError | None = None
        # Small meshes first: a failure there is an error on all ranks of the meshes that follow,
        # also on ranks that would otherwise wait for those that failed.
        for mesh_info in sorted(self._mesh_infos(), key=lambda mesh_info: mesh_info.mesh.size()):
            check = mesh_info.order_check
            if check.has_reduced:
                groups = [ref() or alive(ref) for ref in mesh_info.groups.refs_per_dim]
                self._stats.order_checks += bool(groups and check.is_enabled)
                try:
                    agreed[mesh_info] = check.validate_and_sync(
                        self.reduce_scatter_stream, groups, failed=failure is not None
                    )
                except RuntimeError as error:
                    failure = failure or error
            if mesh_info.reading is not None:
                mesh_info.finish_reading()
        if failure is not None:
            raise failure
        if any(mesh_info.has_late_gradients for mesh_info in agreed):
            self._complete_gradients(agreed)

    def _complete_gradients(self, has_gradient: Mapping[MeshInfo, Sequence[int]]) -> None:
        """Give parameters the gradients that waited for the end of backward. ``has_gradient`` has
        the flags of each mesh."""
        for unit in self._units():
            for gradients in unit.gradients:
                mesh_info = gradients.param_group.mesh_info
                if mesh_info in has_gradient:
                    gradients.complete(has_gradient[mesh_info])
        for mesh_info in has_gradient:
            mesh_info.has_late_gradients = False

    def finish_reading(self) -> None:
        """Block the host until shards that rest there may be edited."""
        for mesh_info in self._mesh_infos():
            mesh_info.finish_reading()

    def wait_for_comm_streams(self) -> None:
        """Make compute wait for all that comm streams still read and write. After an error nobody
        else waits for it."""
        for comm_stream in self.comm_streams:
            comm_stream.before_compute()

    def let_comm_streams_wait(self) -> None:
        """Make all comm streams wait for the compute enqueued so far."""
        for comm_stream in self.comm_streams:
            comm_stream.after_compute()

    def rest(self) -> None:
        """Bring every unit to rest, from any state. The schedule must have dropped everything."""
        for unit in self._units():
            unit.reset(self.all_gather_stream)
        self.wait_for_unread()
        self._stats.current_full_buffers = sum(
            param_group.full.allocated
            for unit in self._units()
            for param_group in unit.param_groups
        )
        self._stats.current_reduce_inputs = 0
