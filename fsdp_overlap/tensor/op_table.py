"""The table of ops on sharded tensors, behind ``RaggedDTensor.__torch_function__``.

``RaggedDTensor`` cannot import this module, which builds on it, so the last line here gives it
:func:`~fsdp_overlap.tensor.ops.call` with the table. The package imports this module when the first
op runs.

Ops are told apart by name, because the same op arrives in several forms (``torch.mul``,
``Tensor.mul``, ``Tensor.__mul__``, ``aten.mul.Tensor``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fsdp_overlap.tensor import creation, ops, sums_and_norms, views
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor

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


def _max_or_min(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_of_two = any(isinstance(value, torch.Tensor) for value in [*args[1:], kwargs.get("other")])
    handler = ops.pointwise if is_of_two else sums_and_norms.reduction
    return handler(name, func, args, kwargs)


def _product(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # A plain operand often is a batch, and then the unit was meant to run.
    operands = ops.tensor_operands([*args, *kwargs.values()])
    if not all(isinstance(value, RaggedDTensor) for value in operands):
        ops.refuse(name, func, args, kwargs)
    return sums_and_norms.on_full_tensors(name, func, args, kwargs)


def _full_tensor(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ops.raise_in_backward(name, creation.full_tensor(args[0]), args)


def _redistribute(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ops.raise_in_backward(name, creation.redistribute(*args), args[:1])


# The first row that has an op's name says who runs it. Point-wise ops come after all rows.
TABLE: ops.Table = [
    (("grad_dtype",), ops.grad_dtype),
    (LOCAL_METADATA, ops.local_metadata),
    (METADATA, ops.metadata),
    (("data_ptr",), ops.data_ptr),
    (("_has_compatible_shallow_copy_type",), ops.refuse_move),
    (("detach", "alias", "data"), ops.alias),
    (("detach_",), ops.metadata),
    (("register_hook", "register_post_accumulate_grad_hook"), ops.register_hook),
    (("copy_",), ops.copy),
    (("__setitem__",), ops.set_item),
    (("to", "type_as"), ops.convert),
    (RANDOM, ops.random),
    (FACTORIES, ops.factory),
    (VIEWS, views.view),
    (("view_as_real", "view_as_complex"), views.reinterpret),
    (("max", "min"), _max_or_min),
    (NORMS, sums_and_norms.norm),
    (("_foreach_norm",), sums_and_norms.foreach_norm),
    (REDUCTIONS, sums_and_norms.reduction),
    (PRODUCTS, _product),
    ((*ops.CONVERSIONS, "item", "tolist"), sums_and_norms.on_full_tensors),
    (ON_FULL_TENSORS, sums_and_norms.on_full_tensors),
    (("dot",), sums_and_norms.dot),
    (("equal",), sums_and_norms.equal),
    (("_amp_foreach_non_finite_check_and_unscale_",), sums_and_norms.unscale),
    (("to_local",), ops.to_local),
    (("full_tensor",), _full_tensor),
    (("redistribute",), _redistribute),
]

RaggedDTensor._run_op = staticmethod(partial(ops.call, TABLE))
