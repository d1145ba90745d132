"""One bucket's storage: its shard, its full buffer, and the states between."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_overlap.comm.collectives import Collectives, GathersInPlace, Issued, Pieces
from fsdp_overlap.comm.extension_gather import ExtensionGather
from fsdp_overlap.comm.groups import LaneGroups
from fsdp_overlap.comm.lanes import Lane, Mark, Ticket, Travel
from fsdp_overlap.engine.autograd_engine import graph_task, is_in_backward
from fsdp_overlap.engine.bucket_state import BucketState
from fsdp_overlap.engine.chosen_collectives import chosen_collectives
from fsdp_overlap.engine.comm_policy import QuantizedCommPolicy, sent_sizes
from fsdp_overlap.engine.digests import Start
from fsdp_overlap.engine.divided_shard import DividedShard
from fsdp_overlap.engine.domain import BucketEdits, Domain
from fsdp_overlap.engine.landing import Landing, land
from fsdp_overlap.engine.opaque import plain
from fsdp_overlap.engine.ownership import OwnedParameter
from fsdp_overlap.engine.partial_reshard import KeptPart
from fsdp_overlap.engine.places import Places
from fsdp_overlap.engine.settings import Settings
from fsdp_overlap.engine.sharded_forms import (
    own_parts,
    refuse_methods,
    sharded_forms,
    sharded_parameters,
)
from fsdp_overlap.engine.tiles import give_memory, parameter_like, tile_in
from fsdp_overlap.engine.version_counters import VersionCounters
from fsdp_overlap.layout import Plan
from fsdp_overlap.tensor.extension import GatheredTensors
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tensor.ragged_dtensor import attributes_of
from fsdp_overlap.tensor.row_tensor import Sharded


class Bucket:
    """The parameters of a unit that lie together.

    The module's original parameters become views into the full buffer, once. Each has a version
    counter of its own, so autograd's saved tensors do not notice that gathering writes underneath.
    The module has the sharded parameters registered, except while the unit's own forward or
    backward runs.
    """

    is_extension = False
    """Whether its parameters say themselves how they are gathered."""

    def __init__(
        self,
        plan: Plan,
        owned: Sequence[OwnedParameter],
        domain: Domain,
        device: torch.device,
        compute_dtype: torch.dtype,
        offload: CPUOffloadPolicy | None = None,
        comm_policy: QuantizedCommPolicy | None = None,
    ) -> None:
        self.plan = plan
        self.owned = list(owned)
        self.label = ""
        self.index = -1
        """The number of the bucket in its domain. The same on every rank."""
        self.first_flag = 0
        """Where its flags begin among the domain's, which tell which parameters have a gradient."""
        self.state = BucketState.SHARDED
        self.edits = BucketEdits(domain)
        self.domain = domain
        self.groups: LaneGroups
        self.collectives: Collectives[Any]
        self.extensions: ExtensionGather | None = None
        self.compute_dtype = compute_dtype
        self.comm_policy = comm_policy
        self.offload = offload
        """Set if the shard and its gradient rest on the host, and another device computes."""
        self.parameters = [item.parameter for item in owned]
        self.is_tensor_parallel = any(item.is_tensor_parallel for item in owned)
        """Whether some gradients are DTensors, or parts of a sum over tensor parallelism."""
        values = [plain(tile_in(parameter)) for parameter in self.parameters]
        self.sharded_parameters: list[Sharded] = []
        self.allocate(device, self.parameters)
        self.take(values)
        self.give_memory()
        self.start = Start(values, self.version) if domain.communicates else None
        """Digests of what this rank sharded, until ranks have compared them."""
        self.part: KeptPart | None = None
        """The part of the full buffer that is kept until backward, if the unit asks for one."""
        self.counters: VersionCounters
        """Those of the unsharded parameters, which autograd must not read unless they are there."""
        self.divided: DividedShard | None = None
        """The shard, if the ranks that hold copies of it divide it."""
        self._ticket: Ticket | None = None
        self._before: BucketState | None = None  # the state before a gather that is being issued
        self.gathered_version = -1
        """The :attr:`version` that the full buffer has, or will have."""

    def allocate(self, device: torch.device, like: Sequence[torch.Tensor]) -> None:
        """Makes the buffers and the sharded parameters, and registers these parameters in the
        modules. They take their attributes from ``like``."""
        plan, domain = self.plan, self.domain
        self.is_meta = device.type == "meta"
        # The plan among the ranks that gather. The ranks that hold parts of one shard put it
        # together before.
        self.gather_plan = plan.merged(domain.shard_size) if domain.divides_copies else plan
        policy = self.comm_policy
        codes = policy.gather_dtype if policy is not None else None
        sent = sent_sizes(self.gather_plan, self.compute_dtype, policy, codes)
        self.gathered_nbytes = sum(sent)
        """What an all-gather brings together, on all ranks."""
        self.travels_nbytes = self.gathered_nbytes - sent[domain.shard_rank]
        self.grad_dtype = plan.specs[0].grad_dtype or plan.specs[0].dtype
        """The dtype of sharded gradients."""
        made = sharded_parameters(self._make_buffers(device), like, plan, self.owned)
        self.edits.trainability = 0
        self.register(made)

    def _make_buffers(self, device: torch.device) -> Sequence[Sharded]:
        """Makes the full buffer and the shard, and returns what the shard has of each parameter."""
        plan, rank = self.plan, self.domain.plan_rank
        self.full: FlatBuffer | GatheredTensors = FlatBuffer(plan, self.compute_dtype, device)
        self.shard = self._at_rest(device, plan.shard_numels[rank], plan.specs[0].dtype).zero_()
        return sharded_forms(plan, self.shard, self.owned, self.domain, self.edits)

    def give_memory(self) -> None:
        """Makes the unsharded parameters views of the full buffer."""
        assert isinstance(self.full, FlatBuffer)
        for item, view in zip(self.owned, self.full.views, strict=True):
            give_memory(item.parameter, view, item.aliases.values())

    def register(self, sharded: list[Sharded]) -> None:
        """Makes ``sharded`` the sharded parameters, and registers them in the modules."""
        self.sharded_parameters = sharded
        self.look_for_places()
        self.places.use_sharded()

    def look_for_places(self) -> None:
        """Notes where modules have the parameters registered now."""
        self.places = Places(self.owned, self.parameters, self.sharded_parameters)

    def take(self, wholes: Sequence[torch.Tensor]) -> None:
        """Copies this rank's part of the whole parameters into the shard."""
        parts = own_parts(self.plan, wholes, self.domain.plan_rank)
        for sharded, part in zip(self.sharded_parameters, parts, strict=True):
            sharded._local_tensor.copy_(part)

    def _at_rest(self, device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a shard or its gradient in a bucket whose full buffer is on ``device``."""
        if self.offload is None or device.type == "meta":
            return torch.empty(numel, dtype=dtype, device=device)
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.offload.pin_memory)

    @property
    def is_opaque(self) -> bool:
        """Whether nobody may cast its elements, because their class alone knows what they are."""
        return self.plan.specs[0].is_opaque

    @property
    def dtypes(self) -> str:
        """Names the dtypes at rest and in compute, and says if it was frozen when it was made."""
        dtypes = dict.fromkeys((self.shard.dtype, self.compute_dtype))
        spec = self.plan.specs[0]
        frozen = "" if spec.requires_grad else ", frozen"
        gradients = "" if spec.grad_dtype is None else f", gradients {spec.grad_dtype}"
        return f"{' as '.join(map(str, dtypes))}{gradients}{frozen}".replace("torch.", "")

    @property
    def rest_device(self) -> torch.device:
        """Where the shard is, or will be once it is no longer on the meta device."""
        return self.domain.device if self.offload is None else torch.device("cpu")

    def to_host(self, reduced: torch.Tensor) -> Landing:
        """Enqueues the copy of a gradient to the host, where an offloaded shard rests. The copy
        runs after the work that makes ``reduced``."""
        # Fresh memory each time, so that earlier gradients that a user holds stay as they are.
        return land(reduced, self._at_rest(reduced.device, reduced.numel(), reduced.dtype))

    def materialize(self, device: torch.device) -> None:
        """Gives memory on ``device`` to a bucket of the meta device: its shard is zeros, and its
        parameters are new objects."""
        memory = self.full.memory
        self.allocate(device, self.sharded_parameters)
        self.full.memory = memory
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
        """Makes ``unsharded`` the unsharded parameters."""
        self.parameters = unsharded
        for item, parameter in zip(self.owned, unsharded, strict=True):
            item.parameter = parameter
        self.look_for_places()

    def join(self, domain: Domain) -> None:
        """Becomes one of the buckets of ``domain``."""
        self.domain = domain
        self.edits.domain = ref(domain)
        self.index, self.first_flag = domain.register(self, len(self.parameters))

    def connect(self, part_size: int | None, settings: Settings, reduce_dtype: torch.dtype) -> None:
        """Chooses the groups, collectives and memory that gather and reduce the bucket. Call it
        before the first all-gather. Collective over the mesh at the first call.

        ``part_size``: how many neighbours keep a part each between forward and backward. ``None``
        if nobody keeps one. ``reduce_dtype``: what gradients travel in.
        """
        domain = self.domain
        self.edits.has_run = True
        self.groups = groups = domain.groups_for(settings.separates_reductions)
        self.full.memory = domain.memory_for(groups) if settings.uses_group_memory else None
        self.part = None
        refuse_methods(self.label, self.sharded_parameters)
        if part_size is not None:
            group = domain.group_of_neighbours(part_size)
            assert isinstance(self.full, FlatBuffer)
            self.part = KeptPart(self.full, part_size, group, domain.device_type)
        self.collectives = chosen_collectives(
            domain,
            self.gather_plan,
            groups.gather,
            settings,
            self.comm_policy,
            self.compute_dtype,
            reduce_dtype,
            self.extensions,
        )
        if domain.divides_copies:
            self.divided = DividedShard(self, domain)

    def make_unsharded(self) -> bool:
        """Makes the unsharded parameters, if these are what a gather makes, unless it was done
        before. Returns whether it did. Collective over the mesh then. Call it after
        :meth:`connect`."""
        return False

    def signature(self, dtype: torch.dtype) -> int:
        """A number that is the same on ranks which planned the bucket alike, and have as many
        buckets and parameters in the domain. ``dtype`` is what a collective sends."""
        facts = f"{self.plan} {dtype} {self.comm_policy} {self.domain.signature}"
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

    def copy_values_of(self, other: Bucket) -> None:
        """Copies the shard of ``other``, which lies as this one does."""
        self.shard.copy_(other.shard)

    def outdate(self) -> None:
        """Notes that the full buffer has other values than the shards. Its next use gathers it
        again."""
        self.gathered_version = -1

    @property
    def is_gathered(self) -> bool:
        """Whether the full buffer holds the parameters, or will once the all-gather is done."""
        return self.state is not BucketState.SHARDED

    @property
    def is_whole(self) -> bool:
        """Whether it is gathered and the shard was not edited since."""
        return self.state is not BucketState.SHARDED and self.gathered_version == self.version

    def begin_gather(self, lane: Lane) -> None:
        """Gives the full buffer memory. :meth:`is_filled_by` or :meth:`cancel_gather` comes next.

        Raises:
            RuntimeError: the bucket is on the meta device.
        """
        if self.is_meta:
            raise RuntimeError(
                f"unit {self.label!r} is on the meta device: call to_empty(device=...) on the "
                "model, then initialize it or load a checkpoint; or load_state_dict(assign=True)"
            )
        if self.state is BucketState.GATHERING:
            self.wait()
        self._before = self.state
        self.state = BucketState.GATHERING
        # A backward may read them before it waits for this gather.
        if not self.counters.are_forbidden and graph_task() != -1:
            self.counters.forbid_reads()
        if not self.full.allocated:
            lane.allocate(self.label, self.full)

    def cancel_gather(self) -> None:
        """Takes :meth:`begin_gather` back, if it was called: nothing will be gathered."""
        self.state = self._before or self.state
        self._before = None
        if self.state is BucketState.UNSHARDED:
            self.counters.allow_reads()

    def is_filled_by(self, ticket: Ticket) -> None:
        """Notes what fills the full buffer."""
        self._ticket = ticket
        self._before = None
        self.gathered_version = self.version
        if self.offload is not None:
            self.domain.reading = ticket

    def travel(self) -> Travel:
        """How the full buffer is filled: by an all-gather, or from the neighbours' parts if they
        were kept. Collective over the mesh."""
        part = self.part
        if part is None:
            return self._all_gather, None, self.travels_nbytes
        version = self.version
        is_kept = part.holds(version)
        # Backward uses the part up, and without gradients no backward will need it.
        keeps = torch.is_grad_enabled() and not is_in_backward()
        return (
            partial(part.all_gather, self.full.flat) if is_kept else self._all_gather,
            part.keeper(version) if keeps else part.drop,
            part.nbytes_of_others(self.full.flat) if is_kept else self.travels_nbytes,
        )

    def make_pieces(self) -> Pieces | None:
        """Does what :meth:`travel` does before its all-gather, if that is in place: buckets of one
        group can share it. Else ``None``. Call it in the lane's order."""
        if self.part is not None or not isinstance(self.collectives, GathersInPlace):
            return None
        return self.collectives.make_pieces(
            self.full.flat, self._gathered_shard(), self.gather_plan, self.groups.gather
        )

    def _all_gather(self) -> Issued:
        shard = self.shard if self.divided is None else self._gathered_shard()
        return self.collectives.all_gather(
            self.full.flat, shard, self.gather_plan, self.groups.gather
        )

    def _gathered_shard(self) -> torch.Tensor:
        if self.divided is None:
            return self.shard
        self.divided.wait()
        return self.divided.whole.flat

    def wait(self) -> None:
        """Makes compute wait for the all-gather, if one is under way."""
        if self.state is BucketState.GATHERING:
            assert self._ticket is not None
            self._ticket.wait()
            self._ticket = None
            self.state = BucketState.UNSHARDED
            if self.counters.are_forbidden:
                self.counters.allow_reads()

    def free(self, lane: Lane, after: Mark, waits: bool = True) -> None:
        """Frees the full buffer, as the lane does.

        Raises:
            RuntimeError: it is sharded, which is a mistake of the schedule.
        """
        if self.state is BucketState.SHARDED:
            raise RuntimeError(
                f"bucket of unit {self.label!r} is freed and not gathered; after an error call "
                "ctx.reset() on every rank"
            )
        if self._ticket is not None:
            self._ticket.abandon()
            self._ticket = None
        self.state = BucketState.SHARDED
        if graph_task() == -1:  # a backward may follow
            self.counters.forbid_reads()
        lane.free(self.label, self.full, after, waits)

    def reset(self, lane: Lane) -> None:
        """Brings the bucket to rest from any state, even if its all-gather failed."""
        if self.is_gathered:
            self.free(lane, lane.mark_compute())
        elif self.full.allocated:  # by a gather that raised
            lane.free(self.label, self.full, lane.mark_compute())
        self.drop_part()
        if self.divided is not None:
            self.divided.reset()
        self.places.use_sharded()

    def drop_part(self) -> None:
        """Frees the kept part. Backward then gathers from all ranks."""
        if self.part is not None:
            self.part.drop()
