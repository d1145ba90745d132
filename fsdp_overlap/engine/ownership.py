"""Which parameters a unit owns: those of its modules' subtrees that no inner unit owns."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdp_overlap.engine.full_mesh import OnFullMesh
from fsdp_overlap.engine.opaque import aliases_of, is_opaque
from fsdp_overlap.engine.tiles import tile_in
from fsdp_overlap.layout import ParamSpec
from fsdp_overlap.tensor.extension import is_subclass
from fsdp_overlap.torch_internals import given_grad_dtype, is_replicated


@dataclass
class OwnedParameter:
    """A parameter of a unit and every place in the unit's modules where it is registered."""

    fqn: str
    parameter: nn.Parameter
    module: weakref.ref[nn.Module]
    """The first module that has it."""
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """``(module._parameters, name)``; more than one for a tied parameter."""
    is_embedding: bool = False
    keeps_dtype: bool = False
    cut_dim: int = 0
    block: int = 1
    is_kept: bool = False
    is_opaque: bool = False
    aliases: dict[int, torch.Tensor] = field(default_factory=dict)
    """Other tensors that are the elements of an opaque parameter, by their ids."""
    on_full_mesh: OnFullMesh | None = None
    """How it lies over the mesh of all parallelism, if the user named dimensions of that."""

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether its gradient is a DTensor, or a part of a sum over tensor parallelism."""
        is_part = self.on_full_mesh is not None and self.on_full_mesh.sums_plain
        return is_part or isinstance(self.parameter, DTensor)

    @property
    def is_extension(self) -> bool:
        """Whether its tensor is of a class that says itself how it is gathered."""
        return not self.is_opaque and is_subclass(tile_in(self.parameter))

    @property
    def spec(self) -> ParamSpec:
        """Describes what this rank has of the parameter."""
        parameter = self.parameter
        return ParamSpec(
            self.fqn,
            tuple(tile_in(parameter).shape),
            parameter.dtype,
            parameter.requires_grad,
            self.is_embedding,
            self.keeps_dtype,
            self.cut_dim,
            self.block,
            self.is_kept,
            given_grad_dtype(parameter),
            self.is_opaque,
            self.is_extension,
        )


@dataclass(frozen=True)
class Owner:
    """The unit that a parameter belongs to, noted on its sharded and on its unsharded form."""

    unit: str
    fqn: str
    replaced_by: str = ""
    """What put another parameter in the place of this one. Empty if nothing did. A replaced
    parameter is no longer one of ``model.parameters()``."""


def owner_of(parameter: torch.Tensor) -> Owner | None:
    """The unit that ``parameter`` belongs to, or belonged to, if any."""
    return getattr(parameter, "_fsdp_owner", None)


def mark_owner(parameter: torch.Tensor, owner: Owner) -> None:
    """Notes on ``parameter`` which unit it belongs to."""
    parameter._fsdp_owner = owner  # type: ignore[attr-defined]


def mark_replaced(parameter: torch.Tensor, by: str) -> None:
    """Notes on ``parameter``, which belongs to a unit, that another was put in its place."""
    owner = owner_of(parameter)
    assert owner is not None
    mark_owner(parameter, replace(owner, replaced_by=by))


def modules_outside_units(
    modules: Sequence[nn.Module], units: Collection[nn.Module] = ()
) -> Iterable[tuple[str, nn.Module]]:
    """``(name, module)`` for each module in the subtrees of ``modules`` that no inner unit holds,
    parents first, each module once. If ``modules`` are several, a name begins with the place of its
    subtree among them, as in ``1.norm``. What lies within a module that torch's ``replicate()``
    trains is left out.

    ``units``: modules that count as units, because they will be.
    """
    seen = set()
    tops = {id(module) for module in modules}
    prefixes = [""] if len(modules) == 1 else map(str, range(len(modules)))
    pending = list(zip(prefixes, modules, strict=True))[::-1]
    while pending:
        prefix, current = pending.pop()
        is_unit = "_fsdp_unit" in current.__dict__ or current in units
        if id(current) in seen or (is_unit and id(current) not in tops) or is_replicated(current):
            continue
        seen.add(id(current))
        yield prefix, current
        children = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in current._modules.items()
            if child is not None
        ]
        pending.extend(reversed(children))


class UnownedParameters:
    """Finds trainable parameters in the modules of a unit that belong to no unit, because they were
    registered after it was made. Each rank would train them on its own data alone.

    ``ignored``: the parameters that :func:`fully_shard` was told to leave as they are. What takes
    their places later is left alone too.
    """

    def __init__(
        self, modules: Sequence[nn.Module] = (), ignored: frozenset[nn.Parameter] = frozenset()
    ) -> None:
        self._ignored = ignored
        outside = parameters_outside_units(modules if ignored else ())
        self._ignored_names = {fqn for fqn, parameter, *_ in outside if parameter in ignored}
        self._forwards = 0
        self._registrations = -1
        _count.hook()

    def is_due(self) -> bool:
        """Return whether to look before this forward: if any module has registered a parameter or a
        module since, and in forwards 1, 2, 4, 8 ..., because tables may be written to directly and
        parameters unfrozen."""
        self._forwards += 1
        return not self._forwards & (self._forwards - 1) or self._registrations != _count.made

    def find(self, modules: Sequence[nn.Module], own: Iterable[torch.Tensor]) -> str | None:
        """Return the name of such a parameter in ``modules``, or ``None``. ``own`` are the
        parameters of the unit, in both forms. What torch's DDP or FSDP2 trains is left out."""
        self._registrations = -1
        known = {*map(id, own), *map(id, self._ignored)}
        trained = {
            each
            for module in modules
            for each in module.modules()
            if isinstance(each, (nn.parallel.DistributedDataParallel, FSDPModule))
        }
        for fqn, parameter, *_ in parameters_outside_units(modules, trained):
            is_known = id(parameter) in known or fqn in self._ignored_names
            if parameter.requires_grad and not is_known and owner_of(parameter) is None:
                return fqn
        self._registrations = _count.made
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> UnownedParameters:
        copied = UnownedParameters((), frozenset(deepcopy(each, memo) for each in self._ignored))
        copied._ignored_names = self._ignored_names
        return copied


