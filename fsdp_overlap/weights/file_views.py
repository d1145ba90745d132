"""Tensors made of files' tensors by views, ``cat`` and ``stack``: which elements of which file each
consists of.

A conversion of weights is a function in plain torch. It runs once, on tensors of the meta device,
and :class:`ViewTracer` records where each element of what it returns comes from. So each rank can
read what it needs of the result, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fsdp_overlap.torch_internals import TorchDispatchMode
from fsdp_overlap.weights.chunks import Chunk, full_chunk
from fsdp_overlap.weights.safetensors_format import FileTensor

_aten = torch.ops.aten


class FilePiece(NamedTuple):
    """A box of a tensor, and the elements of a file that it consists of: those of ``view``, a view
    on the meta device of the whole tensor of the file."""

    chunk: Chunk
    file_tensor: FileTensor
    view: torch.Tensor


class _Composition(NamedTuple):
    """A contiguous tensor of ``shape`` that was put together from ``parts``."""

    shape: tuple[int, ...]
    parts: Sequence[tuple[Chunk, torch.Tensor]]


class ViewTracer(TorchDispatchMode):
    """Records, while it is entered, how tensors on the meta device consist of files' tensors."""

    def __init__(self, tensors: Mapping[str, FileTensor]) -> None:
        super().__init__()
        # By the address of the storage, with a tensor that keeps it alive.
        self._origins: dict[int, tuple[FileTensor | _Composition | str, torch.Tensor]] = {}
        self.tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            self._set(self.tensors[name], tensor)

    def _set(self, tensor: torch.Tensor, origin: FileTensor | _Composition | str) -> None:
        self._origins[_address(tensor)] = origin, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in [written] if isinstance(written, torch.Tensor) else written or ():
                    self._set(tensor, f"{func} writes to it")
        for tensor in [result] if isinstance(result, torch.Tensor) else result or ():
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in self._origins:
                self._set(tensor, self._composed(func, args, kwargs, tensor))
        return result

    def _composed(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], result: torch.Tensor
    ) -> _Composition | str:
        """Return what ``result`` consists of, or how it was computed."""
        shape = tuple(result.shape)
        if func in (_aten.cat.default, _aten.stack.default):
            parts = [*args[0]]
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(shape)
            if func is _aten.stack.default:
                parts = [part.unsqueeze(dim) for part in parts]
        elif func is _aten.clone.default:
            parts, dim = [args[0]], 0
        else:
            return f"{func} computes it"
        if any(part.dtype != result.dtype for part in parts) or not result.is_contiguous():
            return f"{func} casts or permutes it"
        placed = []
        offsets = [0] * len(shape)
        for part in parts:
            if part.numel():
                placed.append((Chunk(tuple(offsets), tuple(part.shape)), part))
                if shape:
                    offsets[dim] += part.shape[dim]
        return _Composition(shape, placed)

    def whole(self, tensor: torch.Tensor) -> FileTensor | None:
        """Return the tensor of a file that ``tensor`` is all of, if there is one."""
        origin, viewed = self._origins.get(_address(tensor), (None, tensor))
        is_whole = tensor.shape == viewed.shape and tensor.stride() == viewed.stride()
        return origin if isinstance(origin, FileTensor) and is_whole else None

    def pieces(self, tensor: torch.Tensor) -> Iterator[FilePiece]:
        """Yield the pieces of ``tensor``, which is made of files' tensors.

        Raises:
            ValueError: it was computed otherwise than by views, ``cat``, ``stack`` and copies.
        """
        origin, viewed = self._origins.get(
            _address(tensor), ("no tensor of a file is in it", tensor)
        )
        if not isinstance(origin, str) and not _is_within(tensor, viewed):
            origin = "it is viewed in another dtype, conjugated, negated or beyond its end"
        if isinstance(origin, str):
            raise ValueError(
                f"{origin}, and only views, cat, stack and copies can be read in parts"
            )
        if isinstance(origin, FileTensor):
            if tensor.numel():
                yield FilePiece(full_chunk(tensor.shape), origin, tensor)
            return
        for box, part in _along_dims(tensor, origin.shape):
            within, bases = _place(part, origin.shape)
            for outer, values in origin.parts:
                if (both := outer & within) is None:
                    continue
                source, at = both.of(outer, values), list(box.offsets)
                sizes, strides = [1] * part.dim(), [1] * part.dim()
                for dim, base in bases.items():
                    at[dim] += both.offsets[base] - within.offsets[base]
                    sizes[dim], strides[dim] = both.sizes[base], source.stride(base)
                source = source.as_strided(sizes, strides, source.storage_offset())
                for piece in self.pieces(source):
                    yield piece._replace(chunk=piece.chunk.moved(at))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_within(tensor: torch.Tensor, viewed: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` are elements of ``viewed``, as they are."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps)
    is_same = tensor.dtype == viewed.dtype and not (tensor.is_conj() or tensor.is_neg())
    return is_same and (not tensor.numel() or last < viewed.numel())


def _along_dims(
    tensor: torch.Tensor, shape: tuple[int, ...]
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield boxes of ``tensor``, a view of a contiguous tensor of ``shape``, and views of them,
    each dimension of which is one of ``shape``."""
    todo = [(full_chunk(tensor.shape), tensor)] if tensor.numel() else []
    while todo:
        box, part = todo.pop()
        cut = _cut(part, shape)
        if cut is None:
            yield box, part
            continue
        dim, size = cut
        for start in (size, 0):
            length = part.shape[dim] - size if start else size
            offsets, sizes = [0] * part.dim(), list(part.shape)
            offsets[dim], sizes[dim] = start, length
            inner = Chunk(tuple(offsets), tuple(sizes)).moved(box.offsets)
            todo.append((inner, part.narrow(dim, start, length)))


def _strides(shape: tuple[int, ...]) -> dict[int, int]:
    """Return the dimension of each stride of a contiguous tensor, but for those of one element."""
    strides, stride = {}, 1
    for dim in reversed(range(len(shape))):
        if shape[dim] > 1:
            strides[stride] = dim
        stride *= shape[dim]
    return strides


def _starts(offset: int, shape: tuple[int, ...]) -> list[int]:
    starts = []
    for size in reversed(shape):
        offset, start = divmod(offset, size)
        starts.append(start)
    return starts[::-1]


def _cut(part: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the dimension of ``part``, a view of a contiguous tensor of ``shape``, that is not one
    of ``shape``, and the size at which it is to be cut. ``None`` if there is none."""
    strides, starts = _strides(shape), _starts(int(part.storage_offset()), shape)
    found: set[int] = set()
    for dim, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
        if size == 1:
            continue
        base = strides.get(stride)
        if base is None or base in found:
            return dim, 1
        if starts[base] + size > shape[base]:
            return dim, shape[base] - starts[base]
        found.add(base)
    return None


def _place(part: torch.Tensor, shape: tuple[int, ...]) -> tuple[Chunk, dict[int, int]]:
    """Return the chunk of a contiguous tensor of ``shape`` that ``part`` is a view of, and which of
    its dimensions each dimension of ``part`` is, but for those of one element."""
    strides = _strides(shape)
    bases = {
        dim: strides[stride]
        for dim, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True))
        if size > 1
    }
    sizes = [1] * len(shape)
    for dim, base in bases.items():
        sizes[base] = part.shape[dim]
    return Chunk(tuple(_starts(int(part.storage_offset()), shape)), tuple(sizes)), bases
