"""Ops that treat each element by itself, and so can run on the local ranges, and who runs any
other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.boxes import boxes
from fsdp_overlap.tensor.comm_dtypes import as_comm_dtype
from fsdp_overlap.tensor.pending_steps import PENDING, finish_pending_steps
from fsdp_overlap.tensor.ragged_dtensor import (
    CANNOT_MOVE,
    RaggedDTensor,
    ShardedParam,
    has_range,
    local_range,
    raise_unsupported,
)
from fsdp_overlap.tensor.tiles import copied_dims, tile_of
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass, DTensorSpec

# ---- Errors in backward, where a gradient would have to flow into a sharded tensor ----

# Sharded parameters take no part in autograd: units compute with the unsharded ones. Results of ops
# on them require grad as those of other tensors do, so that code which reads or copies parameters
# outside of torch.no_grad() works. The node behind each result raises when backward comes to it.

_START = torch.empty(0, requires_grad=True)
"""What the nodes are functions of, in place of sharded tensors. No gradient gets here."""


class _NoGradient(torch.autograd.Function):
    """Returns the tensor in ``made``, or ``edited`` itself."""

    @staticmethod
    def forward(
        ctx: Any,
        start: torch.Tensor,
        made: list[torch.Tensor],
        edited: torch.Tensor | None,
        name: str,
        parameter: str,
    ) -> torch.Tensor:
        ctx.op_name, ctx.parameter, ctx.is_edit = name, parameter, edited is not None
        if edited is None:
            return made[0]
        ctx.mark_dirty(edited)
        return edited

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"backward through {ctx.op_name} on {ctx.parameter}: gradients do not flow through "
            "sharded tensors; use the parameter inside its unit's forward, or call the op under "
            "torch.no_grad() or on parameter.detach() if no gradient is wanted"
        )


def raise_in_backward(name: str, result: Any, operands: Iterable[Any]) -> Any:
    """Return ``result``, a new tensor. It requires grad if one of ``operands`` does, and then
    backward raises where it comes to it."""
    source = _source(operands)
    if source is None or not _is_differentiable(result):
        return result
    return _NoGradient.apply(_START, [result], None, name, _described(source))


def edit_raises_in_backward(name: str, edited: torch.Tensor, operands: Iterable[Any]) -> None:
    """Do as :func:`raise_in_backward`, for a tensor that was edited in place."""
    source = _source(operands)
    if source is None or requires_grad(edited) or not _is_differentiable(edited):
        return  # what requires grad already raises, or autograd knows how it came about
    _NoGradient.apply(_START, [], edited, name, _described(source))


def check_edit(name: str, target: torch.Tensor) -> None:
    """Refuse to edit a parameter in place, or a view of it, as autograd does.

    Raises:
        RuntimeError: gradients are recorded and ``target`` is a leaf that requires grad, or a view
            of one.
    """
    if torch.is_grad_enabled() and _is_parameter(target):
        _refuse_edit(name, target)


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a leaf that requires grad, or a view of one."""
    with DisableTorchFunctionSubclass():
        node: Any = tensor.grad_fn
        if node is None:
            return tensor.requires_grad
    # What shares a parameter's memory was made by a view, or by data and edited since.
    is_view = getattr(tensor, "edits", None) is not None
    return is_view and not getattr(node, "is_edit", True)


def _refuse_edit(name: str, target: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        f"{name} edits {_described(target)}, which requires grad, in place: call it under "
        "torch.no_grad(), or on parameter.data"
    )


def needs_gradient(operands: Iterable[Any]) -> bool:
    """Return whether autograd would record an op on ``operands``."""
    return _source(operands) is not None


