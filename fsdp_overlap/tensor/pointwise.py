"""Ops that treat each element by itself, and so can run on the local ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.comm_dtypes import as_comm_dtype
from fsdp_overlap.tensor.gradient_errors import (
    check_edit,
    edit_raises_in_backward,
    needs_gradient,
    raise_in_backward,
)
from fsdp_overlap.tensor.operands import (
    call_with,
    full_operand,
    largest_sharded,
    local_operand,
    own_elements,
    record_edits,
    replicated,
    same_layout,
)
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, has_range, raise_unsupported
from fsdp_overlap.tensor.tiles import copied_dims

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# These make a tensor of the same layout, to which no gradient flows.
DETACHED = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})


def pointwise(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a point-wise op, also in place or with ``out``. If the tensor it edits is plain, the
    sharded operands are gathered, which is collective."""
    values = [*args, *kwargs.values()]
    if kwargs.get("requires_grad"):
        raise_unsupported(f"{name} with requires_grad=True")
    target = kwargs.get("out")
    if target is None and name.endswith("_"):
        target = args[0] if args else kwargs.get("input")
    model: Any
    if isinstance(target, DTensor) and has_range(target):
        model = target
    elif target is None:
        model = largest_sharded(name, values)
    elif not isinstance(target, torch.Tensor):
        raise_unsupported(f"{name} of a {type(target).__name__}")
    else:
        return call_with(full_operand, func, args, kwargs)
    locals_ = [local_operand(name, value, model) for value in args]
    named = {key: local_operand(name, value, model) for key, value in kwargs.items()}
    if target is not None:
        check_edit(name, target)
        # Before it begins: a save in another thread may be reading.
        record_edits([target])
        func(*locals_, **named)
        edit_raises_in_backward(name, target, values)
        return target
    result = func(*locals_, **named)
    if not isinstance(result, torch.Tensor):
        raise_unsupported(f"{name} with these arguments")
    # `to` and `contiguous` return their argument if there is nothing to do.
    if result is model._local_tensor:
        return model
    result = model.wrap_like(result)
    return result if name in DETACHED else raise_in_backward(name, result, values)


