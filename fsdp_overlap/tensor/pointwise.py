"""Ops that work on each element alone: run on the local ranges, they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.carried import as_carried
from fsdp_overlap.tensor.operands import (
    check_no_gradient,
    first_sharded,
    local_operand,
    note_edit,
    note_edits,
    own_elements,
    replicated,
    same_layout,
    whole_operand,
)
from fsdp_overlap.tensor.placement import copied_dims
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor, raise_unsupported

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Make a tensor of the same layout without letting gradients flow.
DETACHED = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})


def pointwise(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """A point-wise op, also in place or with ``out``. A plain tensor edited in place gets the whole
    of the sharded operands, which is collective."""
    values = [*args, *kwargs.values()]
    model = first_sharded(name, values)
    if name not in DETACHED:
        check_no_gradient(name, values)
    if kwargs.get("requires_grad"):
        raise_unsupported(f"{name} with requires_grad=True")
    target = kwargs.get("out")
    if target is None and name.endswith("_"):
        target = args[0] if args else kwargs.get("input")
    if target is not None and not isinstance(target, ShardedTensor):
        return func(*map(whole_operand, args), **{k: whole_operand(v) for k, v in kwargs.items()})
    result = func(
        *(local_operand(name, value, model) for value in args),
        **{key: local_operand(name, value, model) for key, value in kwargs.items()},
    )
    if target is not None:
        note_edit(target)
        return target
    if not isinstance(result, torch.Tensor):
        raise_unsupported(f"{name} with these arguments")
    # `to` and `contiguous` return their argument where there is nothing to do.
    return model if result is model._local_tensor else model.wrap_like(result)


def foreach(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """A point-wise op on lists of tensors, each with its own layout."""
    tensors: Sequence[Any] = args[0]
    check_no_gradient(name, args)
    operands = [
        _column(name, value, tensors) if isinstance(value, (list, tuple, torch.Tensor)) else value
        for value in args[1:]
    ]
    named = {
        key: _column(name, value, tensors)
        if isinstance(value, (list, tuple, torch.Tensor))
        else value
        for key, value in kwargs.items()
    }
    result = func([_own(tensor) for tensor in tensors], *operands, **named)
    if name.endswith("_"):
        note_edits(tensors)
        return tensors
    return [
        tensor.wrap_like(local) if isinstance(tensor, ShardedTensor) else local
        for tensor, local in zip(tensors, result, strict=True)
    ]


def _own(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, ShardedTensor) else tensor


def _column(name: str, value: Any, tensors: Sequence[Any]) -> Any:
    """One operand of a foreach op: what of it meets each of ``tensors``."""
    if isinstance(value, torch.Tensor):
        value = replicated(value)
        if isinstance(value, DTensor) or value.dim():
            raise_unsupported(f"{name} with one tensor of shape {tuple(value.shape)} for all")
        return value
    return [
        _operand(name, item, tensor) if isinstance(item, torch.Tensor) else item
        for item, tensor in zip(value, tensors, strict=True)
    ]


def _operand(name: str, value: torch.Tensor, target: Any) -> torch.Tensor:
    if isinstance(target, ShardedTensor):
        return local_operand(name, value, target)
    return whole_operand(value)


def fused(name: str, func: Call, args: Args, kwargs: Kwargs) -> None:
    """``_fused_adamw_`` and the like: lists of parameters, gradients, states and steps."""
    parameters: Sequence[Any] = args[0]
    check_no_gradient(name, [parameters])
    columns = []
    for values in args:
        # Steps are plain numbers; lists of maxima are empty without amsgrad.
        if isinstance(values, (list, tuple)) and any(
            isinstance(value, ShardedTensor) for value in values
        ):
            values = [
                value._local_tensor
                # Gradients and states share the parameter's spec, which spares a comparison.
                if type(value) is ShardedTensor and value._spec is parameter._spec
                else _operand(name, value, parameter)
                for value, parameter in zip(values, parameters, strict=True)
            ]
        columns.append(values)
    func(*columns, **kwargs)
    note_edits(parameters)


def copy(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """``copy_``. From a whole tensor each rank takes its range. A tensor that lies otherwise over
    the ranks is gathered first, as is one that is copied into a plain tensor: collective."""
    target, source = args[0], args[1]
    check_no_gradient("copy_", [target, source])
    if not isinstance(target, torch.Tensor):
        raise_unsupported(f"{name} of a {type(target).__name__}")
    if not isinstance(target, ShardedTensor):
        return target.copy_(source.full_tensor(), *args[2:], **kwargs)
    if isinstance(source, DTensor) and not (
        isinstance(source, ShardedTensor) and same_layout(source, target)
    ):
        source = source.full_tensor()
    local = local_operand("copy_", source, target)
    if target._local_tensor.is_meta and not local.is_meta:
        raise RuntimeError(
            "copy_ into a ShardedTensor on the meta device, which has no memory: call "
            "to_empty(device=...) on the model first"
        )
    target._local_tensor.detach().copy_(local, *args[2:], **kwargs)
    note_edit(target)
    return target


def convert(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """``to`` and ``type_as``, where another tensor may say the dtype and the device."""
    check_no_gradient(name, args[:1])
    tensor = args[0]
    options = [_own(value) for value in args[1:]]
    result = func(_own(tensor), *options, **{key: _own(value) for key, value in kwargs.items()})
    if not isinstance(tensor, ShardedTensor):
        return result
    return tensor if result is tensor._local_tensor else tensor.wrap_like(result)


def set_item(name: str, func: Call, args: Args, kwargs: Kwargs) -> None:
    """``tensor[mask] = number`` and ``tensor[index] = value``."""
    target, index, value = args
    if not isinstance(target, ShardedTensor):
        target[whole_operand(index)] = whole_operand(value)
        return
    if isinstance(index, ShardedTensor):
        if isinstance(value, torch.Tensor) and value.dim():
            raise_unsupported("assigning a tensor under a mask")
        target.masked_fill_(index, value)
    elif isinstance(value, torch.Tensor):
        target[index].copy_(value)
    else:
        target[index].fill_(value)


def random(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """Random fills and ``torch.nn.init``: the whole tensor is drawn on every rank, as without
    sharding, and each takes its range. So the result does not depend on the number of ranks, given
    the same seed on all; memory for the whole tensor is needed meanwhile. Where ranks hold copies,
    they get those of the first, which is collective, so that they stay copies whatever the seeds.
    """
    target = [*args, *kwargs.values()][0]
    if not isinstance(target, ShardedTensor) or kwargs.get("requires_grad"):
        raise_unsupported(f"{name} with these arguments")
    if getattr(func, "__module__", "") != "torch.nn.init":  # which stops gradients by itself
        check_no_gradient(name, [target])
    local = target._local_tensor.detach()
    whole = torch.empty(target._shape, dtype=local.dtype, device=local.device)

    def stand_in(value: Any) -> Any:
        return whole if value is target else whole_operand(value)

    drawn = func(*map(stand_in, args), **{key: stand_in(value) for key, value in kwargs.items()})
    drawn = own_elements(drawn, target._spec).contiguous()
    for dim in copied_dims(target._spec) if not drawn.is_meta else ():
        dist.broadcast(as_carried(drawn), group=target._spec.mesh.get_group(dim), group_src=0)
    if name.endswith("_like"):
        return target.wrap_like(drawn.clone())
    local.copy_(drawn)
    note_edit(target)
    return target
