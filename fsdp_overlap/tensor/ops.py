"""Ops on sharded tensors: the table behind ``RaggedDTensor.__torch_function__``.

``RaggedDTensor`` cannot import this module, which builds on it, so the last line here gives it
:func:`call`. The package imports this module when the first op runs.

Ops are told apart by name, because the same op arrives in several forms (``torch.mul``,
``Tensor.mul``, ``Tensor.__mul__``, ``aten.mul.Tensor``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch

from fsdp_overlap.tensor import creation, pointwise, sums_and_norms, views
from fsdp_overlap.tensor.pending_steps import PENDING, finish_pending_steps
from fsdp_overlap.tensor.pointwise import (
    needs_gradient,
    own_elements,
    raise_in_backward,
    tensor_operands,
)
from fsdp_overlap.tensor.ragged_dtensor import CANNOT_MOVE, RaggedDTensor, raise_unsupported
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass

Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

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

REDUCTIONS = frozenset("all amax amin any max mean min sum".split())

# These gather the whole of each tensor.
ON_FULL_TENSORS = frozenset(
    """
    allclose aminmax argmax argmin count_nonzero histc kron logsumexp median nanmean nanmedian
    nanquantile nansum prod quantile std std_mean var var_mean
    """.split()
)

PRODUCTS = frozenset("__matmul__ bmm matmul mm".split())

NORMS = frozenset("linalg_norm linalg_vector_norm norm vector_norm".split())

VIEWS = frozenset(
    """
    __getitem__ chunk flatten narrow ravel reshape reshape_as select split squeeze tensor_split
    unbind unflatten unsqueeze view view_as
    """.split()
)

# Some are functions of torch.nn.init. They are listed by name because transformers replaces them by
# its own while it initializes a model, and then its functions arrive here.
RANDOM = frozenset(
    """
    bernoulli_ cauchy_ constant_ exponential_ geometric_ kaiming_uniform_ log_normal_ normal_
    random_ uniform_ rand_like randint_like randn_like
    """.split()
)

FACTORIES = frozenset("new_empty new_full new_ones new_tensor new_zeros".split())

# The local range answers these as the whole tensor would, and all flags that are attributes.
LOCAL_METADATA = frozenset(
    """
    device dtype element_size get_device is_complex is_conj is_floating_point is_inference is_neg
    is_signed itemsize layout
    """.split()
) | {
    name
    for name in dir(torch.Tensor)
    if name.startswith("is_") and name != "is_leaf" and not callable(getattr(torch.Tensor, name))
}

# These concern the whole tensor or its place in autograd, and need no values.
METADATA = frozenset(
    """
    __len__ _backward_hooks _base _has_grad_dtype_override _is_view
    _post_accumulate_grad_hooks _version dim grad grad_fn has_names
    is_contiguous is_leaf is_same_size is_tensor name names nbytes ndim
    ndimension nelement numel output_nr requires_grad retains_grad shape size stride
    """.split()
)

_resolved: dict[Callable[..., Any], tuple[Handler, str]] = {}


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on arguments of which at least one is a sharded tensor.

    Raises:
        RuntimeError: the op is not known to be right on ranges, or edits one that requires grad.
    """
    found = _resolved.get(func)
    if found is None:
        found = _resolved[func] = _resolve(func)
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
    if name.startswith("__") and name.endswith("__") and name not in CONVERSIONS:
        bare = name[2:-2]
        if bare in POINTWISE:
            return bare
        if bare[:1] == "i" and bare[1:] in POINTWISE:
            return bare[1:] + "_"
        if bare[:1] == "r" and bare[1:] in POINTWISE:
            return bare[1:]
    return str(name)


def _resolve(func: Callable[..., Any]) -> tuple[Handler, str]:
    name = op_name(func)
    if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
        return _refuse_derivative, name
    access = getattr(func, "__name__", "")
    if (name, access) == ("data", "__set__"):
        return _assign_data, name
    if name in ("requires_grad_", "requires_grad") and access != "__get__":
        return _set_requires_grad, name
    module = getattr(func, "__module__", "")
    if module == "torch.nn.init":
        return pointwise.random, name
    if module == "torch.foreach":  # from torch 2.15 on; exp_ of a list, say
        return _foreach, name
    for names, handler in TABLE:
        if name in names:
            return handler, name
    if name.startswith("_fused_"):
        return pointwise.fused, name
    bare = name.removeprefix("_foreach_").removesuffix("_")
    if bare in POINTWISE or bare == "copy":
        return (pointwise.foreach if name.startswith("_foreach_") else pointwise.pointwise), name
    return _refuse, name


