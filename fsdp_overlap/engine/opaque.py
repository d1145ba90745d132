"""Opaque parameters: their class and their attributes alone know what the elements stand for.

Libraries of quantized weights have such classes, for example four bits in half of a byte, of which
an attribute holds the scales. The bytes are sharded and gathered as they are, and never cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from fsdp_overlap.tensor.extension import missing_methods
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass


def is_opaque(value: Any) -> bool:
    """Whether ``value`` is a parameter of a class of its own, derived from ``torch.nn.Parameter``,
    and holds its elements as a plain tensor does."""
    cls = type(value)
    if cls is nn.Parameter or nn.Parameter not in cls.__mro__ or nn.parameter.is_lazy(value):
        return False
    if not missing_methods(value):  # it says itself how it is gathered
        return False
    return bool(cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__)


def plain(parameter: torch.Tensor) -> torch.Tensor:
    """The elements of ``parameter`` as a plain tensor. It shares memory and version counter."""
    with DisableTorchFunctionSubclass():
        return parameter.detach()


def opaque_like(parameter: torch.Tensor, elements: torch.Tensor) -> nn.Parameter:
    """A frozen parameter of the class that ``parameter`` has, without attributes. Its memory is
    that of ``elements``."""
    return cast(nn.Parameter, elements.data.as_subclass(type(parameter)))


def check_frozen(
    label: str, parameters: Sequence[torch.Tensor], sharded: Sequence[torch.Tensor]
) -> None:
    """Checks that the ``sharded`` forms of opaque ``parameters`` are frozen, as these were.
    ``label`` names their unit.

    Raises:
        RuntimeError: one of them requires grad.
    """
    for parameter, form in zip(parameters, sharded, strict=True):
        if form.requires_grad:
            raise RuntimeError(
                f"a {type(parameter).__name__} of unit {label!r} requires grad, and its elements "
                "are no numbers that can be trained: freeze it by requires_grad_(False), and train "
                "adapters beside it"
            )


def aliases_of(where: str, parameter: torch.Tensor, module: nn.Module) -> dict[int, torch.Tensor]:
    """Other tensors of ``module`` that are the elements of ``parameter``, by their ids. Such a
    tensor is an attribute of the parameter, of the module, or of an attribute of the module.
    ``where`` names the parameter in errors.

    Raises:
        ValueError: a tensor there has a part of the parameter's memory, or another shape.
    """
    found: dict[int, torch.Tensor] = {}
    if not _is_plain(parameter):
        return found
    storage, (first, last) = parameter.untyped_storage()._cdata, _extent(parameter)
    for holder in (parameter, module, *vars(module).values()):
        for name, value in getattr(holder, "__dict__", {}).items():
            if not isinstance(value, torch.Tensor) or value is parameter or not _is_plain(value):
                continue
            start, stop = _extent(value)
            if value.untyped_storage()._cdata != storage or start >= last or stop <= first:
                continue
            if (start, stop, value.shape) != (first, last, parameter.shape):
                raise ValueError(
                    f"{where} shares memory with {name!r} of a {type(holder).__name__}, which has "
                    "another shape and could not follow it: give that memory of its own, by clone()"
                )
            found[id(value)] = value
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a storage in which its elements are."""
    has_elements = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return has_elements and tensor.layout is torch.strided and not tensor.is_meta


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its storage has its first element, in bytes, and where the last one ends. The same if
    it has no elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + numel * tensor.element_size()


class _Attribute:
    """An attribute of a sharded parameter which is that of the unsharded one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, sharded: Any, owner: type) -> Any:
        return self if sharded is None else getattr(sharded.unsharded_form, self._name)

    def __set__(self, sharded: Any, value: Any) -> None:
        setattr(sharded.unsharded_form, self._name, value)

    def __delete__(self, sharded: Any) -> None:
        delattr(sharded.unsharded_form, self._name)


def share_attributes(
    sharded: Any, parameter: nn.Parameter, aliases: dict[int, torch.Tensor]
) -> None:
    """Gives ``sharded`` the attributes that ``parameter``, its unsharded form, has now, and what
    its class computes from them. What is assigned to them later is seen in both. ``aliases`` are
    left out, because they have no memory while the parameter is sharded."""
    found = set()
    for name, value in vars(parameter).items():
        if not name.startswith("_"):
            vars(sharded).pop(name, None)
            if id(value) not in aliases:
                found.add(name)
    for its in type(parameter).__mro__:
        if its not in nn.Parameter.__mro__:
            found |= {name for name, value in vars(its).items() if isinstance(value, property)}
    cls: type = type(sharded)
    sharded.unsharded_form = parameter
    sharded.__class__ = _with_attributes(cls, frozenset(found.difference(dir(cls))))


def takes(sharded: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether elements of ``dtype`` may be copied into a sharded tensor. Into the sharded form of
    an opaque parameter only those of its own."""
    return dtype == sharded.dtype or "unsharded_form" not in vars(sharded)


def _copy(sharded: Any, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """``copy_()`` of the sharded form of an opaque parameter.

    Raises:
        RuntimeError: ``src`` has another dtype, and would be cast.
    """
    if not takes(sharded, src.dtype):
        kind = type(sharded.unsharded_form).__name__
        raise RuntimeError(
            f"{src.dtype} was to be copied into a {kind} that is stored as {sharded.dtype}, "
            f"whose elements are no numbers to be cast: copy what was stored as {sharded.dtype}"
        )
    return torch.Tensor.copy_(sharded, src, non_blocking)


@cache
def _with_attributes(cls: type, names: frozenset[str]) -> type:
    """A class like ``cls``, of the same name, with an :class:`_Attribute` for each of ``names``. It
    never casts what it is given."""
    own: dict[str, Any] = {name: _Attribute(name) for name in sorted(names)}
    return type(cls)(cls.__name__, (cls,), own | {"copy_": _copy, "__module__": cls.__module__})
