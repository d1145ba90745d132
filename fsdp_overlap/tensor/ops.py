"""What can be done with sharded tensors: the table behind ``ShardedTensor.__torch_function__``.

Ops are told apart by name, because the same op arrives in several forms (``torch.mul``,
``Tensor.mul``, ``Tensor.__mul__``, ``aten.mul.Tensor``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap.tensor.sharded_tensor import ShardedTensor, raise_unsupported

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# Work on each element alone, so that running them on the local range is right. In-place forms
# (a trailing underscore) and operators (__mul__, __rmul__, __imul__) follow from the name.
POINTWISE = frozenset(
    """
    abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bfloat16 ceil clamp
    clamp_max clamp_min clip clone contiguous copysign cos cosh deg2rad div divide double empty_like
    eq erf erfc exp exp2 expm1 fill float float_power floor floor_divide floordiv fmax fmin fmod
    frac full_like ge gt half heaviside hypot invert isfinite isinf isnan ldexp le lerp log log10
    log1p log2 logaddexp logical_and logical_not logical_or logical_xor lt maximum minimum mod mul
    multiply nan_to_num ne neg negative not_equal ones_like pos positive pow rad2deg real reciprocal
    relu remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract
    tan tanh to true_divide truediv trunc where xlogy zero zeros_like
    """.split()
)

# Make a tensor of the same layout without letting gradients flow.
DETACHED = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})

# Say something about the tensor as a whole, or about its place in autograd, without its values.
METADATA = frozenset(
    """
    shape size dim ndim ndimension numel nelement stride dtype device layout itemsize element_size
    is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_xpu is_mps is_leaf
    is_contiguous is_floating_point is_complex is_inference is_nested is_tensor is_conj is_neg
    requires_grad grad grad_fn grad_dtype retains_grad output_nr name names _version _base
    _backward_hooks _post_accumulate_grad_hooks _is_view __len__ get_device has_names
    """.split()
)

_resolved: dict[Callable[..., Any], Handler] = {}


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``func``, of which some argument is a sharded tensor.

    Raises:
        RuntimeError: the op is not known to be right on ranges, the tensors lie differently over
            the mesh, or the op would need gradients to flow through a sharded tensor.
    """
    handler = _resolved.get(func)
    if handler is None:
        handler = _resolve(func)
        _resolved[func] = handler
    return handler(func, args, kwargs)