def foreach(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a point-wise op on lists of tensors, each of which has its own layout."""
    tensors: Sequence[Any] = args[0]
    is_edit = name.endswith("_")
    if needs_gradient([*args, *kwargs.values()]):
        if not all(isinstance(tensor, RaggedDTensor) for tensor in tensors):
            raise_unsupported(f"{name} on sharded and plain tensors outside torch.no_grad()")
        for tensor in tensors if is_edit else ():
            check_edit(name, tensor)
    operands = [_column(name, value, tensors) for value in args[1:]]
    named = {key: _column(name, value, tensors) for key, value in kwargs.items()}
    if is_edit:
        record_edits(tensors)
    result = func([_own(tensor) for tensor in tensors], *operands, **named)
    if not is_edit:
        result = [
            tensor.wrap_like(local) if isinstance(tensor, RaggedDTensor) else local
            for tensor, local in zip(tensors, result, strict=True)
        ]
    if torch.is_grad_enabled():
        given = [tensors, *args[1:], *kwargs.values()]
        for index, tensor in enumerate(tensors):
            values = [x[index] if isinstance(x, (list, tuple)) else x for x in given]
            if is_edit:
                edit_raises_in_backward(name, tensor, values)
            else:
                result[index] = raise_in_backward(name, result[index], values)
    return tensors if is_edit else result


def _own(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, RaggedDTensor) else tensor


def _column(name: str, value: Any, tensors: Sequence[Any]) -> Any:
    """Return the parts of one operand of a foreach op that meet each of ``tensors``."""
    if not isinstance(value, (list, tuple, torch.Tensor)):
        return value
    if isinstance(value, torch.Tensor):
        value = replicated(value).detach()
        # The scalars of addcdiv and addcmul may be one tensor, with a number for each.
        has_scalars = name.startswith("_foreach_addc") and value.shape == (len(tensors),)
        if isinstance(value, DTensor) or (value.dim() and not has_scalars):
            raise_unsupported(f"{name} with one tensor of shape {tuple(value.shape)} for all")
        return value
    return [
        _operand(name, item, tensor) if isinstance(item, torch.Tensor) else item
        for item, tensor in zip(value, tensors, strict=True)
    ]


def _operand(name: str, value: torch.Tensor, target: Any) -> torch.Tensor:
    if isinstance(target, RaggedDTensor):
        return local_operand(name, value, target)
    return full_operand(value)


def fused(name: str, func: Call, args: Args, kwargs: Kwargs) -> None:
    """Run ``_fused_adamw_`` and the like on lists of parameters, gradients, states and steps."""
    parameters: Sequence[Any] = args[0]
    for parameter in parameters if torch.is_grad_enabled() else ():
        check_edit(name, parameter)
    columns = []
    for values in args:
        # Steps are plain tensors, and without amsgrad the list of maxima is empty.
        if isinstance(values, (list, tuple)) and any(
            isinstance(value, RaggedDTensor) for value in values
        ):
            values = [
                value._local_tensor
                # Gradients and states share the parameter's spec, so layouts need no comparison.
                if type(value) is RaggedDTensor and value._spec is parameter._spec
                else _operand(name, value, parameter)
                for value, parameter in zip(values, parameters, strict=True)
            ]
        columns.append(values)
    record_edits(parameters)
    func(*columns, **kwargs)


def copy(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run ``copy_``. Each rank takes its range of a source that is whole. A sharded source is
    gathered, which is collective, if it lies otherwise over the ranks or the target is plain."""
    target, source = args[0], args[1]
    if not isinstance(target, torch.Tensor):
        raise_unsupported(f"{name} of a {type(target).__name__}")
    if not (isinstance(target, DTensor) and has_range(target)):
        return target.copy_(source.full_tensor(), *args[2:], **kwargs)
    check_edit(name, target)
    whole = source
    if isinstance(source, DTensor) and not same_layout(source, target):
        whole = source.full_tensor()
    local = local_operand("copy_", whole, target)
    if target._local_tensor.is_meta and not local.is_meta:
        raise RuntimeError(
            "copy_ into a RaggedDTensor on the meta device, which has no memory: call "
            "to_empty(device=...) on the model first"
        )
    record_edits([target])
    target._local_tensor.detach().copy_(local, *args[2:], **kwargs)
    edit_raises_in_backward(name, target, [source])
    return target


def convert(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run ``to`` and ``type_as``. Another tensor may give the dtype and the device."""
    tensor = args[0]
    result = call_with(_own, func, args, kwargs)
    if not isinstance(tensor, RaggedDTensor):
        return result
    if result is tensor._local_tensor:
        return tensor
    return raise_in_backward(name, tensor.wrap_like(result), [tensor])


def set_item(name: str, func: Call, args: Args, kwargs: Kwargs) -> None:
    """Run ``tensor[mask] = number`` and ``tensor[index] = value``."""
    target, index, value = args
    if not isinstance(target, RaggedDTensor):
        target[full_operand(index)] = full_operand(value)
        return
    if isinstance(index, RaggedDTensor):
        if isinstance(value, torch.Tensor) and value.dim():
            raise_unsupported("assigning a tensor under a mask")
        target.masked_fill_(index, value)
    elif isinstance(value, torch.Tensor):
        target[index].copy_(value)
    else:
        target[index].fill_(value)


def random(name: str, func: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run random fills and ``torch.nn.init``.

    Every rank draws the whole tensor, as without sharding, and takes its range. So if all ranks
    have the same seed, the result does not depend on their number. The whole tensor needs memory
    meanwhile. Ranks that hold copies get what the first of them drew, which is collective, so that
    they stay copies whatever the seeds.
    """
    target = [*args, *kwargs.values()][0]
    if not isinstance(target, RaggedDTensor) or kwargs.get("requires_grad"):
        raise_unsupported(f"{name} with these arguments")
    is_new = name.endswith("_like")
    # torch.nn.init stops gradients itself
    if not is_new and getattr(func, "__module__", "") != "torch.nn.init":
        check_edit(name, target)
    local = target._local_tensor.detach()
    whole = torch.empty(target._shape, dtype=local.dtype, device=local.device)

    def stand_in(value: Any) -> Any:
        return whole if value is target else full_operand(value)

    drawn = own_elements(call_with(stand_in, func, args, kwargs), target._spec).contiguous()
    for dim in copied_dims(target._spec) if not drawn.is_meta else ():
        dist.broadcast(as_comm_dtype(drawn), group=target._spec.mesh.get_group(dim), group_src=0)
    if is_new:
        return target.wrap_like(drawn.clone())
    record_edits([target])
    local.copy_(drawn)
    return target
