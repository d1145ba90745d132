"""The sharded form of a parameter, of its gradient and of its optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast
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
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.tensor.comm_dtypes import REDUCE_DTYPES
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tensor.tiles import has_tiles, tile_of
from fsdp_overlap.torch_internals import (
    DisableTorchFunctionSubclass,
    DTensorSpec,
    TensorMeta,
    allow_foreach,
    refuse_tracing,
)

if TYPE_CHECKING:
    from fsdp_overlap.tensor.boxes import Box

# ---- Placements: ranges over the ranks of a mesh ----

FOR_TORCH = (
    "from fsdp_overlap import distribute_tensor, in place of torch's, or shard with "
    "FsdpContext(layout=PerTensor())"
)
"""What to do where a function of torch does not know :class:`RaggedShard`."""


class RaggedShard(Placement):
    """Each rank holds one contiguous range of the flattened tensor, possibly empty.

    ``ranges`` lists ``(rank, start, stop)``, in elements, for the ranks that hold any. All of these
    ranks have the same list, as DTensor asks of a placement. If other dimensions of the mesh cut
    the tensor too, as tensor parallelism does, what is flattened is this rank's :class:`Tile`.
    """

    def __init__(self, ranges: tuple[tuple[int, int, int], ...]) -> None:
        super().__init__()
        self.ranges = ranges

    def local_range(self, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of what ``rank`` holds, or ``(0, 0)`` if it holds nothing."""
        for owner, start, stop in self.ranges:
            if owner == rank:
                return start, stop
        return 0, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[object, ...]]:
        # The base class is written in C++ and cannot be pickled.
        return RaggedShard, (self.ranges,)

    def __str__(self) -> str:
        # Functions of torch that know no placement but DTensor's own put it into their error.
        return f"{self!r} of fsdp_overlap ({FOR_TORCH})"

    def __repr__(self) -> str:
        held = ", ".join(f"{rank}: {start}-{stop}" for rank, start, stop in self.ranges[:4])
        more = ", ..." if len(self.ranges) > 4 else ""
        return f"RaggedShard({held}{more})"


def contiguous_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Return the DTensor spec of a contiguous tensor of ``shape`` over ``mesh``. ``placements`` has
    an entry for each dimension of the mesh."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def range_dim(spec: DTensorSpec) -> int:
    """Return the dimension of the mesh whose ranks hold ranges."""
    for dim, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard):
            return dim
    raise ValueError(f"{spec.placements} has no RaggedShard")


def has_range(tensor: DTensor) -> bool:
    """Return whether ranks hold a range of ``tensor`` each: a sharded tensor, or a state that an
    optimizer made by ``DTensor.from_local(..., placements=parameter.placements)``."""
    return any(isinstance(placement, RaggedShard) for placement in tensor._spec.placements)


def local_range(spec: DTensorSpec) -> tuple[int, int]:
    """Return ``(start, stop)`` of what this rank holds of its tile, flattened."""
    dim = range_dim(spec)
    placement = spec.placements[dim]
    assert isinstance(placement, RaggedShard)
    return placement.local_range(spec.mesh.get_local_rank(dim))