class _Registrations:
    """Counts the parameters and modules that modules of this process register."""

    def __init__(self) -> None:
        self.made = 0
        self._is_hooked = False

    def hook(self) -> None:
        if not self._is_hooked:
            self._is_hooked = True
            register_module_module_registration_hook(self._count)
            register_module_parameter_registration_hook(self._count)

    def _count(self, *registered: Any) -> None:
        self.made += 1


_count = _Registrations()


def parameters_outside_units(
    modules: Sequence[nn.Module], units: Collection[nn.Module] = ()
) -> Iterable[tuple[str, nn.Parameter, nn.Module, str]]:
    """``(fqn, parameter, module, name)`` for each place where a module that
    :func:`modules_outside_units` finds has registered a parameter."""
    for prefix, module in modules_outside_units(modules, units):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter, module, name


def move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Moves buffers to where the unit computes, because they are not sharded."""
    for _, owner in modules_outside_units(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and buffer.device.type not in (device.type, "meta"):
                buffer.data = buffer.to(device)


def owned_parameters(
    modules: Sequence[nn.Module],
    ignored: Collection[nn.Parameter] = (),
    units: Collection[nn.Module] = (),
) -> list[OwnedParameter]:
    """The parameters that a unit of ``modules`` owns, each once, in registration order, without
    those that are ``ignored``. ``units``: modules that will be units.

    Raises:
        ValueError: another tensor has a part of an opaque parameter's memory.
    """
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[int, OwnedParameter] = {}
    for fqn, parameter, owner, name in parameters_outside_units(modules, units):
        if id(parameter) in ignored_ids:
            continue
        item = found.setdefault(id(parameter), OwnedParameter(fqn, parameter, weakref.ref(owner)))
        item.places.append((owner._parameters, name))
        item.is_embedding |= isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        if is_opaque(parameter):
            item.is_opaque = True
            where = f"parameter {item.fqn!r} of {kind_of(modules)}"
            item.aliases |= aliases_of(where, parameter, owner)
    return list(found.values())


def kind_of(modules: Sequence[nn.Module]) -> str:
    """The names of the modules' classes as the user wrote them."""
    return ", ".join(type(module).__name__.removeprefix("FSDP") for module in modules)