def _refuse(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
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


def _refuse_derivative(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    raise RuntimeError(
        f"{name}() with respect to sharded parameters: they are not in the graph, the whole ones "
        "that forward used are; call loss.backward(), which leaves the mean over ranks in the "
        "sharded parameters' .grad"
    )


def _refuse_move(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    # nn.Module.to() and the like ask this before they replace a parameter.
    raise RuntimeError(CANNOT_MOVE)


def _metadata(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _grad_dtype(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.__name__ == "__set__":
        return args[0]._set_grad_dtype(args[1])
    return args[0]._grad_dtype


def _local_metadata(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0] if args else kwargs["input"]
    return func(tensor._local_tensor)


def _alias(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: RaggedDTensor = args[0]
    return tensor.alias_of(tensor._local_tensor.detach(), tensor._spec)


def _assign_data(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not isinstance(args[0], RaggedDTensor):
        raise_unsupported("data of a plain tensor")
    args[0].assign_data(args[1])


def _data_ptr(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 0  # a DTensor's answer, which torch's staging of checkpoints relies on


def _set_requires_grad(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _metadata(name, func, args, kwargs)
    if args[0].edits is not None:
        args[0].edits.record_trainability(args[0])
    return result


def _register_hook(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handle = _metadata(name, func, args, kwargs)
    if args[0].edits is not None:
        args[0].edits.has_hooks = True
    return handle


def _factory(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Run ``new_zeros`` and the like. As with a DTensor, the result is sharded if it has the shape
    of the tensor, else plain."""
    tensor = args[0]
    if not isinstance(tensor, RaggedDTensor) or kwargs.get("requires_grad"):
        raise_unsupported(f"{name} with these arguments")
    made: torch.Tensor = func(tensor._local_tensor, *args[1:], **kwargs)
    if made.shape != tensor._shape or name == "new_tensor":
        return made
    return tensor.wrap_like(own_elements(made, tensor._spec).clone())


_WITHOUT_VALUES: frozenset[Handler] = frozenset(
    (_metadata, _grad_dtype, _local_metadata, _data_ptr, _set_requires_grad, _register_hook)
)


def _max_or_min(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_of_two = any(isinstance(value, torch.Tensor) for value in [*args[1:], kwargs.get("other")])
    handler = pointwise.pointwise if is_of_two else sums_and_norms.reduction
    return handler(name, func, args, kwargs)


def _product(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # A plain operand often is a batch, and then the unit was meant to run.
    operands = tensor_operands([*args, *kwargs.values()])
    if not all(isinstance(value, RaggedDTensor) for value in operands):
        _refuse(name, func, args, kwargs)
    return sums_and_norms.on_full_tensors(name, func, args, kwargs)


def _to_local(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    local = args[0]._local_tensor
    return raise_in_backward(name, local.detach(), args) if needs_gradient(args) else local


def _full_tensor(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return raise_in_backward(name, creation.full_tensor(args[0]), args)


def _redistribute(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return raise_in_backward(name, creation.redistribute(*args), args[:1])


# The first row that has an op's name says who runs it. Point-wise ops come after all rows.
TABLE: list[tuple[Collection[str], Handler]] = [
    (("grad_dtype",), _grad_dtype),
    (LOCAL_METADATA, _local_metadata),
    (METADATA, _metadata),
    (("data_ptr",), _data_ptr),
    (("_has_compatible_shallow_copy_type",), _refuse_move),
    (("detach", "alias", "data"), _alias),
    (("detach_",), _metadata),
    (("register_hook", "register_post_accumulate_grad_hook"), _register_hook),
    (("copy_",), pointwise.copy),
    (("__setitem__",), pointwise.set_item),
    (("to", "type_as"), pointwise.convert),
    (RANDOM, pointwise.random),
    (FACTORIES, _factory),
    (VIEWS, views.view),
    (("view_as_real", "view_as_complex"), views.reinterpret),
    (("max", "min"), _max_or_min),
    (NORMS, sums_and_norms.norm),
    (("_foreach_norm",), sums_and_norms.foreach_norm),
    (REDUCTIONS, sums_and_norms.reduction),
    (PRODUCTS, _product),
    ((*CONVERSIONS, "item", "tolist"), sums_and_norms.on_full_tensors),
    (ON_FULL_TENSORS, sums_and_norms.on_full_tensors),
    (("dot",), sums_and_norms.dot),
    (("equal",), sums_and_norms.equal),
    (("_amp_foreach_non_finite_check_and_unscale_",), sums_and_norms.unscale),
    (("to_local",), _to_local),
    (("full_tensor",), _full_tensor),
    (("redistribute",), _redistribute),
]

RaggedDTensor._run_op = staticmethod(call)
