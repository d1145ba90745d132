"""Parameters of quantized classes: their attributes, and other tensors that are their elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch import nn

from fsdp_overlap.engine.param import ParamInfo, parameters_outside_units
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam


@dataclass
class OpaqueParamInfo(ParamInfo):
    """An opaque parameter, and ``aliases``, other tensors that are its elements, by their ids."""

    aliases: dict[int, torch.Tensor] = field(default_factory=dict)

    def give_memory(self, view: torch.Tensor) -> None:
        for alias in self.aliases.values():
            alias.data = view
        super().give_memory(view)

    def complete(self, sharded: ShardedParam) -> None:
        share_attributes(sharded, self.parameter, self.aliases)


def with_aliases(owned: Sequence[ParamInfo], modules: Sequence[nn.Module]) -> list[ParamInfo]:
    """Return ``owned``, the parameters of ``modules``, with the aliases of those that are opaque.

    Raises:
        ValueError: another tensor has a part of an opaque parameter's memory.
    """
    names = [each.name for each in fields(ParamInfo)]
    found = {
        id(item.parameter): OpaqueParamInfo(**{name: getattr(item, name) for name in names})
        for item in owned
        if item.never_cast
    }
    for _, parameter, owner, _ in parameters_outside_units(modules if found else ()):
        if (item := found.get(id(parameter))) is not None:
            item.aliases |= aliases_of(item.where, parameter, owner)
    return [found.get(id(item.parameter), item) for item in owned]


def aliases_of(where: str, parameter: torch.Tensor, module: nn.Module) -> dict[int, torch.Tensor]:
    """Return other tensors of ``module`` that are the elements of ``parameter``, by their ids. Such
    a tensor is an attribute of the parameter, of the module, or of an attribute of the module.
    ``where`` names the parameter in errors.

    Raises:
        ValueError: a tensor there has a part of the parameter's memory, or another shape.
    """
    aliases: dict[int, torch.Tensor] = {}
    if not _is_plain(parameter):
        return aliases
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
            aliases[id(value)] = value
    return aliases


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a storage in which its elements are."""
    has_elements = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return has_elements and tensor.layout is torch.strided and not tensor.is_meta


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where its storage has its first element, in bytes, and where the last one ends. The
    same if it has no elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + numel * tensor.element_size()


def _attribute_of_unsharded(name: str) -> property:
    """Return an attribute of sharded parameters that is that of the unsharded one."""
    return property(
        lambda sharded: getattr(sharded.unsharded_form, name),
        lambda sharded, value: setattr(sharded.unsharded_form, name, value),
        lambda sharded: delattr(sharded.unsharded_form, name),
    )


def share_attributes(
    sharded: Any, parameter: nn.Parameter, aliases: dict[int, torch.Tensor]
) -> None:
    """Give ``sharded`` the attributes that ``parameter``, its unsharded form, has now, and what
    its class computes from them. What is assigned to them later is seen in both. ``aliases`` are
    left out, because they have no memory while the parameter is sharded."""
    names = set()
    for name, value in vars(parameter).items():
        if not name.startswith("_"):
            vars(sharded).pop(name, None)
            if id(value) not in aliases:
                names.add(name)
    for base in type(parameter).__mro__:
        if base not in nn.Parameter.__mro__:
            names |= {name for name, value in vars(base).items() if isinstance(value, property)}
    cls: type = type(sharded)
    sharded.unsharded_form = parameter
    sharded.__class__ = _with_attributes(cls, frozenset(names.difference(dir(cls))))


def takes(sharded: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether elements of ``dtype`` may be copied into a sharded tensor. Into the sharded
    form of an opaque parameter only those of its own."""
    return dtype == sharded.dtype or "unsharded_form" not in vars(sharded)


def _copy(sharded: Any, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """Do ``copy_()`` of the sharded form of an opaque parameter. Raise RuntimeError if that would
    cast."""
    if not takes(sharded, src.dtype):
        kind = type(sharded.unsharded_form).__name__
        raise RuntimeError(
            f"cannot copy {src.dtype} into a {kind} that is stored as {sharded.dtype} and never "
            f"cast: copy what was stored as {sharded.dtype}"
        )
    return torch.Tensor.copy_(sharded, src, non_blocking)


@cache
def _with_attributes(cls: type, names: frozenset[str]) -> type:
    """Return a class like ``cls``, of the same name, with the attributes ``names`` of the unsharded
    parameter. It never casts what it is given."""
    own: dict[str, Any] = {name: _attribute_of_unsharded(name) for name in sorted(names)}
    return type(cls)(cls.__name__, (cls,), own | {"copy_": _copy, "__module__": cls.__module__})