def requires_grad(tensor: torch.Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        return tensor.requires_grad


def tensor_operands(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``values``, and those in lists among ``values``."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _source(operands: Iterable[Any]) -> torch.Tensor | None:
    """Return the first of ``operands`` that a gradient would have to flow to."""
    if not torch.is_grad_enabled():
        return None
    with DisableTorchFunctionSubclass():
        return next((each for each in tensor_operands(operands) if each.requires_grad), None)


def _is_differentiable(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    with DisableTorchFunctionSubclass():
        return value.is_floating_point() or value.is_complex()


def _described(tensor: torch.Tensor) -> str:
    with DisableTorchFunctionSubclass():
        shape, node = tuple(tensor.shape), tensor.grad_fn
    known = getattr(node, "parameter", None)
    if known is not None:
        return str(known)
    # As engine/param notes it. Results of ops belong to no unit.
    if (owner := getattr(tensor, "_fsdp_owner", None)) is not None:
        return f"parameter {owner.fqn!r} of {owner.unit}"
    return f"a {type(tensor).__name__} of shape {shape}"


# ---- The operands of an op, and the part of each that meets the range of a sharded tensor ----


def largest_sharded(name: str, values: Iterable[Any]) -> RaggedDTensor:
    """Return the first of the largest sharded tensors among ``values``. The result of the op takes
    its layout."""
    found = [value for value in values if isinstance(value, RaggedDTensor)]
    if not found:
        raise_unsupported(name)
    return found[0] if len(found) == 1 else max(found, key=_numel)


def _numel(tensor: RaggedDTensor) -> int:
    return prod(tensor._shape)


def local_operand(name: str, value: Any, model: DTensor) -> Any:
    """Return the part of ``value`` that meets the local range of ``model``.

    A DTensor of ``model``'s layout gives its local range. A sharded tensor of another layout is
    gathered, which is collective. A plain tensor stands for a whole one: it is
    broadcast to ``model``'s shape, and gives the same range. Lists are taken item by item. Anything
    else is returned as it is.

    Raises:
        RuntimeError: the tensor does not fit ``model``'s shape.
    """
    if isinstance(value, DTensor) and same_layout(value, model):
        return value._local_tensor
    if isinstance(value, RaggedDTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return range_of(name, value, model)
    if isinstance(value, (list, tuple)):
        return [local_operand(name, item, model) for item in value]
    return value


def call_with(
    change: Callable[[Any], Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``func`` with ``change(value)`` in place of each argument."""
    return func(*map(change, args), **{name: change(value) for name, value in kwargs.items()})


def full_operand(value: Any) -> Any:
    """Return ``value``, with each sharded tensor replaced by its ``full_tensor()``. Collective over
    their mesh."""
    if isinstance(value, RaggedDTensor):
        return value.full_tensor()
    if isinstance(value, (list, tuple)):
        return [full_operand(item) for item in value]
    return value


def replicated(value: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of a DTensor that every rank holds whole. Any other tensor is
    returned as it is."""
    if isinstance(value, DTensor) and all(p.is_replicate() for p in value.placements):
        return value._local_tensor
    return value


def range_of(name: str, whole: torch.Tensor, model: DTensor) -> torch.Tensor:
    """Return the elements of ``whole`` that belong to the local range of ``model``, flat.

    They are a view if they are contiguous, else a copy. A 0-dimensional tensor is returned as it
    is, so that it does not take part in type promotion, unless ``model`` is 0-dimensional too.

    Raises:
        RuntimeError: ``whole`` is a DTensor that is divided among ranks, or does not broadcast to
            ``model``'s shape.
    """
    shape, whole = tuple(model._spec.shape), replicated(whole)
    if requires_grad(whole):
        whole = whole.detach()  # autograd must not record what is done to ranges
    if isinstance(whole, DTensor):
        raise RuntimeError(
            f"{name} on a RaggedDTensor and a DTensor placed as {whole.placements}: use "
            "full_tensor() on the DTensor, or distribute_tensor() it like the other"
        )
    if not whole.dim() and shape:
        return whole
    try:
        is_fitting = torch.broadcast_shapes(whole.shape, shape) == shape
    except RuntimeError:
        is_fitting = False
    if not is_fitting:
        raise RuntimeError(
            f"{name} on a RaggedDTensor of shape {shape} and a plain tensor of shape "
            f"{tuple(whole.shape)}, which does not broadcast to it: a plain tensor stands for the "
            "whole one; use to_local() to work on this rank's range"
        )
    return own_elements(whole.expand(shape), model._spec)


def own_elements(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return the elements of ``whole`` that this rank holds if it is laid out by ``spec``, flat.
    They are a view if they are contiguous in ``whole``, else a copy."""
    return elements(tile_of(spec).of(whole), *local_range(spec))


def elements(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements ``[start, stop)`` of the flattened ``whole``, without flattening it all."""
    if whole.is_contiguous():
        return whole.reshape(-1)[start:stop]
    parts = []
    for box in boxes(tuple(whole.shape), start, stop):
        part = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        parts.append(part.reshape(-1))
    return torch.cat(parts) if parts else whole.new_empty(0)


def same_layout(first: DTensor, second: DTensor) -> bool:
    return first._spec is second._spec or (
        first._spec.shape == second._spec.shape
        and first._spec.mesh == second._spec.mesh
        and first._spec.placements == second._spec.placements
    )


_edits = attrgetter("edits")


def record_edits(tensors: Iterable[torch.Tensor]) -> None:
    """Count an edit of each sharded tensor, so that full buffers of parameters are found stale. The
    parameters of a param group share a counter, which counts once."""
    tensors = list(tensors)
    if not all(issubclass(each, ShardedParam) for each in set(map(type, tensors))):
        tensors = [tensor for tensor in tensors if isinstance(tensor, ShardedParam)]
    for edits in set(map(_edits, tensors)):
        if edits is not None:
            edits.record_values()


# ---- Point-wise ops ----

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
    if target is not None:
        return _edit(name, func, args, kwargs, target)
    model = largest_sharded(name, values)
    locals_ = [local_operand(name, value, model) for value in args]
    named = {key: local_operand(name, value, model) for key, value in kwargs.items()}
    result: Any = func(*locals_, **named)
    if not isinstance(result, torch.Tensor):
        raise_unsupported(f"{name} with these arguments")
    # `to` and `contiguous` return their argument if there is nothing to do.
    if result is model._local_tensor:
        return model
    result = model.wrap_like(result)
    if name in DETACHED or not torch.is_grad_enabled():
        return result
    return raise_in_backward(name, result, values)


def _edit(name: str, func: Call, args: Args, kwargs: Kwargs, target: Any) -> Any:
    """Run a point-wise op that edits ``target``."""
    if not (isinstance(target, DTensor) and has_range(target)):
        return _edit_plain(name, func, args, kwargs, target)
    locals_ = [local_operand(name, value, target) for value in args]
    named = {key: local_operand(name, value, target) for key, value in kwargs.items()}
    check_edit(name, target)
    # Before it begins: a save in another thread may be reading.
    record_edits([target])
    func(*locals_, **named)
    if torch.is_grad_enabled():
        edit_raises_in_backward(name, target, [*args, *kwargs.values()])
    return target


def _edit_plain(name: str, func: Call, args: Args, kwargs: Kwargs, target: Any) -> Any:
    if not isinstance(target, torch.Tensor):
        raise_unsupported(f"{name} of a {type(target).__name__}")
    return call_with(full_operand, func, args, kwargs)


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


# ---- Which op is meant, and what concerns no elements ----

Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
Table = Sequence[tuple[Collection[str], Handler]]
"""Names of ops, and who runs them. The first row that has a name says who."""

# In-place forms (a trailing underscore), foreach forms and operators (__mul__, __rmul__, __imul__)
# are found by these names too.
POINTWISE = frozenset(
    """
    abs absolute acos acosh add addcdiv addcmul and asin asinh atan atan2 atanh bfloat16
    bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp clamp_max clamp_min clip
    clone contiguous copysign cos cosh cpu cuda deg2rad digamma div divide double empty_like eq
    erf erfc erfinv exp exp2 expm1 fill float float_power floor floor_divide floordiv fmax fmin
    fmod frac full_like ge greater greater_equal gt half heaviside hypot int isclose isfinite
    isinf isnan isneginf isposinf ldexp le lerp less less_equal lgamma log log10 log1p log2
    logaddexp logical_and logical_not logical_or logical_xor logit long lt masked_fill maximum
    minimum mod mul multiply nan_to_num ne neg negative nextafter not_equal ones_like or pos
    positive pow rad2deg real reciprocal relu remainder round rsqrt rsub sgn sigmoid sign
    signbit sin sinc sinh sqrt square sub subtract tan tanh to true_divide truediv trunc type_as
    where xlogy xor zero zeros_like
    """.split()
)

# These ask for the one Python number of a tensor. Tensor.int() is point-wise.
CONVERSIONS = frozenset("__bool__ __complex__ __float__ __index__ __int__ __long__".split())

_resolved: dict[Callable[..., Any], tuple[Handler, str]] = {}


def call(
    table: Table, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``func`` on arguments of which at least one is a sharded tensor.

    Raises:
        RuntimeError: the op is not known to be right on ranges, or edits one that requires grad.
    """
    found = _resolved.get(func)
    if found is None:
        found = _resolved[func] = _resolve(table, func)
    handler, name = found
    if PENDING and handler not in _WITHOUT_VALUES:
        finish_pending_steps()
    return handler(name, func, args, kwargs)


def op_name(func: Callable[..., Any]) -> str:
    """Return the op's plain name: ``mul_`` for ``Tensor.mul_``, ``__imul__`` and
    ``aten.mul_.Tensor``."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return str(func.__self__.__name__)  # type: ignore[attr-defined]
    name = name.split(".")[0]
    is_operator = name.startswith("__") and name.endswith("__") and name not in CONVERSIONS
    return _name_of_operator(name) if is_operator else str(name)


def _name_of_operator(name: str) -> str:
    """Return the name of the op behind a method of Python's operators, such as ``__iadd__``."""
    bare = name[2:-2]
    if bare in POINTWISE:
        return bare
    if bare[:1] == "i" and bare[1:] in POINTWISE:
        return bare[1:] + "_"
    if bare[:1] == "r" and bare[1:] in POINTWISE:
        return bare[1:]
    return name


def _resolve(table: Table, func: Callable[..., Any]) -> tuple[Handler, str]:
    name = op_name(func)
    access, module = getattr(func, "__name__", ""), getattr(func, "__module__", "")
    handler = _SPECIAL.get(func) or _SPECIAL.get((name, access)) or _SPECIAL.get(module)
    if handler is None:
        handler = next((handler for names, handler in table if name in names), None)
    return handler or _by_affixes(name), name


def _by_affixes(name: str) -> Handler:
    """Return who runs an op that the table does not have."""
    if name.startswith("_fused_"):
        return fused
    bare = name.removeprefix("_foreach_").removesuffix("_")
    if bare in POINTWISE or bare == "copy":
        return foreach if name.startswith("_foreach_") else pointwise
    return refuse


def refuse(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    for value in tensor_operands([*args, *kwargs.values()]):
        # As engine/param notes it. Results of ops belong to no unit.
        if isinstance(value, RaggedDTensor) and (owner := getattr(value, "_fsdp_owner", None)):
            raise RuntimeError(
                f"{name} is not supported on a RaggedDTensor: parameter {owner.fqn!r} of "
                f"{owner.unit} is sharded except while {owner.unit}, its unit, runs, and this rank "
                f"holds only a range of it. To compute with it, call the whole {owner.unit}, as in "
                "module(x), not module.forward(x) or a module within it; name another method that "
                "computes to register_fsdp_forward_method(); or call unshard() before, once for "
                "each backward. To read it, use full_tensor(), on every rank of the mesh, or "
                "to_local() for this rank's range"
            )
    raise_unsupported(name)


def _foreach(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what ``func`` is built on, whose ops arrive here again."""
    return func.__wrapped__(*args, **kwargs)


def refuse_derivative(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    raise RuntimeError(
        f"{name}() with respect to sharded parameters: they are not in the graph, the whole ones "
        "that forward used are; call loss.backward(), which leaves the mean over ranks in the "
        "sharded parameters' .grad"
    )


def refuse_move(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    # nn.Module.to() and the like ask this before they replace a parameter.
    raise RuntimeError(CANNOT_MOVE)


def metadata(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def grad_dtype(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.__name__ == "__set__":
        return args[0]._set_grad_dtype(args[1])
    return args[0]._grad_dtype


def local_metadata(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0] if args else kwargs["input"]
    return func(tensor._local_tensor)


def alias(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: RaggedDTensor = args[0]
    return tensor.alias_of(tensor._local_tensor.detach(), tensor._spec)


def assign_data(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not isinstance(args[0], RaggedDTensor):
        raise_unsupported("data of a plain tensor")
    args[0].assign_data(args[1])


def data_ptr(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 0  # a DTensor's answer, which torch's staging of checkpoints relies on


def set_requires_grad(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = metadata(name, func, args, kwargs)
    if args[0].edits is not None:
        args[0].edits.record_trainability(args[0])
    return result


def register_hook(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handle = metadata(name, func, args, kwargs)
    if args[0].edits is not None:
        args[0].edits.has_hooks = True
    return handle


def factory(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Run ``new_zeros`` and the like. As with a DTensor, the result is sharded if it has the shape
    of the tensor, else plain."""
    tensor = args[0]
    if not isinstance(tensor, RaggedDTensor) or kwargs.get("requires_grad"):
        raise_unsupported(f"{name} with these arguments")
    made: torch.Tensor = func(tensor._local_tensor, *args[1:], **kwargs)
    if made.shape != tensor._shape or name == "new_tensor":
        return made
    return tensor.wrap_like(own_elements(made, tensor._spec).clone())


_SPECIAL: dict[object, Handler] = {
    torch.autograd.grad: refuse_derivative,
    torch.autograd.backward: refuse_derivative,
    torch.Tensor.backward: refuse_derivative,
    ("data", "__set__"): assign_data,
    ("requires_grad", "__set__"): set_requires_grad,
    ("requires_grad_", "requires_grad_"): set_requires_grad,
    "torch.nn.init": random,
    "torch.foreach": _foreach,  # from torch 2.15 on; exp_ of a list, say
}
"""Who runs a function, an op of a name by a method of a name, and all functions of a module."""

_WITHOUT_VALUES: frozenset[Handler] = frozenset(
    (metadata, grad_dtype, local_metadata, data_ptr, set_requires_grad, register_hook)
)


def to_local(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    local = args[0]._local_tensor
    return raise_in_backward(name, local.detach(), args) if needs_gradient(args) else local
