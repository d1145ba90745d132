"""The sharded form of a parameter in rows: a DTensor like any other, whose edits are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import enable_reentrant_dispatch

from fsdp_overlap.tensor.pending_steps import PENDING, finish_pending_steps
from fsdp_overlap.tensor.ragged_dtensor import (
    CANNOT_MOVE,
    RaggedDTensor,
    ShardEdits,
    ShardedParam,
    attributes_of,
)
from fsdp_overlap.tensor.subclasses import is_subclass
from fsdp_overlap.torch_internals import (
    DisableTorchFunctionSubclass,
    DTensorSpec,
    allow_foreach,
    dtensor_handlers,
    number_of,
)

# Operators that edit. All other functions that do, end in an underscore.
_EDITING_OPERATORS = frozenset(
    "__iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__ "
    "__irshift__ __isub__ __itruediv__ __ixor__ __setitem__".split()
)

# Functions whose result shares the memory of their argument.
_ALIASES = frozenset("alias data detach".split())

# Functions whose result is a view without sharding. DTensor copies what the ranks' rows must be
# gathered for.
_VIEWS = frozenset(
    "__getitem__ chunk diagonal narrow select split split_with_sizes tensor_split unbind".split()
)

_VALUES = frozenset("H T data imag mH mT real".split())

_torchs_grad: Any = torch.Tensor.grad

_kinds: dict[Callable[..., Any], str] = {}


class _CopyEdits(ShardEdits):
    """The edits of a copy that would be a view of a parameter without sharding."""

    __slots__ = ()

    def record_values(self) -> None:
        raise RuntimeError(
            "this edit of a part of a sharded parameter would be lost: DTensor made a copy of the "
            "part, which lies on several ranks. Edit the whole parameter, as by copy_() or "
            "torch.where(), or this rank's rows, to_local()"
        )


class RowTensor(ShardedParam):
    """A sharded parameter of which each rank of a mesh has a chunk of rows.

    torch treats it as the DTensor that it is: all ops are DTensor's, and their results are plain
    DTensors. The class only counts edits, also those of ``foreach`` and fused ops, which no version
    counter tells of.
    """

    edits: ShardEdits | None = None
    is_watched = False
    """Whether gradients are taken over that autograd accumulates."""

    @property
    def own_hook(self) -> Callable[..., None]:
        return _take_accumulated

    @classmethod
    def wrap(
        cls, local: torch.Tensor, spec: DTensorSpec, edits: ShardEdits | None = None
    ) -> RowTensor:
        """Return the tensor whose rows on this rank are ``local``, which is not copied."""
        tensor = cast(RowTensor, _wrap(cls, local, spec))
        tensor.edits = edits
        return tensor

    def as_parameter(self, requires_grad: bool) -> RowTensor:
        return cast(RowTensor, nn.Parameter(self, requires_grad))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _kind_of(func)
        kwargs = kwargs or {}
        if PENDING and not _is_attribute(func):
            finish_pending_steps()
        if kind == "alias":
            tensor = args[0] if args else kwargs["input"]
            return tensor.alias_of(tensor._local_tensor.detach(), tensor._spec)
        if kind == "grad dtype":
            return args[0]._set_grad_dtype(args[1])
        if kind == "move":
            raise RuntimeError(CANNOT_MOVE)
        if kind == "assignment":
            return args[0].assign_data(args[1])
        if kind == "edit":
            _record_edits(args[0] if args else next(iter(kwargs.values())))
            if func is torch.Tensor.copy_ and isinstance(args[0], RowTensor):
                args = (args[0], args[0]._in_own_layout(args[1]), *args[2:])
        elif kind == "hook" and args[0].edits is not None:
            args[0].edits.has_hooks = True
        if "out" in kwargs:
            _record_edits(kwargs["out"])
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if kind == "trainability" and args[0].edits is not None:
                args[0].edits.record_trainability(args[0])
                _watch_autograd(args[0])
        if kind == "view":
            return _with_edits(result, args, _is_index(args[1:]))
        return result if kind else _with_edits(result, args)

    def keep_gradients_in(self, dtype: torch.dtype | None) -> None:
        super().keep_gradients_in(dtype)
        if dtype is not None:
            with DisableTorchFunctionSubclass():
                self.grad_dtype = dtype  # torch's own, of what autograd accumulates

    def _fits(self, gradient: torch.Tensor) -> bool:
        return isinstance(gradient, DTensor) and gradient.shape == self._spec.shape

    @staticmethod
    def give_grads(parameters: Iterable[Any], locals_: Iterable[torch.Tensor]) -> None:
        for parameter, local in zip(parameters, locals_, strict=True):
            if parameter._local_tensor.dim() != 1:
                local = local.view(parameter._local_tensor.shape)
            gradient = parameter._gradient
            if gradient is not None:
                if gradient._spec.placements == parameter._spec.placements:
                    gradient._local_tensor.add_(local)
                else:  # what autograd left
                    _add_gradient(parameter, parameter.wrap_like(local))
                continue
            gradient = parameter._given_gradient
            if gradient is None:
                gradient = parameter._given_gradient = _wrap(DTensor, local, parameter._grad_spec)
            else:
                gradient._local_tensor = local
            parameter._gradient = gradient

    def gradient_of(self, local: torch.Tensor) -> DTensor:
        return _wrap(DTensor, local.view(self._local_tensor.shape), self._grad_spec)

    def write_gradient(self, gradient: DTensor, value: torch.Tensor) -> None:
        gradient._local_tensor.copy_(self.local_part(value))

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's rows. They share memory."""
        finish_pending_steps()
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor on every rank, a copy. torch's is a view where this rank holds
        all: what was saved would follow the parameter, and edits of it would go unnoticed."""
        finish_pending_steps()
        whole: torch.Tensor = super().full_tensor(grad_placements=grad_placements)
        of = self._local_tensor.untyped_storage()
        # The storage of a tensor extension is empty, and does not tell.
        may_be_view = is_subclass(whole) or whole.untyped_storage()._cdata == of._cdata
        return whole.clone() if may_be_view else whole

    def local_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of ``value`` if it is laid out like this tensor. A plain tensor
        is whole. Collective over the mesh if ``value`` has another layout."""
        return self._in_own_layout(value)._local_tensor

    def _in_own_layout(self, value: torch.Tensor) -> DTensor:
        """Return ``value`` as torch's ops take it beside this tensor. Unlike FSDP2's parameters, it
        may be copied from whole tensors and from those of other layouts, as state dicts have
        them."""
        if isinstance(value, RaggedDTensor):
            value = value.full_tensor()
        if isinstance(value, DTensor):
            if value.placements != self.placements and value.shape == self.shape:
                value = value.redistribute(self.device_mesh, self.placements)
            return value
        whole = value.detach().expand(self._spec.shape).to(self.device_mesh.device_type)
        return distribute_tensor(whole, self.device_mesh, self.placements, src_data_rank=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return a plain DTensor with memory of its own. It has this tensor's layout, and belongs
        to no unit."""
        if id(self) in memo:
            return cast(DTensor, memo[id(self)])
        finish_pending_steps()
        duplicate = self._plain(self._local_tensor.detach().clone())
        vars(duplicate).update(deepcopy(attributes_of(self), memo))
        memo[id(self)] = duplicate
        if self._given_grad_dtype is not None:
            duplicate.grad_dtype = self._given_grad_dtype
        if self._gradient is not None:
            duplicate.grad = deepcopy(self._gradient, memo)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish_pending_steps()
        return self._plain(self._local_tensor.detach()).__reduce_ex__(protocol)

    def _plain(self, local: torch.Tensor) -> DTensor:
        """Return the same as a plain DTensor of ``local``."""
        plain = _wrap(DTensor, local, self._spec)
        if isinstance(self, nn.Parameter):
            return cast(DTensor, nn.Parameter(plain, self.requires_grad))
        return plain


def _wrap(cls: type[DTensor], local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # torch saves and copies a DTensor as such only if the local tensor that it was made of begins
    # where its storage begins.
    empty = torch.empty(0, dtype=local.dtype, device=local.device)
    tensor = DTensor.__new__(cls, empty, spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def _kind_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "").split(".")[0]
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        if (attribute, name) == ("grad_dtype", "__set__"):
            return "grad dtype"
        if attribute == "data":
            return "alias" if name == "__get__" else "assignment"
        return "trainability" if (attribute, name) == ("requires_grad", "__set__") else ""
    if name in _ALIASES:
        return "alias"
    if name == "requires_grad_":
        return "trainability"
    if name == "_has_compatible_shallow_copy_type":
        return "move"
    if name in ("register_hook", "register_post_accumulate_grad_hook"):
        return "hook"
    if name in _VIEWS:
        return "view"
    is_plain_name = not name.startswith("__")
    return "edit" if name in _EDITING_OPERATORS or (is_plain_name and name[-1:] == "_") else ""


def _is_attribute(func: Any) -> bool:
    """Return whether ``func`` gets or sets an attribute that is no tensor of the same values."""
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__", "__delete__") and func.__self__.__name__ not in _VALUES


def _with_edits(result: Any, args: tuple[Any, ...], is_view: bool = False) -> Any:
    """Return ``result``, whose edits are edits of the parameter in ``args`` if it is a view of it,
    and raise if it ``is_view`` without sharding alone. Those that autograd recorded are left
    alone."""
    if isinstance(result, (list, tuple)):
        if not any(type(each) is DTensor for each in result):
            return result
        return type(result)(_with_edits(each, args, is_view) for each in result)
    parameter = args[0] if args else None
    if type(result) is not DTensor or not isinstance(parameter, RowTensor):
        return result
    of, local = parameter._local_tensor.untyped_storage(), result._local_tensor
    if result.grad_fn is not None:
        return result
    if local.untyped_storage()._cdata == of._cdata:
        return parameter.alias_of(local, result._spec)
    return RowTensor.wrap(local, result._spec, _CopyEdits()) if is_view else result


def _is_index(options: tuple[Any, ...]) -> bool:
    """Return whether indexing by ``options`` gives a view: not by tensors or lists."""
    flat = [each for x in options for each in (x if isinstance(x, tuple) else (x,))]
    return not any(isinstance(each, (torch.Tensor, list)) for each in flat)


def _record_edits(edited: Any) -> None:
    for tensor in edited if isinstance(edited, (list, tuple)) else (edited,):
        if isinstance(tensor, RowTensor) and tensor.edits is not None:
            tensor.edits.record_values()


def _watch_autograd(parameter: Any) -> None:
    """Have gradients taken over that autograd accumulates, because the sharded parameter itself was
    used, as in a penalty on weights. Call it with torch's own attributes at hand."""
    if parameter.requires_grad and not parameter.is_watched:
        parameter.is_watched = True
        parameter.register_post_accumulate_grad_hook(_take_accumulated)


def _take_accumulated(parameter: RowTensor) -> None:
    """Add what autograd has accumulated to the gradient."""
    accumulated: Any = _torchs_grad.__get__(parameter)
    _torchs_grad.__set__(parameter, None)
    _add_gradient(parameter, accumulated)


def _add_gradient(parameter: RowTensor, gradient: DTensor) -> None:
    held = parameter._gradient
    if held is not None:
        gradient = held + gradient.redistribute(placements=held.placements)
    parameter._gradient = gradient
    parameter._given_gradient = None


_meshes: WeakSet[DeviceMesh] = WeakSet()


def read_full_scalars(mesh: DeviceMesh) -> None:
    """Make ``float(x)``, ``x.item()`` and ``if x`` of DTensors over ``mesh``, over which rows of
    parameters lie, read the whole. torch gives this rank's part, also of a sum over ranks. Such a
    read is collective over the mesh, unless this rank has the whole."""
    _meshes.add(mesh)


@torch.no_grad()
def _number_of(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    if is_whole or tensor.device_mesh not in _meshes:
        return op(tensor._local_tensor)
    with enable_reentrant_dispatch():  # handlers run below autograd, of which full_tensor() is part
        return op(tensor.full_tensor())


cast(dict[Any, Any], dtensor_handlers)[number_of] = _number_of

allow_foreach(RowTensor)
