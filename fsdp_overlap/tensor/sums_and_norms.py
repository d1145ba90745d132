"""Ops that reduce across ranks and return plain tensors, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from math import inf
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsdp_overlap.tensor.comm_dtypes import COMM_DTYPES
from fsdp_overlap.tensor.ops import (
    call_with,
    full_operand,
    local_operand,
    raise_in_backward,
    tensor_operands,
)
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, raise_unsupported
from fsdp_overlap.tensor.tiles import cut_dims, is_on_mesh
from fsdp_overlap.torch_internals import DTensorSpec

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

HALF = (torch.float16, torch.bfloat16)


def norm(name: str, func: Call, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Run ``torch.norm`` and ``torch.linalg.vector_norm``, also along dimensions."""
    given = dict(zip(("input", "ord", "dim", "keepdim"), args, strict=False))
    given |= {{"p": "ord", "A": "input", "x": "input"}.get(k, k): v for k, v in kwargs.items()}
    tensor, order = given.pop("input", None), given.pop("ord", None)
    dim, keepdim = given.pop("dim", None), bool(given.pop("keepdim", False))
    dtype = given.pop("dtype", None)
    # Not all norms are norms of elements: linalg.norm with an order takes the operator norm of a
    # matrix, and torch.norm knows nuclear norms by name.
    is_of_vectors = (order is None and dim is None) or isinstance(dim, int)
    is_of_elements = name != "linalg_norm" or is_of_vectors
    is_numeric = order in (None, "fro") or isinstance(order, (int, float))
    if not isinstance(tensor, RaggedDTensor) or not is_of_elements or not is_numeric:
        raise_unsupported(f"{name} with ord={order!r}")
    if any(value is not None for value in given.values()) or len(args) > 4:
        raise_unsupported(f"{name} with {', '.join(given) or 'these arguments'}")
    power = 2.0 if order in (None, "fro") else float(order)
    if dim is None and not keepdim:
        return norms([tensor], power, dtype)[0]
    whole = tensor.full_tensor()
    return torch.linalg.vector_norm(whole, power, dim, keepdim, dtype=dtype)


