"""Gradient clipping with one collective for the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.optim.contiguous import find_runs, flatten, gradients_of, local_of, locals_of
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from fsdp_overlap.tensor.sums_and_norms import combine_norms, group_by_mesh_dims, local_norms, norms
from fsdp_overlap.torch_internals import DTensorSpec

_dtype = attrgetter("dtype")


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients down so that their norm, taken as one vector, is at most ``max_norm``.

    It does what ``torch.nn.utils.clip_grad_norm_`` does, with one all-reduce of one number for each
    dimension of each mesh along which gradients are sharded, and one kernel for each run that is
    contiguous in memory. Must be called on every rank. Gradients that are not sharded must be the
    same on every rank.

    Returns:
        The norm before clipping, 0-dimensional. It is the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is true.
        ValueError: a gradient is a DTensor that is yet to be summed.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    order = float(norm_type)
    gradients = [gradient for gradient in gradients_of(parameters) if gradient is not None]
    groups = _grad_groups(gradients)
    if not groups:
        return torch.tensor(0.0)
    total = _total_norm(groups, order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {total.item()}, not finite, so it cannot "
            "be clipped; pass error_if_nonfinite=False to scale by it anyway"
        )
    _scale([flat for group in groups for flat in group.flats], clip_coefficient(total, max_norm))
    return total.to(reduce(torch.promote_types, {group.dtype for group in groups}))


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of this ``norm`` are scaled by, at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _scale(flats: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    # By 1 too, because a comparison would make the host wait for a GPU.
    for on_device in {flat.device for flat in flats}:
        torch._foreach_mul_(
            [flat for flat in flats if flat.device == on_device], scale.to(on_device)
        )


# ---- For steps that overlap with backward ----


def total_norm(gradients: Sequence[Any], used: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the norm of ``gradients``, taken as one vector. Some are parameters whose gradients
    were used, and have the :func:`local_norm` of these in ``used``, by id. Collective over the
    meshes."""
    groups = _grad_groups(list(gradients), used)
    return _total_norm(groups, 2.0) if groups else torch.tensor(0.0)


def local_norm(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of plain tensors, taken as one vector."""
    return torch.linalg.vector_norm(local_norms(flats, 2.0))


def flat_gradients(gradients: list[Any]) -> list[torch.Tensor]:
    """Return what this rank holds of gradients, one flat tensor for each run."""
    return _flat(gradients, locals_of(gradients))


def scale_gradients(gradients: list[Any], scale: torch.Tensor) -> None:
    """Multiply what this rank holds of gradients by ``scale``."""
    _scale(flat_gradients(gradients), scale)


class GradGroup(NamedTuple):
    """Gradients that are sharded over the same ranks, as in ``spec`` (``None``: plain gradients).
    ``flats`` is what this rank holds of all ``members``, one tensor for each run. ``dtype`` is the
    widest of all members, held here or not, because ranks must agree on it. ``norms`` are those of
    members that are parameters, whose gradients were used."""

    spec: DTensorSpec | None
    members: Sequence[Any]
    flats: list[torch.Tensor]
    dtype: torch.dtype
    norms: Sequence[torch.Tensor] = ()


def _grad_groups(
    gradients: list[Any], used: Mapping[int, torch.Tensor] = MappingProxyType({})
) -> list[GradGroup]:
    """Return ``gradients`` in groups. Of some, which are parameters, ``used`` has the norm of the
    gradient, by id."""
    sharded, plain = gradients, []
    if not all(issubclass(cls, DTensor) for cls in set(map(type, gradients))):
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    members_of: list[tuple[DTensorSpec | None, list[Any]]] = [
        (spec, [sharded[index] for index in indices])
        for spec, indices in group_by_mesh_dims(sharded)
    ]
    groups = []
    for spec, members in [*members_of, (None, plain)] if plain else members_of:
        locals_ = locals_of(members)
        widest = reduce(torch.promote_types, set(map(_dtype, locals_))).to_real()
        there, norms_ = members, []
        if used:
            norms_ = [used[id(member)] for member in members if id(member) in used]
            there = [member for member in members if id(member) not in used]
            locals_ = locals_of(there)
        flats = _flat(there, locals_) if there else []
        groups.append(GradGroup(spec, members, flats, widest, norms_))
    return groups


def _total_norm(groups: list[GradGroup], order: float) -> torch.Tensor:
    """Return the norm of all gradients, taken as one vector."""
    parts = [_norm(group, order) for group in groups]
    if len(parts) == 1:
        return parts[0]
    device = local_of(groups[0].members[0]).device
    together = torch.stack([part.to(device) for part in parts])
    return together.sum() if order == 0 else torch.linalg.vector_norm(together, order)


def _norm(group: GradGroup, order: float) -> torch.Tensor:
    """Return the norm of the gradients of ``group`` on all ranks."""
    if order == 0:  # as in torch, the number of tensors that are not all zero
        counts = norms if group.spec is not None else local_norms
        return torch.linalg.vector_norm(torch.stack(list(counts(group.members, order))), order)
    by_span = torch.stack(list(group.norms)) if group.norms else None
    if by_span is None or group.flats:
        flats = group.flats or [local_of(group.members[0])]
        there = local_norms(flats, order, group.dtype)
        # Used ones are on the device, for which the host need not wait.
        by_span = there if by_span is None else torch.cat([there.to(by_span), by_span])
    part = torch.linalg.vector_norm(by_span, order)
    return part if group.spec is None else combine_norms(part, order, group.spec)


def _flat(gradients: list[torch.Tensor], locals_: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of the gradients, one flat tensor for each run."""
    held = list(filter(torch.Tensor.numel, locals_))
    keys: list[object] | None = None
    if not set(map(type, gradients)) <= {RaggedDTensor}:  # whose ranges are flat
        is_sharded = isinstance(gradients[0], DTensor)
        keys = [local.dtype if is_sharded and local.is_contiguous() else object() for local in held]
    elif len(set(map(_dtype, held))) > 1:
        keys = list(map(_dtype, held))
    return flatten(held, find_runs([held], keys))
