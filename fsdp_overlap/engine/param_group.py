"""Param groups: storage, states and collectives of parameters that are gathered together."""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap.comm.collectives import (
    CoalescedGathers,
    Collectives,
    GatherTensors,
    RangeCollectives,
    Transport,
    all_reduce,
    choose,
)
from fsdp_overlap.comm.comm_streams import (
    CollectiveOp,
    CommStream,
    ComputeEvent,
    DeviceWorkHandle,
    PendingCollective,
    WorkHandle,
)
from fsdp_overlap.comm.host_copies import D2HCopy
from fsdp_overlap.comm.process_groups import CommGroups, communicates
from fsdp_overlap.desync.order_check import START
from fsdp_overlap.engine.mesh import MeshInfo, ParamGroupEdits
from fsdp_overlap.engine.options import CommPolicy, UnitOptions, UnitSettings
from fsdp_overlap.engine.param import (
    ParamHashes,
    ParamInfo,
    ParamModuleInfo,
    compute_dtype,
    hash_of,
    parameter_like,
    tp_local_tensor,
    unwrap,
)
from fsdp_overlap.layout import ParamGroupPlan, ParamSpec, Plan
from fsdp_overlap.tensor.flat_buffer import Buffer, FlatBuffer, VersionCounters
from fsdp_overlap.tensor.ragged_dtensor import (
    RaggedDTensor,
    ShardedParam,
    attributes_of,
    users_attributes,
)
from fsdp_overlap.tensor.subclasses import POST, PRE
from fsdp_overlap.torch_internals import current_graph_task_id

# ---- Where shards and their gradients rest ----


class Storage:
    """Where shards and their gradients rest: on the device that computes."""

    is_on_host = False
    """Whether they rest on the host, and another device computes."""

    def rest_device(self, device: torch.device) -> torch.device:
        """Return where shards rest of which ``device`` computes with the parameters."""
        return device

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a shard or its gradient. ``device``: where the full buffer is."""
        return torch.empty(numel, dtype=dtype, device=device)

    def to_host(self, reduced: torch.Tensor) -> D2HCopy:
        """Enqueue the copy of a gradient to where its shard rests, if that is the host. The copy
        runs after the work that makes ``reduced``."""
        raise NotImplementedError


DEVICE = Storage()


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


# ---- How full buffers are filled ----


class Gatherer:
    """Fills full buffers: by one all-gather among the ranks that hold shards. Others derive from
    it, and are of one param group."""

    goes_alone = False
    """Whether it may gather among other ranks than other param groups of the unit."""
    prepares = False
    """Whether :meth:`prepare` and :meth:`wait_for_prepared` do anything."""

    def collective_op(self, param_group: ParamGroup) -> CollectiveOp:
        """Return how the full buffer is filled. Collective over the mesh."""
        group = param_group.groups.gather_ref() or param_group.groups.gather
        full, shard = param_group.full.flat, param_group.shard
        issue = partial(param_group.collectives.all_gather, full, shard, group)
        return issue, None, param_group.comm_nbytes

    def source(self, param_group: ParamGroup) -> torch.Tensor:
        """Return what this rank sends in an all-gather. Call it in the comm stream's order. A
        subclass that sends something else than the shard overrides :meth:`collective_op` too."""
        return param_group.shard

    def prepare(self, comm_stream: CommStream) -> None:
        """Enqueue on ``comm_stream`` what comes before all-gathers. Collective over replicas."""

    def wait_for_prepared(self) -> None:
        """Make the current comm stream wait for what :meth:`prepare` enqueued."""

    def replica_reduction(
        self, total: torch.Tensor, group: dist.ProcessGroup, divisor: float | None
    ) -> tuple[str, int, Callable[[], PendingCollective]]:
        """Return how a gradient that was reduced among shards is reduced over replicas: the
        collective's name, how often its bytes travel, and a function that issues it."""
        return "all_reduce", 2, partial(all_reduce, total, group, divisor)

    def drop_parts(self) -> None:
        """Free what is kept of the full buffer between forward and backward."""

    def mark_stale(self) -> None:
        """Note that nothing that is kept has the values of the shards."""


