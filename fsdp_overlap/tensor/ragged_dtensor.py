"""The sharded form of a parameter, of its gradient and of its optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, ClassVar, NoReturn, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from fsdp_overlap.tensor.comm_dtypes import as_comm_dtype
from fsdp_overlap.tensor.gradient_errors import needs_gradient, raise_in_backward
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tensor.placement import (
    RaggedShard,
    contiguous_spec,
    has_tiles,
    is_on_mesh,
    local_range,
    range_dim,
    tile_of,
)
from fsdp_overlap.tensor.sharded_param import ShardedParam
from fsdp_overlap.torch_internals import (
    DisableTorchFunctionSubclass,
    DTensorSpec,
    allow_foreach,
)


class ShardEdits:
    """Counts the edits of one param group's shards, so that stale full buffers are noticed.

    A shard changes through ops on its sharded parameters. Autograd's version counters alone do not
    tell of these, because fused optimizers do not bump them. ``has_hooks``: whether somebody asked
    to be told when a gradient is there. ``has_run``: whether the dtype of gradients is settled.
    """

    __slots__ = ("has_hooks", "has_run", "trainability", "values")

    def __init__(self) -> None:
        self.values = 0
        self.trainability = 0
        self.has_hooks = False
        self.has_run = False

    def record_values(self) -> None:
        self.values += 1

    def record_trainability(self, parameter: torch.Tensor) -> None:
        """Record that somebody set ``requires_grad`` of a sharded parameter."""
        self.trainability += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardEdits:
        """Return the edits of a copy, which belongs to no unit. ``dcp.async_save()`` copies all
        that a tensor has, which would be the unit's and its optimizer's threads."""
        return ShardEdits()


class RaggedDTensor(ShardedParam):
    """A tensor of which each rank of a mesh holds one contiguous range, flattened.

    It is a :class:`~torch.distributed.tensor.DTensor` to ``isinstance``, ``device_mesh`` and
    ``placements``, but no op reaches DTensor's sharding rules. Point-wise, foreach and fused ops
    run on the local ranges. Norms and sums reduce across the ranks: this is collective over the
    mesh and returns a plain tensor. Contiguous views stay sharded. Every other op raises.
    """

    _run_op: ClassVar[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]]
    """Runs an op on sharded tensors. The ops build on this class, so the class cannot import them:
    the package, :mod:`fsdp_overlap.tensor`, sets this."""

    edits: ShardEdits | None = None
    """Set on parameters. ``None`` on gradients and optimizer states, which nobody gathers."""

    @classmethod
    def wrap(
        cls, local: torch.Tensor, spec: DTensorSpec, edits: ShardEdits | None = None
    ) -> RaggedDTensor:
        """Return the sharded tensor whose range on this rank is ``local``, flat. It is not
        copied."""
        tensor = cast(RaggedDTensor, DTensor.__new__(cls, local, spec, requires_grad=False))
        if edits is not None:
            tensor.edits = edits
        return tensor

    def as_parameter(self, requires_grad: bool) -> RaggedDTensor:
        # nn.Parameter() does this to a detached tensor, by two ops.
        with DisableTorchFunctionSubclass():
            self.requires_grad_(requires_grad)
        self._is_param = True
        # Weak references to it make torch.utils.swap_tensors() refuse to move it out of its unit.
        self.aliases = WeakSet((self,))
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return cls._run_op(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise_unsupported(str(func))

    # Autograd never accumulates into a sharded tensor, so it has no other gradient than ours.

    def _fits(self, gradient: torch.Tensor) -> bool:
        return (
            isinstance(gradient, RaggedDTensor)
            and gradient.placement == self.placement
            and gradient._shape == self._shape
        )

    def gradient_of(self, local: torch.Tensor) -> DTensor:
        return RaggedDTensor.wrap(local, self._grad_spec)

    def write_gradient(self, gradient: DTensor, value: torch.Tensor) -> None:
        gradient.copy_(value)

    @property
    def placement(self) -> RaggedShard:
        """Which rank of :attr:`range_group` holds which range."""
        placement = self._spec.placements[range_dim(self._spec)]
        assert isinstance(placement, RaggedShard)
        return placement

    @property
    def range_group(self) -> dist.ProcessGroup:
        """The ranks that hold a range each: those along one dimension of the mesh."""
        return self._spec.mesh.get_group(range_dim(self._spec))

    @property
    def range_rank(self) -> int:
        """This rank's place in :attr:`range_group`."""
        return self._spec.mesh.get_local_rank(range_dim(self._spec))

    @property
    def local_range(self) -> tuple[int, int]:
        """``(start, stop)`` of this rank's range in the flattened tensor, in elements. If other
        dimensions of the mesh cut the tensor too, they are positions in this rank's tile."""
        return local_range(self._spec)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's range, flat. It shares memory: in-place edits of it edit the
        parameter."""
        finish_pending_steps()
        if needs_gradient([self]):
            local = self._local_tensor.detach()
            return cast(torch.Tensor, raise_in_backward("to_local", local, [self]))
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor on every rank, a copy. Must be called on every rank of the
        mesh."""
        spec, full = self._spec, self.full_tile()
        if has_tiles(spec):
            placements = tuple(p if isinstance(p, Shard) else Replicate() for p in spec.placements)
            tiles = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
            full = DTensor.__new__(DTensor, full, tiles, requires_grad=False).full_tensor()
        full = full.to(self._local_tensor.device)
        return cast(torch.Tensor, raise_in_backward("full_tensor", full, [self]))

    def full_tile(self) -> torch.Tensor:
        """Return this rank's whole tile, on the device of the mesh, a copy. Must be called on every
        rank of :attr:`range_group`."""
        finish_pending_steps()
        spec = self._spec
        tile = tile_of(spec)
        local = self._local_tensor.detach()
        device = local.device if is_on_mesh(local, spec) else spec.mesh.device_type
        full = torch.empty(tile.numel, dtype=local.dtype, device=device)
        start, stop = self.local_range
        full[start:stop].copy_(local)
        group = self.range_group
        works = [
            dist.broadcast(
                as_comm_dtype(full[first:last]), group=group, group_src=rank, async_op=True
            )
            for rank, first, last in self.placement.ranges
        ]
        for work in works:
            work.wait()
        return full.view(tile.shape)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Return a copy of another layout over the same mesh. Must be called on every rank of
        it.

        Pass one placement for each dimension of the mesh. With ``Replicate()`` and ``Shard(dim)``
        alone the copy is a plain DTensor, with a ``RaggedShard(...)`` it is a RaggedDTensor.
        :func:`~fsdp_overlap.distribute_tensor` is the way back from a DTensor. The whole tensor is
        gathered meanwhile, and gradients do not flow.

        Raises:
            RuntimeError: another mesh is asked for, or a placement of another kind.
        """
        asked = (self, device_mesh, placements)
        return cast(DTensor, RaggedDTensor._run_op(RaggedDTensor.redistribute, asked, {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        start, stop = self.local_range
        with DisableTorchFunctionSubclass():
            shape, dtype = tuple(self.shape), self.dtype
            requires_grad = self.requires_grad
        local = self._local_tensor.detach()
        tile = tile_of(self._spec)
        of = f" of its tile {tile.shape} at {tile.offsets}" if has_tiles(self._spec) else ""
        return (
            f"RaggedDTensor(shape={shape}, dtype={dtype}, device={str(local.device)!r}, rank "
            f"{self.range_rank} of {self._spec.mesh.size(range_dim(self._spec))} holds "
            f"{start}:{stop} of {tile.numel}{of}: "
            f"{_summary(local)}{', requires_grad=True' if requires_grad else ''})"
        )

    def __format__(self, format_spec: str) -> str:
        return repr(self).__format__(format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedDTensor:
        """Return a copy with memory of its own. It has this tensor's layout, and belongs to no
        unit."""
        if id(self) in memo:
            return cast(RaggedDTensor, memo[id(self)])
        finish_pending_steps()
        duplicate = RaggedDTensor.wrap(self._local_tensor.detach().clone(), self._spec)
        if isinstance(self, nn.Parameter):
            duplicate = cast(RaggedDTensor, nn.Parameter(duplicate, self.requires_grad))
        vars(duplicate).update(deepcopy(attributes_of(self), memo))
        memo[id(self)] = duplicate
        duplicate.keep_gradients_in(self._given_grad_dtype)
        if self._gradient is not None:
            duplicate.grad = deepcopy(self._gradient, memo)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish_pending_steps()
        # What is pickled is this rank's range and the layout of the tensor, without units.
        spec = self._spec
        parts = (self._local_tensor.detach(), spec.mesh, spec.placements, self._shape)
        is_parameter = isinstance(self, nn.Parameter)
        return rebuild_sharded_tensor, (*parts, self.requires_grad, is_parameter)

    # The protocol through which torch.distributed.checkpoint reads and writes this rank's range.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        meta = self._spec.tensor_meta
        assert meta is not None
        properties = TensorProperties(dtype=meta.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=meta.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        finish_pending_steps()
        # A load calls this on every rank, so all notice the edit, even those that hold nothing.
        if self.edits is not None:
            self.edits.record_values()
        increment_version(self._local_tensor)  # a save may be reading it
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from fsdp_overlap.tensor.boxes import boxes_of  # only checkpoints have boxes

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in boxes_of(self._spec)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        from fsdp_overlap.tensor.boxes import boxes_of, with_own_storage

        finish_pending_steps()
        for box in boxes_of(self._spec):
            if index.offset is None or tuple(index.offset) == box.offsets:
                first = box.start - self.local_range[0]
                values = self._local_tensor.detach()[first : first + box.numel].view(box.sizes)
                return with_own_storage(values)
        raise ValueError(f"{index} is not a box of this rank's range of {self!r}")

    @property
    def _shape(self) -> tuple[int, ...]:
        meta = self._spec.tensor_meta
        assert meta is not None
        return tuple(meta.shape)


def _summary(values: torch.Tensor) -> str:
    """Return the first three and the last three elements, as text."""
    if values.is_meta:
        return "..."
    ends = values.tolist() if values.numel() <= 6 else [*values[:3].tolist(), *values[-3:].tolist()]
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in ends]
    if values.numel() > 6:
        shown.insert(3, "...")
    return f"[{', '.join(shown)}]"


CANNOT_MOVE = (
    "a sharded parameter cannot be replaced, its unit gathers the shard that it knows: move or "
    "cast a module (to(), cuda(), half(), ...) before fully_shard(), or cast a unit before it runs"
)
"""Why nn.Module.to() and the like cannot work on a part of a unit, and what to do."""


def raise_unsupported(op: str) -> NoReturn:
    """Raise an error which says that ``op`` is not supported, and what to do instead."""
    # Python's operators would replace a TypeError by one of their own, which does not say why.
    raise RuntimeError(
        f"{op} is not supported on a RaggedDTensor, of which each rank holds only a range: use "
        "full_tensor() for the whole tensor (on every rank of the mesh) or to_local() for this "
        "rank's range; what computes with parameters must run within their unit's forward, or a "
        "method named to register_fsdp_forward_method()"
    )


# The names that a sharded tensor itself has in its __dict__. All others are the user's.
_OWN_ATTRIBUTES = frozenset(
    (*ShardedParam.__annotations__, "_is_param", "is_watched", "unsharded_form")
)


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users, and other libraries, hung on a parameter."""
    return {key: value for key, value in vars(parameter).items() if key not in _OWN_ATTRIBUTES}


def users_attributes(parameter: torch.Tensor, local: torch.Tensor) -> dict[str, Any]:
    """Return :func:`attributes_of` a parameter whose local tensor is ``local``, without those that
    every tensor of the class of ``local`` has."""
    given = attributes_of(parameter)
    return {key: value for key, value in given.items() if key not in vars(local)}


def rebuild_sharded_tensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> RaggedDTensor:
    """Make the sharded tensor that was pickled."""
    spec = contiguous_spec(mesh, placements, torch.Size(shape), local.dtype)
    tensor = RaggedDTensor.wrap(local, spec)
    if is_parameter:
        return cast(RaggedDTensor, nn.Parameter(tensor, requires_grad))
    return tensor


# torch.load() refuses what is not listed, unless weights_only=False.
torch.serialization.add_safe_globals([rebuild_sharded_tensor, RaggedShard])

allow_foreach(RaggedDTensor)
