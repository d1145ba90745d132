"""The base of all sharded parameters: ``.grad``, aliases of their memory, and ``.data = value``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from sys import getrefcount
from typing import Any, Self
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.comm_dtypes import REDUCE_DTYPES
from fsdp_overlap.tensor.placement import contiguous_spec
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass, DTensorSpec, refuse_tracing


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
        elif self._fits(gradient):
            # As autograd does with what it accumulates. torch's set_optimizer_state_dict() gives a
            # parameter a gradient of the parameter's own dtype.
            self._gradient = gradient.to(self._grad_dtype)
            self._given_gradient = None
        else:
            raise TypeError(
                f"the gradient of {self!r} must be of the same kind, shape and layout or None, got "
                f"a {type(gradient).__name__}"
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