def op_name(func: Callable[..., Any]) -> str:
    """The op's plain name: ``mul_`` for ``Tensor.mul_``, ``__imul__`` and ``aten.mul_.Tensor``."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return str(func.__self__.__name__)  # type: ignore[attr-defined]
    name = name.split(".")[0]
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare in POINTWISE:
            return bare
        if bare[:1] == "i" and bare[1:] in POINTWISE:
            return bare[1:] + "_"
        if bare[:1] == "r" and bare[1:] in POINTWISE:
            return bare[1:]
    return str(name)


def _resolve(func: Callable[..., Any]) -> Handler:
    name = op_name(func)
    access = getattr(func, "__name__", "")
    if name == "data":
        return _get_data if access == "__get__" else _refuse
    if name in ("requires_grad_", "requires_grad") and access != "__get__":
        return _set_requires_grad
    if name in METADATA:
        return _metadata
    if name in ("detach", "alias"):
        return _get_data
    if name == "copy_":
        return _copy
    if name == "_foreach_norm":
        return _foreach_norm
    if name in ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm"):
        return _norm
    if name.startswith("_fused_"):
        return _fused
    if name.startswith("_foreach_") and name.removeprefix("_foreach_").rstrip("_") in POINTWISE | {
        "copy"
    }:
        return _foreach
    if name.rstrip("_") in POINTWISE:
        return _pointwise
    return _refuse


def _refuse(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise_unsupported(op_name(func))


def _metadata(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _get_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: ShardedTensor = args[0]
    # Shares memory with the parameter, so editing it must be noticed as editing the parameter.
    return ShardedTensor.wrap(tensor._local_tensor.detach(), tensor._spec, tensor.edits)


def _set_requires_grad(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result = _metadata(func, args, kwargs)
    if args[0].edits is not None:
        args[0].edits.trainability += 1
    return result


def _pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = op_name(func)
    model = _same_layout(name, [*args, *kwargs.values()])
    target = kwargs.get("out", args[0] if name.endswith("_") else model)
    if not isinstance(target, ShardedTensor):
        raise_unsupported(f"{name} into a plain tensor")
    if name not in DETACHED:
        _check_no_gradient(name, [*args, *kwargs.values()])
    result = func(*map(_local, args), **{key: _local(value) for key, value in kwargs.items()})
    if "out" in kwargs or name.endswith("_"):
        _note_edit(target)
        return target
    # `to` and `contiguous` return their argument where there is nothing to do.
    return model if result is model._local_tensor else model.wrap_like(result)


def _foreach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = op_name(func)
    tensors: Sequence[Any] = args[0]
    others = [value for value in [*args[1:], *kwargs.values()] if isinstance(value, (list, tuple))]
    single = [value for value in [*args[1:], *kwargs.values()] if isinstance(value, torch.Tensor)]
    for index, tensor in enumerate(tensors):
        _same_layout(name, [tensor, *single, *(values[index] for values in others)])
        _check_no_gradient(name, [tensor])
    result = func(*map(_local, args), **{key: _local(value) for key, value in kwargs.items()})
    if name.endswith("_"):
        for tensor in tensors:
            _note_edit(tensor)
        return tensors
    return [tensor.wrap_like(local) for tensor, local in zip(tensors, result, strict=True)]


def _fused(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for per_parameter in zip(
        *(arg for arg in args if isinstance(arg, (list, tuple)) and arg), strict=True
    ):
        _same_layout(op_name(func), per_parameter)
    _check_no_gradient(op_name(func), args[0])
    func(*map(_local, args), **{key: _local(value) for key, value in kwargs.items()})
    for tensor in args[0]:
        _note_edit(tensor)


def _copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, ShardedTensor):
        raise_unsupported("copy_ from a sharded into a plain tensor")
    _check_no_gradient("copy_", [target])
    if isinstance(source, ShardedTensor):
        _same_layout("copy_", [target, source])
        source = source._local_tensor
    elif source.shape == target._shape:
        start, stop = target.local_range
        source = source.reshape(-1)[start:stop]
    elif source.numel() != 1:
        raise RuntimeError(
            f"copy_ of a tensor of shape {tuple(source.shape)} into a ShardedTensor of shape "
            f"{target._shape}: give a tensor of the whole shape, or a ShardedTensor of its layout"
        )
    target._local_tensor.detach().copy_(source, *args[2:], **kwargs)
    _note_edit(target)
    return target


def _norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "ord", "dim"), args, strict=False)) | kwargs
    tensor = given.pop("input", None)
    order = given.pop("ord", given.pop("p", 2))
    dtype = given.pop("dtype", None)
    left = {key: value for key, value in given.items() if value not in (None, False)}
    if not isinstance(tensor, ShardedTensor) or left:
        raise_unsupported(f"{op_name(func)} with {', '.join(left) or 'no tensor'}")
    return _reduced_norms([tensor], _order(order), dtype)[0]


def _foreach_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return _reduced_norms(args[0], _order(order), kwargs.get("dtype"))


def _order(order: Any) -> float:
    return 2.0 if order in (None, "fro") else float(order)


def _reduced_norms(
    tensors: Sequence[ShardedTensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """The norm of each whole tensor, with one all-reduce for all. Collective over the mesh.

    Raises:
        RuntimeError: the tensors lie on different meshes, or gradients would have to flow.
    """
    _check_no_gradient("norm", tensors)
    mesh = tensors[0]._spec.mesh
    if any(
        not isinstance(tensor, ShardedTensor) or tensor._spec.mesh != mesh for tensor in tensors
    ):
        raise RuntimeError(
            "norms of tensors on different meshes: take the norms of each mesh apart"
        )
    # The neutral element for ranks that hold none of a tensor; vector_norm refuses empty input.
    empty = float("inf") if order == float("-inf") else 0.0
    norms = []
    for tensor in tensors:
        local = tensor._local_tensor.detach()
        wide = torch.promote_types(local.dtype, torch.float32)
        norms.append(
            torch.linalg.vector_norm(local, order, dtype=wide)
            if local.numel()
            else torch.full((), empty, dtype=wide, device=local.device)
        )
    stacked = torch.stack(
        [norm.to(torch.promote_types(norms[0].dtype, norm.dtype)) for norm in norms]
    )
    group = mesh.get_group()
    if order == float("inf"):
        dist.all_reduce(stacked, dist.ReduceOp.MAX, group)
    elif order == float("-inf"):
        dist.all_reduce(stacked, dist.ReduceOp.MIN, group)
    elif order == 0:
        dist.all_reduce(stacked, dist.ReduceOp.SUM, group)
    else:
        stacked = stacked.pow_(order)
        dist.all_reduce(stacked, dist.ReduceOp.SUM, group)
        stacked = stacked.pow_(1.0 / order)
    return [
        norm.to(dtype or tensor._local_tensor.dtype)
        for norm, tensor in zip(stacked.unbind(), tensors, strict=True)
    ]


def _local(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value._local_tensor
    if isinstance(value, (list, tuple)):
        return [_local(item) for item in value]
    return value


def _same_layout(name: str, values: Sequence[Any]) -> ShardedTensor:
    """The first sharded tensor of ``values``, once the others are known to match it."""
    model: ShardedTensor | None = None
    for value in values:
        if isinstance(value, ShardedTensor):
            if model is None:
                model = value
            elif value._spec is not model._spec and (
                value._shape != model._shape
                or value._spec.mesh != model._spec.mesh
                or value.placement != model.placement
            ):
                raise RuntimeError(
                    f"{name} on {model!r} ({model.placement}) and {value!r} ({value.placement}), "
                    "which lie differently over the ranks: use full_tensor() on both"
                )
        elif isinstance(value, torch.Tensor) and (value.numel() != 1 or value.dim() > 1):
            raise RuntimeError(
                f"{name} on a ShardedTensor and a plain tensor of shape {tuple(value.shape)}: only "
                "one-element tensors mix with a ShardedTensor; use full_tensor() or to_local()"
            )
    if model is None:
        raise_unsupported(name)
    return model


def _check_no_gradient(name: str, values: Sequence[Any]) -> None:
    if not torch.is_grad_enabled():
        return
    with torch._C.DisableTorchFunctionSubclass():
        needs_gradient = any(isinstance(v, ShardedTensor) and v.requires_grad for v in values)
    if needs_gradient:
        raise RuntimeError(
            f"{name} on a ShardedTensor that requires grad: gradients do not flow through sharded "
            "parameters; wrap it in torch.no_grad(), or use the parameter inside its unit's forward"
        )


def _note_edit(tensor: Any) -> None:
    if isinstance(tensor, ShardedTensor) and tensor.edits is not None:
        tensor.edits.note_values()
