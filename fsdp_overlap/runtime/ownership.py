"""Which parameters a unit owns: those of its module's subtree that no inner unit owns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_overlap.layout import ParamSpec


@dataclass
class OwnedParameter:
    """A parameter of a unit and every place in the unit's modules where it is registered."""

    fqn: str
    parameter: nn.Parameter
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """``(module._parameters, name)``; more than one for a tied parameter."""
    is_embedding: bool = False
    keeps_dtype: bool = False

    @property
    def spec(self) -> ParamSpec:
        parameter = self.parameter
        return ParamSpec(
            self.fqn,
            tuple(parameter.shape),
            parameter.dtype,
            parameter.requires_grad,
            self.is_embedding,
            self.keeps_dtype,
        )


def modules_outside_units(
    module: nn.Module, units: Collection[nn.Module] = ()
) -> Iterable[tuple[str, nn.Module]]:
    """``(name, module)`` of the subtree without inner units, parents first, each module once.

    ``units``: modules that will be units.
    """
    seen = set()
    pending = [("", module)]
    while pending:
        prefix, current = pending.pop()
        is_unit = "_fsdp_unit" in current.__dict__ or current in units
        if id(current) in seen or (current is not module and is_unit):
            continue
        seen.add(id(current))
        yield prefix, current
        children = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in current._modules.items()
            if child is not None
        ]
        pending.extend(reversed(children))


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers are not sharded; they go where the unit computes."""
    for _, owner in modules_outside_units(module):
        for buffer in owner._buffers.values():
            if buffer is not None and buffer.device.type not in (device.type, "meta"):
                buffer.data = buffer.to(device)


def owned_parameters(
    module: nn.Module,
    ignored: Collection[nn.Parameter] = (),
    units: Collection[nn.Module] = (),
) -> list[OwnedParameter]:
    """Each once, in registration order, without those that are ``ignored``."""
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[int, OwnedParameter] = {}
    for prefix, owner in modules_outside_units(module, units):
        for name, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in ignored_ids:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            item = found.setdefault(id(parameter), OwnedParameter(fqn, parameter))
            item.places.append((owner._parameters, name))
            item.is_embedding |= isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
    return list(found.values())
