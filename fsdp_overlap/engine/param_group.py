"""Param groups: memory, states and collectives of parameters that are gathered together."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.comm.collectives import (
    Collectives,
    GatherTensors,
    NcclCollectives,
    PendingCollective,
    RangeCollectives,
    choose,
)
from fsdp_overlap.comm.comm_streams import (
    CollectiveOp,
    CommStream,
    ComputeEvent,
    DeviceWorkHandle,
    WorkHandle,
)
from fsdp_overlap.comm.custom_collectives import CustomCollectives, CustomComms
from fsdp_overlap.comm.extension_gather import ExtensionGather
from fsdp_overlap.comm.process_groups import CommGroups, communicates
from fsdp_overlap.comm.quantized import QuantizedFormat
from fsdp_overlap.comm.quantized_choice import gather_for, reduction_for
from fsdp_overlap.comm.row_collectives import InPlaceRows, PackedRows, choose_for_rows
from fsdp_overlap.comm.streams import mark_enqueued
from fsdp_overlap.comm.symmetric_memory import SymmetricCollectives
from fsdp_overlap.engine.autograd import VersionCounters, graph_task, is_in_backward
from fsdp_overlap.engine.hsdp import OuterShard, PostForwardShard
from fsdp_overlap.engine.mesh import MeshInfo, ParamGroupEdits
from fsdp_overlap.engine.options import QuantizedCommPolicy, UnitSettings, sent_sizes
from fsdp_overlap.engine.param import (
    ParamHashes,
    ParamInfo,
    ParamModuleInfo,
    give_memory,
    parameter_like,
    share_attributes,
    tp_local_tensor,
    unwrap,
)
from fsdp_overlap.layout import ParamGroupPlan, Plan, RowsPlan
from fsdp_overlap.tensor.extension import GatheredTensors, is_subclass, missing_methods
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, attributes_of, users_attributes
from fsdp_overlap.tensor.row_tensor import RowTensor, Sharded, read_full_scalars
from fsdp_overlap.torch_internals import StridedShard

# ---- States ----


class ParamGroupState(StrEnum):
    """What changes it, and to what:

    =========  =========  =========  =======
    state      a gather   a wait     freeing
    =========  =========  =========  =======
    sharded    gathering  sharded    raises
    gathering  gathering  unsharded  sharded
    unsharded  gathering  unsharded  sharded
    =========  =========  =========  =======

    A gather of a param group that is gathering waits first. One that is unsharded is gathered
    again, in place, if its shard was edited since."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


# ---- Where a plan puts parameters: ranges, or rows ----


def _range(plan: ParamGroupPlan, fqn: str, rank: int) -> tuple[int, int]:
    held = ((start, stop) for owner, start, stop in plan.ranges(fqn) if owner == rank)
    return next(held, (0, 0))


def row_shard(item: ParamInfo, dim: int) -> Placement:
    """Return the placement of chunks of a parameter. Where tensor parallelism has cut the same
    dimension, the chunks of all ranks do not follow each other in the order of the mesh."""
    factor, parameter = 1, item.parameter
    if item.spmd is not None:
        factor = item.spmd.cuts_after(dim)
    elif isinstance(parameter, DTensor):
        for other, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard) and placement.dim == dim:
                factor *= parameter.device_mesh.size(other)
    return Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)