def foreach_norm(name: str, func: Call, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return norms(args[0], float(order), args[2] if len(args) > 2 else kwargs.get("dtype"))


def norms(
    tensors: Sequence[Any], order: float, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the norm of each whole tensor, with one all-reduce for all that are cut among the same
    ranks. Collective over their meshes. A plain tensor is whole, and the same on every rank."""
    sharded = [index for index, each in enumerate(tensors) if isinstance(each, DTensor)]
    dtypes = {tensors[index]._local_tensor.dtype for index in sharded}
    if not all(each.is_floating_point or each.is_complex for each in dtypes):
        raise_unsupported("norm of integers")
    found: list[torch.Tensor] = [
        torch.empty(0)
        if isinstance(each, DTensor)
        else torch.linalg.vector_norm(each, order, dtype=dtype)
        for each in tensors
    ]
    for spec, places in group_by_mesh_dims(tensors[index] for index in sharded):
        members = [sharded[place] for place in places]
        locals_ = [tensors[index]._local_tensor.detach() for index in members]
        combined = combine_norms(local_norms(locals_, order, dtype), order, spec)
        for index, local, value in zip(members, locals_, combined.unbind(), strict=True):
            norm_ = value.to((dtype or local.dtype).to_real())
            found[index] = raise_in_backward("norm", norm_, [tensors[index]])
    return found


def group_by_mesh_dims(tensors: Iterable[DTensor]) -> list[tuple[DTensorSpec, list[int]]]:
    """Return group ``tensors`` that are sharded over the same ranks. A group is the spec of its
    first tensor and the positions of its tensors in ``tensors``. The order of groups is the order
    of their first tensors, and so the same on all ranks.

    Raises:
        ValueError: of some tensor, ranks have parts of a sum.
    """
    specs = list(map(_spec, tensors))
    if _are_sharded_alike(specs):
        return [(specs[0], list(range(len(specs))))]
    found: list[tuple[DTensorSpec, list[int]]] = []
    for index, spec in enumerate(specs):
        for known, members in found:
            is_same_mesh = known.mesh is spec.mesh or known.mesh == spec.mesh
            if is_same_mesh and cut_dims(known) == cut_dims(spec):
                members.append(index)
                break
        else:
            found.append((spec, [index]))
    return found


_spec = attrgetter("_spec")
_mesh = attrgetter("mesh")
_placements = attrgetter("placements")


def _are_sharded_alike(specs: Sequence[DTensorSpec]) -> bool:
    """Return whether all lie over the same mesh, and each of its dimensions cuts all or none. It
    takes no Python frame for each, and holds for the gradients of most models."""
    placements = list(map(_placements, specs))
    classes = set(map(type, chain.from_iterable(placements)))
    if any(issubclass(cls, Partial) for cls in classes):
        raise ValueError(
            "a gradient is a DTensor placed as Partial(), of which ranks have parts of a sum: "
            "redistribute() it like its parameter first"
        )
    if len(set(map(id, map(_mesh, specs)))) != 1:
        return False
    if not any(issubclass(cls, Replicate) for cls in classes):
        return True
    return all(
        len({issubclass(each, Replicate) for each in set(map(type, along))}) == 1
        for along in zip(*placements, strict=True)
    )


def local_norms(
    tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the norms of plain tensors, shape ``[len(tensors)]``, in float32 or wider. The norm of
    an empty tensor is the neutral element of :func:`combine_norms`."""
    if any(tensor.is_complex() for tensor in tensors):
        tensors = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    dtype = torch.promote_types((dtype or torch.float32).to_real(), torch.float32)
    for each in {tensor.dtype for tensor in tensors}:
        dtype = torch.promote_types(dtype, each)
    numels = [tensor.numel() for tensor in tensors]
    held = list(compress(tensors, numels))
    norms_: Sequence[torch.Tensor]
    norms_ = torch._foreach_norm(held, order, dtype=dtype) if held else ()
    if len(held) < len(tensors):
        values = iter(norms_)
        neutral = torch.full((), inf if order < 0 else 0.0, dtype=dtype, device=tensors[0].device)
        norms_ = [next(values) if numel else neutral for numel in numels]
    return torch.stack(norms_)


def combine_norms(partial: torch.Tensor, order: float, spec: DTensorSpec) -> torch.Tensor:
    """Return the norms of whole tensors that are cut as ``spec`` says, from the norms of this
    rank's ranges. One all-reduce for each dimension of the mesh that cuts."""
    if order == inf:
        return _largest(partial, spec)
    if order == -inf:
        return -_largest(-partial, spec)
    if order == 0:
        return _all_reduce(partial, dist.ReduceOp.SUM, spec)
    return _all_reduce(partial.pow(order), dist.ReduceOp.SUM, spec).pow_(1.0 / order)


def reduction(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run ``sum``, ``mean``, ``amax``, ``amin``, ``any``, ``all``, ``max`` and ``min``. Along
    dimensions the whole tensor is gathered."""
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, RaggedDTensor) or kwargs.get("out") is not None:
        raise_unsupported(f"{name} with these arguments")
    local, spec = tensor._local_tensor.detach(), tensor._spec
    if local.is_complex() or not tensor.numel():
        raise_unsupported(f"{name} of a complex or empty tensor")
    final = kwargs.get("dtype") or local.dtype
    is_along_dims = len(args) > 1 or bool(kwargs.keys() - {"input", "dtype"})
    if is_along_dims and name in ("max", "min"):
        raise_unsupported(f"{name} along a dimension")
    if is_along_dims or (name == "mean" and not final.is_floating_point):
        found = on_full_tensors(name, func, args, kwargs)
    elif name in ("sum", "mean"):
        if final in HALF:  # wide, as torch itself sums
            partial = local.to(final).float().sum()
        else:
            partial = local.sum(dtype=kwargs.get("dtype"))
        found = _all_reduce(partial, dist.ReduceOp.SUM, spec)
        if name == "mean":
            found = found / tensor.numel()
        found = found.to(final) if final in HALF else found
    else:
        is_max = name in ("max", "amax", "any")
        if not local.numel() and name not in ("any", "all"):
            local = local.new_full((1,), _extreme(local.dtype, lowest=is_max))
        found = (_largest if is_max else _smallest)(func(local), spec)
    return raise_in_backward(name, found, [tensor])


def dot(name: str, func: Call, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Run ``torch.dot`` of two flat tensors of the same layout."""
    values: list[Any] = tensor_operands([*args, *kwargs.values()])
    dtypes = {value.dtype for value in values}
    is_sharded = all(isinstance(value, RaggedDTensor) for value in values)
    if not is_sharded or "out" in kwargs or dtypes - COMM_DTYPES or len(dtypes) > 1:
        raise_unsupported(f"{name} with these arguments")
    if any(value.dim() != 1 for value in values):
        raise_unsupported(f"{name} of a tensor that is not flat")
    [dtype] = dtypes
    wide = torch.float32 if dtype in HALF else dtype
    first, second = (local_operand(name, value, values[0]).to(wide) for value in values)
    found = _all_reduce(func(first, second), dist.ReduceOp.SUM, values[0]._spec).to(dtype)
    return cast(torch.Tensor, raise_in_backward(name, found, values))


def on_full_tensors(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run an op on the whole of each tensor, and return its result."""
    if kwargs.get("out") is not None:
        raise_unsupported(f"{name} with out=")
    return call_with(full_operand, func, args, kwargs)


def equal(name: str, func: Call, args: Args, kwargs: Kwargs) -> bool:
    """Run ``torch.equal``. The answer is the same on every rank."""
    values = [*args, *kwargs.values()]
    model = next(value for value in values if isinstance(value, RaggedDTensor))
    if any(value.shape != model.shape or value.dtype != model.dtype for value in values):
        return False
    first, second = (local_operand("equal", value, model) for value in values)
    is_equal = torch.tensor(torch.equal(first, second), device=first.device)
    return bool(_smallest(is_equal, model._spec))


def unscale(name: str, func: Call, args: Args, kwargs: Kwargs) -> None:
    """Unscale gradients for ``torch.amp.GradScaler``. An overflow on one rank counts on all ranks
    that a gradient is cut among."""
    gradients, found_inf, inv_scale = args
    groups = group_by_mesh_dims(
        gradient for gradient in gradients if isinstance(gradient, RaggedDTensor)
    )
    locals_ = [
        gradient._local_tensor if isinstance(gradient, RaggedDTensor) else gradient
        for gradient in gradients
    ]
    func(locals_, found_inf, inv_scale)
    for spec, _ in groups:
        found_inf.copy_(_largest(found_inf, spec))


def _extreme(dtype: torch.dtype, *, lowest: bool) -> float:
    if dtype == torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return -inf if lowest else inf
    info = torch.iinfo(dtype)
    return info.min if lowest else info.max


def _largest(values: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return the largest over the ranks, or NaN if a rank has NaN. Backends do not promise to keep
    NaN."""
    if not values.is_floating_point():
        return _extreme_integer(values, dist.ReduceOp.MAX, spec)
    is_nan = values.isnan()
    pair = torch.stack([values.masked_fill(is_nan, -inf), is_nan.to(values.dtype)])
    largest, any_nan = _all_reduce(pair, dist.ReduceOp.MAX, spec)
    return largest.masked_fill(any_nan > 0, torch.nan)


def _smallest(values: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    if values.is_floating_point():
        return -_largest(-values, spec)
    return _extreme_integer(values, dist.ReduceOp.MIN, spec)


def _extreme_integer(
    values: torch.Tensor, op: dist.ReduceOp.RedOpType, spec: DTensorSpec
) -> torch.Tensor:
    sent = values.to(torch.uint8) if values.dtype == torch.bool else values
    if sent.dtype not in COMM_DTYPES:
        sent = sent.long()  # only 16-bit integers come here: torch has no extremes of others
    return _all_reduce(sent, op, spec).to(values.dtype)


def _all_reduce(
    values: torch.Tensor, op: dist.ReduceOp.RedOpType, spec: DTensorSpec
) -> torch.Tensor:
    """All-reduce over the ranks that a tensor is cut among."""
    sent = values.contiguous()
    if not is_on_mesh(values, spec):
        sent = values.to(spec.mesh.device_type)
    for dim in cut_dims(spec):
        dist.all_reduce(sent, op, spec.mesh.get_group(dim))
    return sent.to(values.device)