DIRECT = Gatherer()

MakeGatherer = Callable[["ParamGroup", int | None], Gatherer]
"""Returns the gatherer of a param group of which so many neighbors keep a part each between forward
and backward. ``None``: nobody keeps one."""


def direct_gatherer(param_group: ParamGroup, post_forward_size: int | None) -> Gatherer:
    """Return the gatherer of a param group whose full buffer is freed or kept as a whole."""
    return DIRECT


def sent_sizes(
    plan: Plan, dtype: torch.dtype, policy: CommPolicy | None, reduced: bool = False
) -> list[int]:
    """Return how many bytes each rank sends of a param group of ``dtype``, or gets of its gradients
    if they are ``reduced``. ``None``: they travel as they are."""
    if policy is not None:
        return policy.sent_sizes(plan, dtype, reduced)
    return [numel * dtype.itemsize for numel in plan.shard_numels]


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
    make_gatherer: MakeGatherer = staticmethod(direct_gatherer)
    """Chooses the gatherer when the param group is connected."""
    gatherer = DIRECT
    label = ""
    index = -1
    """The number of the param group in its mesh. The same on every rank."""
    first_flag = 0
    """Where its flags begin among the mesh's, which tell which parameters have a gradient."""
    state = ParamGroupState.SHARDED
    gathered_version = -1
    """The :attr:`version` that the full buffer has, or will have. -1 if it has none, or other
    values than the shards."""
    _work: WorkHandle | None = None
    _before: ParamGroupState | None = None
    """The state before a gather that is being issued."""
    compute_copy: Any = None
    """A copy of the shard in the dtype of compute, if all-gathers read that."""
    reading: WorkHandle | None = None
    """The last all-gather that reads a shard on the host."""
    counters: VersionCounters
    """Those of the unsharded parameters, which autograd must not read unless they are there."""
    transport: Transport | None = None
    groups: CommGroups
    collectives: Collectives
    carriers: RangeCollectives
    """Collectives of ranges, on which :attr:`collectives` are built."""
    reduce_dtype: torch.dtype
    """What gradients travel in."""

    def __init__(
        self,
        plan: Plan,
        owned: Sequence[ParamInfo],
        mesh_info: MeshInfo,
        device: torch.device,
        options: UnitOptions,
    ) -> None:
        self.plan = plan
        self.owned = list(owned)
        self.edits = ParamGroupEdits(mesh_info)
        self.mesh_info = mesh_info
        self.compute_dtype = compute_dtype(plan.specs[0], options.mp_policy)
        self.comm_policy = options.comm_policy
        self.storage: Storage = options.storage
        self.parameters = [item.parameter for item in owned]
        self.is_tensor_parallel = any(item.is_tensor_parallel for item in owned)
        """Whether some gradients are DTensors, or parts of a sum over tensor parallelism."""
        values = [unwrap(tp_local_tensor(parameter)) for parameter in self.parameters]
        self.sharded_parameters: list[ShardedParam] = []
        self.allocate(device, self.parameters)
        self.init_shard(values)
        self.give_memory()
        self.init_hashes = ParamHashes(values, self.version) if mesh_info.communicates else None
        """Hashes of what this rank sharded, until ranks have compared them."""

    def allocate(self, device: torch.device, like: Sequence[torch.Tensor]) -> None:
        """Make the buffers, and the sharded parameters, which take their attributes from ``like``.
        Register them in the modules."""
        plan, mesh_info = self.plan, self.mesh_info
        self.is_meta = device.type == "meta"
        # The plan among the ranks that gather. The ranks that hold parts of one shard put it
        # together before.
        self.gather_plan = plan.merged(mesh_info.shard_size) if mesh_info.shards_replicas else plan
        sent = sent_sizes(self.gather_plan, self.compute_dtype, self.comm_policy)
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

    def _make_buffers(self, device: torch.device) -> Sequence[ShardedParam]:
        """Make the full buffer and the shard, and return what the shard has of each parameter."""
        plan, rank, dtype = self.plan, self.mesh_info.plan_rank, self.plan.specs[0].dtype
        self.full: Buffer = FlatBuffer(plan, self.compute_dtype, device)
        self.shard = self.storage.empty(plan.shard_numels[rank], dtype, device).zero_()
        return [
            self._make_sharded(item, spec, self.shard[first : first + size])
            for item, spec, (first, size) in zip(
                self.owned, plan.specs, plan.places(rank), strict=True
            )
        ]

    def _make_sharded(self, item: ParamInfo, spec: ParamSpec, local: torch.Tensor) -> ShardedParam:
        """Return the sharded form of a parameter, of which this rank has ``local``, flat."""
        assert isinstance(self.plan, ParamGroupPlan)
        placement = self.mesh_info.range_shard(self.plan, spec.fqn)
        layout = self.mesh_info.spec(item, placement, self.plan.specs[0].dtype)
        return RaggedDTensor.wrap(local, layout, self.edits)

    def _own_part(self, value: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
        """Return this rank's part of an unsharded parameter."""
        assert isinstance(self.plan, ParamGroupPlan)
        first, last = self.plan.range_of(spec.fqn, self.mesh_info.plan_rank)
        return value.reshape(-1)[first:last]

    def _make_parameters(
        self, forms: Sequence[ShardedParam], like: Sequence[torch.Tensor]
    ) -> list[ShardedParam]:
        """Return the sharded parameters, of which ``forms`` are the tensors. They take their
        attributes from ``like``."""
        made: list[ShardedParam] = []
        for form, model, spec, item in zip(forms, like, self.plan.specs, self.owned, strict=True):
            sharded = form.as_parameter(model.requires_grad)
            vars(sharded).update(users_attributes(model, form._local_tensor))
            item.complete(sharded)
            sharded.keep_gradients_in(getattr(model, "_given_grad_dtype", spec.grad_dtype))
            made.append(sharded)
        return made

    def give_memory(self) -> None:
        """Make the unsharded parameters views of the full buffer."""
        assert isinstance(self.full, FlatBuffer)
        for item, view in zip(self.owned, self.full.views, strict=True):
            item.give_memory(view)

    def register(self, sharded: list[ShardedParam]) -> None:
        """Make ``sharded`` the sharded parameters, and register them in the modules."""
        self.sharded_parameters = sharded
        self.find_registrations()
        self.module_info.to_sharded()

    def find_registrations(self) -> None:
        """Note where modules have the parameters registered now."""
        self.module_info = ParamModuleInfo(self.owned, self.parameters, self.sharded_parameters)

    def init_shard(self, values: Sequence[torch.Tensor]) -> None:
        """Copy this rank's part of the unsharded ``values`` of the parameters into the shard."""
        specs = self.plan.specs
        for sharded, value, spec in zip(self.sharded_parameters, values, specs, strict=True):
            sharded._local_tensor.copy_(self._own_part(value, spec))

    @property
    def never_cast(self) -> bool:
        """Whether nobody may cast its elements, because their class alone knows what they are."""
        return self.plan.specs[0].never_cast

    @property
    def contents(self) -> str:
        """Tell it from the other param groups of its unit."""
        number = self.plan.specs[0].piece
        return f"{self.dtypes}, piece {number}" if number else self.dtypes

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
        return self.storage.rest_device(self.mesh_info.device)

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
        self.groups = mesh_info.groups_for(settings.separates_reductions)
        self.full.memory = None if settings.memory_of is None else settings.memory_of(self)
        self._validate_methods()
        self.gatherer = self.make_gatherer(self, post_forward_size)
        self.transport, self.reduce_dtype = settings.transport, reduce_dtype
        self.collectives = self._choose_collectives()

    def _validate_methods(self) -> None:
        """Raise TypeError if plain parameters were given the methods of a tensor extension, which
        would not be called."""
        for parameter in self.sharded_parameters:
            local = parameter._local_tensor
            if type(local) is torch.Tensor and (hasattr(local, PRE) or hasattr(local, POST)):
                self._refuse_methods(parameter)

    def _refuse_methods(self, parameter: ShardedParam) -> NoReturn:
        raise TypeError(
            f"a parameter of unit {self.label!r}, of shape {tuple(parameter.shape)}, was given the "
            "methods of a tensor extension after fully_shard(), and is a plain tensor: make it one "
            "of a class that has them, before fully_shard()"
        )

    def _choose_collectives(self) -> Collectives:
        """Return what gathers the param group in its dtype of compute and reduces it in
        :attr:`reduce_dtype`."""
        group, policy = self.groups.gather, self.comm_policy
        self.carriers = choose(group, self.mesh_info.device.type, self.gather_plan.packed)
        if self.transport is not None and communicates(group):
            self.carriers = self.transport.wrap(self.carriers, self)
        collectives = self._wrap_carriers()
        return collectives if policy is None else policy.wrap(collectives, self)

    def _wrap_carriers(self) -> Collectives:
        """Return what gathers and reduces by :attr:`carriers`."""
        return self.carriers

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
    def is_up_to_date(self) -> bool:
        """Whether it is gathered and the shard was not edited since."""
        return self.gathered_version == self.version

    def begin_gather(self, comm_stream: CommStream) -> bool:
        """Give the full buffer memory. Return whether it had none. :meth:`record_gather` or
        :meth:`cancel_gather` comes next.

        Raises:
            RuntimeError: the param group is on the meta device.
        """
        if self.is_meta:
            self._refuse_meta()
        if self.state is ParamGroupState.GATHERING:
            self.wait()
        self._before = self.state
        self.state = ParamGroupState.GATHERING
        # A backward may read them before it waits for this gather.
        if not self.counters.are_forbidden and current_graph_task_id() != -1:
            self.counters.forbid_reads()
        if self.full.allocated:
            return False
        comm_stream.allocate(self.label, self.full)
        return True

    def _refuse_meta(self) -> NoReturn:
        raise RuntimeError(
            f"unit {self.label!r} is on the meta device: call to_empty(device=...) on the model, "
            "then initialize it or load a checkpoint; or load_state_dict(assign=True)"
        )

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
        self.gathered_version = self.edits.values + self.shard._version  # as version, in each step
        if self.storage.is_on_host:
            self.mesh_info.reading = self.reading = work

    def gather_tensors(self) -> GatherTensors | None:
        """Return what its all-gather fills and sends, if NCCL can run it as one with others of the
        same group. Else ``None``. Call it in the comm stream's order."""
        own = self.collectives
        if self.gatherer.goes_alone or not isinstance(own, CoalescedGathers):
            return None
        return own.gather_tensors(self.full.flat, self.gatherer.source(self), self.groups.gather)

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
            self._refuse_free()
        if self._work is not None:  # it may still read the shard, which compute may edit
            self._work.abandon()
            self._work = None
        self.state = ParamGroupState.SHARDED
        self.gathered_version = -1
        self.counters.forbid_reads()
        comm_stream.free(self.label, self.full, after, waits)

    def _refuse_free(self) -> NoReturn:
        raise RuntimeError(
            f"param group of unit {self.label!r} is freed and not gathered; after an error call "
            "ctx.reset() on every rank"
        )

    @staticmethod
    def give_grads(parameters: Iterable[Any], locals_: Iterable[torch.Tensor]) -> None:
        """Give each of ``parameters``, which are sharded, its gradient. ``locals_`` has what this
        rank has of each gradient, flat. If a parameter has a gradient already, the two are
        added."""
        for parameter, local in zip(parameters, locals_, strict=True):
            gradient = parameter._gradient
            if gradient is not None:
                gradient._local_tensor.add_(local)
                continue
            gradient = parameter._given_gradient
            if gradient is None:
                gradient = parameter._given_gradient = RaggedDTensor.wrap(
                    local, parameter._grad_spec
                )
            else:
                gradient._local_tensor = local
            parameter._gradient = gradient

    def reset(self, comm_stream: CommStream) -> None:
        """Bring the param group to rest from any state, even if its all-gather failed."""
        if self.is_gathered:
            self.free(comm_stream, comm_stream.record_compute_event())
        elif self.full.allocated:  # by a gather that raised
            comm_stream.free(self.label, self.full, comm_stream.record_compute_event())
        self.gatherer.drop_parts()
        self.gatherer.mark_stale()
        if self.edits.stepper is not None:
            self.edits.stepper.reset()
        self.module_info.to_sharded()


# ---- Whether ranks start from the same values: Note [starts] ----

# Stands for the summary of a rank's hashes, if it is known that some ranks differ.
DIFFERENT = -1


KEPT = (
    "Now each rank keeps its own part, as with FSDP2: the model is put together from the values of "
    "all ranks."
)
COPIES = " Replicas have different copies of it, and keep them unless one broadcasts its own."


def verify_params_across_ranks(
    param_groups: Sequence[ParamGroup], keeps_own_values: bool = False
) -> None:
    """Compare what ranks start from in those ``param_groups`` that were not compared yet.
    Collective over their meshes.

    Args:
        keeps_own_values: whether ranks that differ are only warned, on the first rank.

    Raises:
        RuntimeError: on every rank, if ranks hold different values and do not keep them, naming the
            first parameter; or if some have memory of ``to_empty()`` that nobody wrote.
    """
    by_mesh: dict[MeshInfo, list[ParamGroup]] = {}
    for param_group in param_groups:
        if param_group.init_hashes is not None:
            by_mesh.setdefault(param_group.mesh_info, []).append(param_group)
    marked: list[Any] = [group for group in param_groups if hasattr(group.init_hashes, "unwritten")]
    failure = marked[0].init_hashes.unwritten(marked) if marked else ""
    # Small meshes first: a difference there is an error on all ranks of the meshes that follow.
    for mesh_info in sorted(by_mesh, key=lambda mesh_info: mesh_info.mesh.size()):
        failure = _difference(mesh_info, by_mesh[mesh_info], failure) or failure
    if failure:
        _report(failure, by_mesh, keeps_own_values and not marked)
    for param_group in param_groups:
        param_group.init_hashes = None


def _report(failure: str, mesh_infos: Collection[MeshInfo], keeps_own_values: bool) -> None:
    if not keeps_own_values:
        raise RuntimeError(failure)
    if any(dist.get_rank() == int(mesh_info.mesh.mesh.min()) for mesh_info in mesh_infos):
        has_copies = any(mesh_info.num_replicas > 1 for mesh_info in mesh_infos)
        warnings.warn(f"{failure} {KEPT}{COPIES if has_copies else ''}", stacklevel=3)


def _difference(mesh_info: MeshInfo, param_groups: Sequence[ParamGroup], failure: str) -> str:
    """Return what differs between ranks of ``mesh_info``, or was found on another mesh, in words.
    ``failure`` is what this rank found there. Empty if nothing differs, and if ranks have different
    models, which the check of the order finds."""
    hashes: list[int] = []
    for param_group in param_groups:
        assert param_group.init_hashes is not None
        hashes += param_group.init_hashes.hashes(param_group.version)
    shapes = hash_of(repr([param_group.plan.specs for param_group in param_groups]).encode())
    summary = DIFFERENT if failure else hash_of(array("q", hashes).tobytes())
    for group in mesh_info.groups_to_check:
        # What differs in one group is made known to the next.
        for _, its_shapes, its_summary in mesh_info.order_check.exchange(
            [START, shapes, summary], group
        ):
            shapes = shapes if its_shapes == shapes else DIFFERENT
            summary = summary if its_summary == summary else DIFFERENT
    differs = shapes != DIFFERENT and summary == DIFFERENT
    return _described(mesh_info, param_groups, hashes, failure) if differs else ""


def _described(
    mesh_info: MeshInfo, param_groups: Sequence[ParamGroup], hashes: list[int], failure: str
) -> str:
    from fsdp_overlap.engine.start_differences import describe_difference

    names = [f"{spec.fqn!r} of unit {b.label!r}" for b in param_groups for spec in b.plan.specs]
    return describe_difference(mesh_info, names, hashes, failure)