def places_in_shard(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """Return where in a shard of ``rank`` each parameter begins, and how many elements it has
    there."""
    if isinstance(plan, RowsPlan):
        sizes = [prod(plan.chunk_shape(spec, rank)) for spec in plan.specs]
        return list(zip(plan.starts, sizes, strict=True))
    places = []
    for spec, offset in zip(plan.specs, plan.offsets, strict=True):
        start, stop = _range(plan, spec.fqn, rank)
        first = offset + start - plan.shard_starts[rank] if stop > start else 0
        places.append((first, stop - start))
    return places


# ---- Gradients on their way to the host ----


class D2HCopy(NamedTuple):
    """A gradient on its way to the host, to be read after :meth:`wait`."""

    host: torch.Tensor
    copied: torch.Event | None

    def is_done(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return self.copied is None or self.copied.query()

    def wait(self) -> torch.Tensor:
        """Block the host until the gradient is there, and return it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host


def copy_to_host(source: torch.Tensor, host: torch.Tensor) -> D2HCopy:
    """Enqueue the copy of ``source`` to ``host``, after the work that makes it."""
    host.copy_(source, non_blocking=True)
    return D2HCopy(host, mark_enqueued(source.device))


@dataclass(frozen=True)
class CollectivePair:
    """Gathers and reduces a param group, each of the two in its own way. See
    :class:`~fsdp_overlap.comm.collectives.Collectives`."""

    all_gather: Callable[..., PendingCollective]
    reduce_scatter: Callable[..., PendingCollective]


# ---- Param groups ----


class ParamGroup:
    """The parameters of a unit that lie together.

    The module's original parameters become views into the full buffer, once. Each has a version
    counter of its own, so autograd's saved tensors do not notice that gathering writes underneath.
    The module has the sharded parameters registered, except while the unit's own forward or
    backward runs.
    """

    is_extension = False
    """Whether its parameters say themselves how they are gathered."""
    shares_shard = False
    """Whether a parameter of it is one of another unit too."""
    make_gradients: Callable[..., Any] | None = None
    """What makes its gradients, if a feature treats them otherwise."""

    def __init__(
        self,
        plan: Plan,
        owned: Sequence[ParamInfo],
        mesh_info: MeshInfo,
        device: torch.device,
        compute_dtype: torch.dtype,
        offload: CPUOffloadPolicy | None = None,
        comm_policy: QuantizedCommPolicy | None = None,
    ) -> None:
        self.plan = plan
        self.owned = list(owned)
        self.label = ""
        self.index = -1
        """The number of the param group in its mesh. The same on every rank."""
        self.first_flag = 0
        """Where its flags begin among the mesh's, which tell which parameters have a gradient."""
        self.state = ParamGroupState.SHARDED
        self.edits = ParamGroupEdits(mesh_info)
        self.mesh_info = mesh_info
        self.groups: CommGroups
        self.collectives: Collectives
        self.extensions: ExtensionGather | None = None
        self.compute_dtype = compute_dtype
        self.comm_policy = comm_policy
        self.offload = offload
        """Set if the shard and its gradient rest on the host, and another device computes."""
        self.parameters = [item.parameter for item in owned]
        self.is_tensor_parallel = any(item.is_tensor_parallel for item in owned)
        """Whether some gradients are DTensors, or parts of a sum over tensor parallelism."""
        values = [unwrap(tp_local_tensor(parameter)) for parameter in self.parameters]
        self.sharded_parameters: list[Sharded] = []
        self.allocate(device, self.parameters)
        self.init_shard(values)
        self.give_memory()
        self.init_hashes = ParamHashes(values, self.version) if mesh_info.communicates else None
        """Hashes of what this rank sharded, until ranks have compared them."""
        self.post_forward_shard: PostForwardShard | None = None
        """The part of the full buffer that is kept until backward, if the unit asks for one."""
        self.counters: VersionCounters
        """Those of the unsharded parameters, which autograd must not read unless they are there."""
        self.outer_shard: OuterShard | None = None
        """The shard, if the ranks that hold copies of it divide it."""
        self._work: WorkHandle | None = None
        # the state before a gather that is being issued
        self._before: ParamGroupState | None = None
        self.gathered_version = -1
        """The :attr:`version` that the full buffer has, or will have. -1 if it has none, or other
        values than the shards."""

    def allocate(self, device: torch.device, like: Sequence[torch.Tensor]) -> None:
        """Make the buffers, and the sharded parameters, which take their attributes from ``like``.
        Register them in the modules."""
        plan, mesh_info = self.plan, self.mesh_info
        self.is_meta = device.type == "meta"
        # The plan among the ranks that gather. The ranks that hold parts of one shard put it
        # together before.
        self.gather_plan = plan.merged(mesh_info.shard_size) if mesh_info.shards_replicas else plan
        policy = self.comm_policy
        codes = policy.gather_dtype if policy is not None else None
        sent = sent_sizes(self.gather_plan, self.compute_dtype, policy, codes)
        self.gathered_nbytes = sum(sent)
        """What an all-gather brings together, on all ranks."""
        self.comm_nbytes = self.gathered_nbytes - sent[mesh_info.shard_rank]
        self.grad_dtype = plan.specs[0].grad_dtype or plan.specs[0].dtype
        """The dtype of sharded gradients."""
        before = vars(self).get("full")
        made = self._make_parameters(self._make_buffers(device), like)
        if before is not None:
            self.full.memory, self.full.keeps_storage = before.memory, before.keeps_storage
        self.edits.trainability = 0
        self.register(made)

    def _make_buffers(self, device: torch.device) -> Sequence[Sharded]:
        """Make the full buffer and the shard, and return what the shard has of each parameter."""
        plan, mesh_info, edits = self.plan, self.mesh_info, self.edits
        rank, dtype = mesh_info.plan_rank, plan.specs[0].dtype
        self.full: FlatBuffer | GatheredTensors = FlatBuffer(plan, self.compute_dtype, device)
        self.shard = self._at_rest(device, plan.shard_numels[rank], dtype).zero_()
        tensors: list[Sharded] = []
        places = places_in_shard(plan, rank)
        for item, spec, (first, size) in zip(self.owned, plan.specs, places, strict=True):
            local = self.shard[first : first + size]
            if isinstance(plan, RowsPlan):
                local = local.view(plan.chunk_shape(spec, rank))
                layout = mesh_info.spec(item, row_shard(item, spec.cut_dim), dtype)
                tensors.append(RowTensor.wrap(local, layout, edits))
                read_full_scalars(layout.mesh)
            else:
                layout = mesh_info.spec(item, mesh_info.range_shard(plan, spec.fqn), dtype)
                tensors.append(RaggedDTensor.wrap(local, layout, edits))
        return tensors

    def _make_parameters(
        self, forms: Sequence[Sharded], like: Sequence[torch.Tensor]
    ) -> list[Sharded]:
        """Return the sharded parameters, of which ``forms`` are the tensors. They take their
        attributes from ``like``."""
        made: list[Sharded] = []
        for form, model, spec, item in zip(forms, like, self.plan.specs, self.owned, strict=True):
            parameter = nn.Parameter(form, requires_grad=model.requires_grad)
            vars(parameter).update(users_attributes(model, form._local_tensor))
            if item.is_opaque:
                share_attributes(parameter, item.parameter, item.aliases)
            # isinstance() takes it for a Parameter, and its type is that of the form.
            sharded = cast(Sharded, parameter)
            sharded.keep_gradients_in(getattr(model, "_given_grad_dtype", spec.grad_dtype))
            made.append(sharded)
        return made

    def give_memory(self) -> None:
        """Make the unsharded parameters views of the full buffer."""
        assert isinstance(self.full, FlatBuffer)
        for item, view in zip(self.owned, self.full.views, strict=True):
            give_memory(item.parameter, view, item.aliases.values())

    def register(self, sharded: list[Sharded]) -> None:
        """Make ``sharded`` the sharded parameters, and register them in the modules."""
        self.sharded_parameters = sharded
        self.find_registrations()
        self.module_info.to_sharded()

    def find_registrations(self) -> None:
        """Note where modules have the parameters registered now."""
        self.module_info = ParamModuleInfo(self.owned, self.parameters, self.sharded_parameters)

    def init_shard(self, values: Sequence[torch.Tensor]) -> None:
        """Copy this rank's part of the unsharded ``values`` of the parameters into the shard."""
        plan, rank = self.plan, self.mesh_info.plan_rank
        for sharded, value, spec in zip(self.sharded_parameters, values, plan.specs, strict=True):
            if isinstance(plan, RowsPlan):
                first, last = plan.held(spec, rank)
                part = value.narrow(spec.cut_dim, first, last - first)
            else:
                first, last = _range(plan, spec.fqn, rank)
                part = value.reshape(-1)[first:last]
            sharded._local_tensor.copy_(part)

    def _at_rest(self, device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a shard or its gradient in a param group whose full buffer is on
        ``device``."""
        if self.offload is None or device.type == "meta":
            return torch.empty(numel, dtype=dtype, device=device)
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.offload.pin_memory)

    @property
    def is_opaque(self) -> bool:
        """Whether nobody may cast its elements, because their class alone knows what they are."""
        return self.plan.specs[0].is_opaque

    @property
    def dtypes(self) -> str:
        """Name the dtypes at rest and in compute, and say if it was frozen when it was made."""
        dtypes = dict.fromkeys((self.shard.dtype, self.compute_dtype))
        spec = self.plan.specs[0]
        frozen = "" if spec.requires_grad else ", frozen"
        gradients = "" if spec.grad_dtype is None else f", gradients {spec.grad_dtype}"
        return f"{' as '.join(map(str, dtypes))}{gradients}{frozen}".replace("torch.", "")

    @property
    def rest_device(self) -> torch.device:
        """Where the shard is, or will be once it is no longer on the meta device."""
        return self.mesh_info.device if self.offload is None else torch.device("cpu")

    def to_host(self, reduced: torch.Tensor) -> D2HCopy:
        """Enqueue the copy of a gradient to the host, where an offloaded shard rests. The copy
        runs after the work that makes ``reduced``."""
        # Fresh memory each time, so that earlier gradients that a user holds stay as they are.
        return copy_to_host(reduced, self._at_rest(reduced.device, reduced.numel(), reduced.dtype))

    def materialize(self, device: torch.device) -> None:
        """Give memory on ``device`` to a param group of the meta device: its shard is zeros, and
        its parameters are new objects."""
        self.allocate(device, self.sharded_parameters)
        assert isinstance(self.full, FlatBuffer)
        fresh = []
        for parameter, sharded, view in zip(
            self.parameters, self.sharded_parameters, self.full.views, strict=True
        ):
            # .data gives it a version counter of its own, as the original parameters have.
            unsharded = parameter_like(parameter, view.data, sharded.requires_grad)
            vars(unsharded).update(attributes_of(parameter))
            fresh.append(unsharded)
        self.use_parameters(fresh)

    def use_parameters(self, unsharded: list[nn.Parameter]) -> None:
        """Make ``unsharded`` the unsharded parameters."""
        self.parameters = unsharded
        for item, parameter in zip(self.owned, unsharded, strict=True):
            item.parameter = parameter
        self.find_registrations()

    def join(self, mesh_info: MeshInfo) -> None:
        """Become one of the param groups of ``mesh_info``."""
        self.mesh_info = mesh_info
        self.edits.mesh_info = ref(mesh_info)
        self.index, self.first_flag = mesh_info.register(self, len(self.parameters))

    def connect(
        self, post_forward_size: int | None, settings: UnitSettings, reduce_dtype: torch.dtype
    ) -> None:
        """Choose the groups, collectives and memory that gather and reduce the param group. Call it
        before the first all-gather. Collective over the mesh at the first call.

        ``post_forward_size``: how many neighbors keep a part each between forward and backward.
        ``None`` if nobody keeps one. ``reduce_dtype``: what gradients travel in.
        """
        mesh_info = self.mesh_info
        self.edits.has_run = True
        self.groups = groups = mesh_info.groups_for(settings.separates_reductions)
        self.full.memory = mesh_info.memory_for(groups) if settings.uses_group_memory else None
        self.post_forward_shard = None
        self._validate_methods()
        if post_forward_size is not None:
            group = mesh_info.group_cache.get_neighbors(mesh_info.mesh, post_forward_size)
            assert isinstance(self.full, FlatBuffer)
            self.post_forward_shard = PostForwardShard(
                self.full, post_forward_size, group, mesh_info.device_type
            )
        self.collectives = self._choose_collectives(settings, reduce_dtype)
        if mesh_info.shards_replicas:
            self.outer_shard = OuterShard(self, mesh_info)

    def _validate_methods(self) -> None:
        """Raise TypeError if plain parameters were given the methods of a tensor extension, which
        would not be called."""
        for parameter in self.sharded_parameters:
            local = parameter._local_tensor
            if not is_subclass(local) and len(missing_methods(local)) < 2:
                raise TypeError(
                    f"a parameter of unit {self.label!r}, of shape {tuple(parameter.shape)}, was "
                    "given the methods of a tensor extension after fully_shard(), and is a plain "
                    "tensor: make it one of a class that has them, before fully_shard()"
                )

    def _choose_collectives(self, settings: UnitSettings, reduce_dtype: torch.dtype) -> Collectives:
        """Return what gathers the param group in its dtype of compute and reduces it in
        ``reduce_dtype``, unless it is quantized, or its parameters say themselves how they are
        gathered."""
        mesh_info, plan, group = self.mesh_info, self.gather_plan, self.groups.gather
        policy = self.comm_policy
        flat = plan.packed if isinstance(plan, RowsPlan) else plan
        ranges: RangeCollectives = choose(group, mesh_info.device_type, flat)
        is_alone = not communicates(group)
        is_custom = settings.comms != CustomComms()
        if policy is not None and not policy.applies_to(plan):
            policy = None
        if policy is not None and policy.reduce_dtype is not None and settings.comms.reduce_scatter:
            raise ValueError(
                "set_custom_reduce_scatter() and QuantizedCommPolicy(reduce_dtype=...): gradients "
                "in few bits are sent by an all-to-all and summed after; leave one of the two out"
            )
        if is_custom and not is_alone:
            ranges = CustomCollectives(settings.comms, ranges)
        elif settings.uses_symmetric_memory and not is_alone:
            mesh_info.symmetric_memory.reserve(plan, self.compute_dtype, reduce_dtype)
            ranges = SymmetricCollectives(flat, mesh_info.symmetric_memory)
        chosen: Collectives = ranges
        if isinstance(plan, RowsPlan) and not is_alone:
            is_free = not is_custom and not settings.uses_symmetric_memory
            fastest = choose_for_rows(group, mesh_info.device_type, plan)
            chosen = fastest if is_free else PackedRows(plan, ranges)
        if self.extensions is not None:
            self.extensions.others = ranges
            return CollectivePair(self.extensions.all_gather, chosen.reduce_scatter)
        if policy is None:
            return chosen
        gather, reduce = chosen.all_gather, chosen.reduce_scatter

        def wire(dtype: torch.dtype, codes: torch.dtype) -> QuantizedFormat:
            travels = policy.wire(plan, dtype, codes)
            own = travels.segment(0 if isinstance(plan, RowsPlan) else group.rank())
            return QuantizedFormat(travels, own, codes, policy.scale_dtype(dtype, codes))

        if policy.gather_dtype is not None:
            sent = wire(self.compute_dtype, policy.gather_dtype)
            gather = gather_for(sent, plan, ranges, self.device).all_gather
        if policy.reduce_dtype is not None and not is_alone:
            sent = wire(reduce_dtype, policy.reduce_dtype)
            reduce = reduction_for(sent, plan, self.device).reduce_scatter
        return CollectivePair(gather, reduce)

    def make_unsharded(self) -> bool:
        """Make the unsharded parameters, if these are what a gather makes, unless it was done
        before. Return whether it did. Collective over the mesh then. Call it after
        :meth:`connect`."""
        return False

    def signature(self, dtype: torch.dtype) -> int:
        """Return a number that is the same on ranks which planned the param group alike, and have
        as many param groups and parameters in the mesh. ``dtype`` is what a collective sends."""
        facts = f"{self.plan} {dtype} {self.comm_policy} {self.mesh_info.signature}"
        return zlib.crc32(facts.encode())

    @property
    def device(self) -> torch.device:
        """Where compute uses the parameters."""
        return self.full.flat.device

    @property
    def version(self) -> int:
        """Grows with every edit of the shard, also through ``to_local()``."""
        return self.edits.values + self.shard._version

    @property
    def nbytes_at_rest(self) -> int:
        """The bytes of the shard."""
        return self.shard.nbytes

    def copy_values_of(self, other: ParamGroup) -> None:
        """Copy the shard of ``other``, which lies as this one does."""
        self.shard.copy_(other.shard)

    def finish_step(self) -> None:
        """Block until the shard may be gathered, if a thread steps it.

        Raises:
            RuntimeError: the step failed. Or its optimizer's ``step()`` has not been called.
        """
        self.edits.check_not_ahead(self.label)
        self.edits.finish_step()

    def mark_stale(self) -> None:
        """Note that the full buffer has other values than the shards. Its next use gathers it
        again."""
        self.gathered_version = -1

    @property
    def is_gathered(self) -> bool:
        """Whether the full buffer holds the parameters, or will once the all-gather is done."""
        return self.state is not ParamGroupState.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """Whether it is gathered and the shard was not edited since."""
        return self.gathered_version == self.version

    def begin_gather(self, comm_stream: CommStream) -> None:
        """Give the full buffer memory. :meth:`record_gather` or :meth:`cancel_gather` comes
        next.

        Raises:
            RuntimeError: the param group is on the meta device.
        """
        if self.is_meta:
            raise RuntimeError(
                f"unit {self.label!r} is on the meta device: call to_empty(device=...) on the "
                "model, then initialize it or load a checkpoint; or load_state_dict(assign=True)"
            )
        if self.state is ParamGroupState.GATHERING:
            self.wait()
        self._before = self.state
        self.state = ParamGroupState.GATHERING
        # A backward may read them before it waits for this gather.
        if not self.counters.are_forbidden and graph_task() != -1:
            self.counters.forbid_reads()
        if not self.full.allocated:
            comm_stream.allocate(self.label, self.full)

    def cancel_gather(self) -> None:
        """Take :meth:`begin_gather` back, if it was called: nothing will be gathered."""
        self.state = self._before or self.state
        self._before = None
        if self.state is ParamGroupState.UNSHARDED:
            self.counters.allow_reads()

    def record_gather(self, work: WorkHandle) -> None:
        """Note that ``work`` fills the full buffer."""
        self._work = work
        self._before = None
        self.gathered_version = self.version
        if self.offload is not None:
            self.mesh_info.reading = work

    def collective_op(self) -> CollectiveOp:
        """Return how the full buffer is filled: by an all-gather, or from the neighbors' parts if
        they were kept. Collective over the mesh."""
        part = self.post_forward_shard
        if part is None:
            return self._all_gather, None, self.comm_nbytes
        version = self.version
        is_kept = part.holds(version)
        # Backward uses the part up, and without gradients no backward will need it.
        keeps = torch.is_grad_enabled() and not is_in_backward()
        return (
            partial(part.all_gather, self.full.flat) if is_kept else self._all_gather,
            part.keeper(version) if keeps else part.drop,
            part.nbytes_of_others(self.full.flat) if is_kept else self.comm_nbytes,
        )

    def gather_tensors(self) -> GatherTensors | None:
        """Return what its all-gather fills and sends, if NCCL can run it as one with others of the
        same group. Else ``None``. Call it in the comm stream's order."""
        own = self.collectives
        if self.post_forward_shard is not None or not isinstance(
            own, NcclCollectives | InPlaceRows
        ):
            return None
        return own.gather_tensors(self.full.flat, self._gathered_shard(), self.groups.gather)

    def _all_gather(self) -> PendingCollective:
        shard = self.shard if self.outer_shard is None else self._gathered_shard()
        return self.collectives.all_gather(self.full.flat, shard, self.groups.gather)

    def _gathered_shard(self) -> torch.Tensor:
        if self.outer_shard is None:
            return self.shard
        self.outer_shard.wait()
        return self.outer_shard.full_shard.flat

    def wait(self) -> None:
        """Make compute wait for the all-gather, if one is under way."""
        if self.state is ParamGroupState.GATHERING:
            assert self._work is not None
            self._work.wait()
            self._work = None
            self.state = ParamGroupState.UNSHARDED
            if self.counters.are_forbidden:
                self.counters.allow_reads()

    def leave_unread(self) -> DeviceWorkHandle | None:
        """Return an all-gather under way that compute need not wait for before the full buffer is
        freed: what it writes to is used next on its own comm stream. It may still read the shard,
        so it comes before edits of that."""
        work = self._work
        if not isinstance(work, DeviceWorkHandle):
            return None
        self._work = None
        return work

    def free(self, comm_stream: CommStream, after: ComputeEvent, waits: bool = True) -> None:
        """Free the full buffer, as the comm stream does. Raise RuntimeError if it is sharded, which
        is a mistake of the schedule."""
        if self.state is ParamGroupState.SHARDED:
            raise RuntimeError(
                f"param group of unit {self.label!r} is freed and not gathered; after an error "
                "call ctx.reset() on every rank"
            )
        if self._work is not None:  # it may still read the shard, which compute may edit
            self._work.abandon()
            self._work = None
        self.state = ParamGroupState.SHARDED
        self.gathered_version = -1
        if graph_task() == -1:  # a backward may follow
            self.counters.forbid_reads()
        comm_stream.free(self.label, self.full, after, waits)

    def reset(self, comm_stream: CommStream) -> None:
        """Bring the param group to rest from any state, even if its all-gather failed."""
        if self.is_gathered:
            self.free(comm_stream, comm_stream.record_compute_event())
        elif self.full.allocated:  # by a gather that raised
            comm_stream.free(self.label, self.full, comm_stream.record_compute_event())
        self.free_post_forward_shard()
        if self.outer_shard is not None:
            self.outer_shard.reset()
        if self.edits.stepper is not None:
            self.edits.stepper.reset()
        self.module_info.to_sharded()

    def free_post_forward_shard(self) -> None:
        """Free the kept part. Backward then gathers from all ranks."""
        if self.post_forward_shard is not None:
            self.post_forward_shard.drop()


# ---- grad_dtype that users set on sharded parameters ----


def sync_grad_dtypes(param_groups: Sequence[ParamGroup]) -> None:
    """Make the ``grad_dtype`` of sharded parameters that of their param groups. It cannot change
    any more once their unit was gathered.

    Raises:
        RuntimeError: the parameters of a param group have several. No param group was changed then.
    """
    for param_group in param_groups:
        dtypes = {parameter._grad_dtype for parameter in param_group.sharded_parameters}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"unit {param_group.label!r} has parameters whose grad_dtype is "
                f"{' and '.join(sorted(map(str, dtypes)))}, and their gradients travel together: "
                "set the same for all of them, or set it before fully_shard()"
            )
    for param_group in param_groups:
        # Also the parameters' own dtype if somebody set it: compute may have another, in which
        # autograd would sum.
        given = [parameter._given_grad_dtype for parameter in param_group.sharded_parameters]
        dtype = next((dtype for dtype in given if dtype is not None), None)
        if dtype is not None and dtype != param_group.plan.specs[0].grad_dtype:
            param_group.grad_dtype = dtype
            specs = tuple(replace(spec, grad_dtype=dtype) for spec in param_group.plan.specs)
            param_group.plan = replace(param_group.plan, specs=specs)