def with_range(
    spec: DTensorSpec, placement: RaggedShard, shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Return ``spec`` with other ranges, of another shape and dtype, over the same ranks."""
    dim = range_dim(spec)
    placements = (*spec.placements[:dim], placement, *spec.placements[dim + 1 :])
    return contiguous_spec(spec.mesh, placements, shape, dtype)


# ---- The base of all sharded parameters: .grad, aliases of memory, and .data = value ----


def _count_references() -> int:
    probe = object()
    return getrefcount(probe)


# The count of an object to which one variable refers depends on the Python version. Here an
# attribute refers to it too.
_HELD_HERE = _count_references() + 1

_EMPTY = torch.empty(0)
"""The local tensor of a wrapper that is kept for the next gradient."""


def refused_grad_dtype(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> str | None:
    """Return why gradients of a ``dtype`` parameter cannot be kept in ``grad_dtype``. ``None`` if
    they can, or if there will be none, because the parameter is of integers."""
    if grad_dtype == dtype or not (dtype.is_floating_point or dtype.is_complex):
        return None
    if grad_dtype is None:
        return (
            "gradients of any dtype cannot be reduced, because ranks may have different ones; name "
            "a dtype"
        )
    kind, its_kind = ((each.is_floating_point, each.is_complex) for each in (dtype, grad_dtype))
    if kind != its_kind or grad_dtype not in REDUCE_DTYPES:
        return (
            "gradients are kept in a dtype of the parameter's kind in which they can be summed, "
            "such as torch.float32"
        )
    return None


class ShardedParam(DTensor):
    """The sharded form of a parameter: a range of it, or rows.

    Reduced gradients are given to a parameter, and optimizers read and write its ``.grad`` in every
    step. torch's own attribute would go through ``__torch_function__`` for each.
    """

    # torch's is a Python function that returns the identity. Sets of parameters call it often.
    __hash__ = object.__hash__

    edits: Any = None
    aliases: Any = None
    """The tensors that share the memory of a parameter, if there were any."""
    _spec: Any
    _local_tensor: torch.Tensor
    _given_grad_dtype: torch.dtype | None = None
    _grad_spec: Any = None
    """The spec of gradients that a unit gives to its parameter."""
    _gradient: Any = None
    _given_gradient: Any = None
    """The wrapper of the last gradient that a unit gave, without memory once that is dropped."""

    @property
    def own_hook(self) -> Callable[..., None] | None:
        """The hook of accumulated gradients that the library registered itself, if it did."""
        return None

    @classmethod
    def wrap(cls, local: torch.Tensor, spec: DTensorSpec, edits: Any = None) -> Self:
        """Return the sharded tensor of which this rank has ``local``, which is not copied."""
        raise NotImplementedError

    def as_parameter(self, requires_grad: bool) -> Self:
        """Return this tensor as a parameter, as ``nn.Parameter(tensor, requires_grad)`` does."""
        raise NotImplementedError

    def wrap_like(self, local: torch.Tensor) -> Self:
        """Return a tensor of ``local``'s dtype that is laid out as this one is. This rank has
        ``local`` of it, which may be flat."""
        spec, meta = self._spec, self._spec.tensor_meta
        if meta.dtype != local.dtype:
            spec = contiguous_spec(spec.mesh, spec.placements, meta.shape, local.dtype)
        shape = self._local_tensor.shape
        return self.wrap(local if local.dim() == len(shape) else local.view(shape), spec)

    # ---- what shares the memory of a parameter ----

    def alias_of(self, local: torch.Tensor, spec: DTensorSpec) -> Self:
        """Return a tensor that is laid out as ``spec`` says, of which this rank has ``local``, in
        this tensor's memory. Its edits count as edits of this one."""
        alias = self.wrap(local, spec, self.edits)
        alias._share_aliases(self)
        return alias

    def _share_aliases(self, tensor: Any) -> None:
        """Record that this tensor shares the memory of ``tensor``, if that is the memory of a
        parameter."""
        if tensor.edits is not None:
            if tensor.aliases is None:
                tensor.aliases = WeakSet()
            tensor.aliases.add(self)
            self.aliases = tensor.aliases

    @torch.no_grad()
    def assign_data(self, value: Any) -> None:
        """Do what ``tensor.data = value`` does. Collective where ``tensor.copy_(value)`` is.

        A parameter keeps its memory, which its unit all-gathers, and takes the values. Whatever
        shared that memory keeps the old values, in memory of its own, as without sharding. But
        later edits of ``value`` are no edits of the parameter. Any other tensor takes the memory of
        ``value``.

        Raises:
            RuntimeError: ``value`` has another shape, dtype or device, or another layout than a
                tensor that is no parameter. Nothing was changed.
        """
        tensor: Any = self
        aliases = getattr(value, "aliases", None)
        shares_memory = aliases is not None and aliases is tensor.aliases
        if value is tensor or (shares_memory and value._spec is tensor._spec):
            return  # as after ``tensor.data += 1``; the same on every rank
        wanted, given = ((tuple(x.shape), x.dtype, x.device.type) for x in (tensor, value))
        if wanted != given:
            raise RuntimeError(
                f"the data of a {type(tensor).__name__} of (shape, dtype, device) {wanted} cannot "
                f"be replaced by a tensor of {given}: move or cast a module before fully_shard()"
            )
        if tensor.edits is not None and hasattr(tensor, "_fsdp_owner"):  # see engine/param
            for alias in set(tensor.aliases or ()) - {tensor}:
                alias._local_tensor = alias._local_tensor.clone()
                alias.edits = alias.aliases = None
            tensor.aliases = None
            torch.Tensor.copy_(tensor, value)
            return
        own, spec = tensor._spec, getattr(value, "_spec", None)
        if spec is None or spec.mesh != own.mesh or spec.placements != own.placements:
            raise RuntimeError(
                f"the data of {tensor!r} can only be replaced by a tensor of its layout, not by "
                f"{value!r}: use copy_()"
            )
        if not tensor._local_tensor.is_set_to(value._local_tensor):
            tensor._local_tensor = value._local_tensor.detach()
            tensor.edits = getattr(value, "edits", None)
            tensor.aliases = None
            if tensor.edits is not None:
                value._share_aliases(tensor)

    # ---- gradients ----

    def gradient_of(self, local: torch.Tensor) -> DTensor:
        """Return the gradient of which this rank has ``local``, which is flat, as hooks see it."""
        raise NotImplementedError

    def write_gradient(self, gradient: DTensor, value: torch.Tensor) -> None:
        """Write ``value`` into what :meth:`gradient_of` gave."""
        raise NotImplementedError

    def _fits(self, gradient: torch.Tensor) -> bool:
        """Return whether ``gradient`` may be the gradient of this tensor."""
        raise NotImplementedError

    @property
    def _grad_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._given_grad_dtype or self._spec.tensor_meta.dtype
        return dtype

    def _set_grad_dtype(self, dtype: torch.dtype | None) -> None:
        """Take what somebody sets ``grad_dtype`` to.

        Raises:
            RuntimeError: gradients cannot be kept in it. Or they are kept in another, because there
                is one, or because the unit was gathered.
        """
        is_settled = self.edits is not None and self.edits.has_run
        own = self._spec.tensor_meta.dtype
        refused = refused_grad_dtype(own, dtype)
        if refused is None and dtype != self._grad_dtype:
            if self._gradient is not None:
                refused = f"it has a gradient of {self._grad_dtype}; set its grad to None first"
            elif is_settled:
                refused = "its unit was gathered; set it before the first forward, or fully_shard()"
        if refused is not None:
            raise RuntimeError(f"grad_dtype = {dtype} on a sharded parameter of {own}: {refused}")
        if not is_settled:
            self.keep_gradients_in(dtype)

    def keep_gradients_in(self, dtype: torch.dtype | None) -> None:
        """Give gradients ``dtype`` from now on. ``None`` stands for the parameter's own."""
        spec = self._spec
        self._given_grad_dtype = dtype
        self._given_gradient = None
        self._grad_spec = spec
        if self._grad_dtype != spec.tensor_meta.dtype:
            shape = spec.tensor_meta.shape
            self._grad_spec = contiguous_spec(spec.mesh, spec.placements, shape, self._grad_dtype)

    def _set_grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            given = self._given_gradient
            self._gradient = None
            if given is None:
                return
            # Making a wrapper takes longer than all else that is done for a gradient. So one that
            # nobody else holds is kept for the next gradient, without its memory.
            if getrefcount(given) == _HELD_HERE and given._spec is self._grad_spec:
                given._local_tensor = _EMPTY
            else:
                self._given_gradient = None
        else:
            self._take_grad(gradient)

    def _take_grad(self, gradient: torch.Tensor) -> None:
        if not self._fits(gradient):
            self._refuse_grad(gradient)
        # As autograd does with what it accumulates. torch's set_optimizer_state_dict() gives a
        # parameter a gradient of the parameter's own dtype.
        self._gradient = gradient.to(self._grad_dtype)
        self._given_gradient = None

    def _refuse_grad(self, gradient: Any) -> NoReturn:
        raise TypeError(
            f"the gradient of {self!r} must be of the same kind, shape and layout or None, got a "
            f"{type(gradient).__name__}"
        )

    def _delete_grad(self) -> None:
        self._set_grad(None)

    @property
    def __tensor_flatten__(self) -> Any:
        """Tell ``torch.compile`` that it cannot trace this class, whose ops count edits and talk
        to other ranks."""
        refuse_tracing(
            "functions of sharded parameters are run as they are: compile them without "
            'fullgraph=True, or call them under torch.compiler.set_stance("force_eager")'
        )
        parts: Any = super()
        return parts.__tensor_flatten__

    # attrgetter is a getter without a Python frame.
    grad = property(attrgetter("_gradient"), _set_grad, _delete_grad)


# ---- hooks that users register ----


@torch.no_grad()
def call_gradient_hooks(
    parameters: Iterable[ShardedParam], locals_: Iterable[torch.Tensor]
) -> None:
    """Call what users gave to ``register_hook()`` of sharded parameters, with the gradients of
    which ``locals_`` are this rank's parts, flat. What a hook returns is written into them.

    Raises:
        RuntimeError: what a hook returned has another shape.
    """
    for parameter, local in zip(parameters, locals_, strict=True):
        with DisableTorchFunctionSubclass():
            hooks: Any = parameter._backward_hooks or {}
        for hook in list(hooks.values()):
            gradient: Any = parameter.gradient_of(local)
            references = getrefcount(gradient)
            replaced = hook(gradient)
            if replaced is not None:
                if replaced.shape != gradient.shape:
                    raise RuntimeError(
                        f"a hook of a parameter of shape {tuple(gradient.shape)} returned a "
                        f"gradient of shape {tuple(replaced.shape)}"
                    )
                parameter.write_gradient(gradient, replaced)
            if getrefcount(gradient) > references:  # kept, and .grad may be edited later
                gradient._local_tensor = gradient._local_tensor.clone()


def call_hooks(parameters: Iterable[ShardedParam]) -> None:
    """Call what users gave to ``register_post_accumulate_grad_hook()`` of sharded parameters."""
    for parameter in parameters:
        with DisableTorchFunctionSubclass():
            hooks: Any = parameter._post_accumulate_grad_hooks or {}
        for hook in list(hooks.values()):
            if hook is not parameter.own_hook:
                hook(parameter)


# ---- Tensors of which each rank holds a range ----


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
        return cast(torch.Tensor, RaggedDTensor._run_op(RaggedDTensor.to_local, (self,), {}))

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor on every rank, a copy. Must be called on every rank of the
        mesh."""
        return cast(torch.Tensor, RaggedDTensor._run_op(RaggedDTensor.full_tensor, (self,), {}))

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
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in boxes_of(self._spec)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        from fsdp_overlap.tensor.boxes import with_own_storage

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


# ---- boxes, of which checkpoints consist ----

# A chunk has at most a rank's share of the tile, but this limit lies between these two sizes. A
# writer copies a chunk from a GPU before it writes it, and torch's reader holds two chunks. So the
# size of a chunk bounds the memory that saving and loading take.
_BYTES_OF_A_CHUNK = (8 << 20, 32 << 20)


def boxes_of(spec: DTensorSpec) -> list[Box]:
    """Return boxes of a bounded size that cover what this rank holds. Their ``offsets`` count in
    the whole tensor, their ``start`` in the rank's tile."""
    from fsdp_overlap.tensor.boxes import Box, bounded_boxes  # only checkpoints have boxes

    meta = spec.tensor_meta
    assert meta is not None
    if not meta.shape.numel():  # without an empty chunk a load would miss the key
        return [Box((0,) * len(meta.shape), tuple(meta.shape), 0)]
    least, most = (n // meta.dtype.itemsize for n in _BYTES_OF_A_CHUNK)
    tile = tile_of(spec)
    share = tile.numel // spec.mesh.size(range_dim(spec))
    own = bounded_boxes(tile.shape, *local_range(spec), min(max(share, least), most))
    return [box.moved(tile.offsets) for box in own]


# ---- texts and errors ----


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
    "cast a module before fully_shard(), or cast a unit, or to_empty() it, before it runs"
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
_IN_EARLIER_FILES = "fsdp_overlap.tensor.placement.RaggedShard"
torch.serialization.add_safe_globals(
    [rebuild_sharded_tensor, RaggedShard, (RaggedShard, _IN_EARLIER_FILES)]
)

allow_foreach(RaggedDTensor)
