"""Gradient clipping with one collective for the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.optim.runs import (
    classes_of,
    find_runs,
    flatten,
    gradients_of,
    locals_of,
    numels_of,
    with_gradient,
)
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor
from fsdp_overlap.tensor.sums_and_norms import (
    by_cut,
    combine_norms,
    local_norms,
    norms,
)
from fsdp_overlap.torch_internals import DTensorSpec

_dtype = attrgetter("dtype")


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients down so that their norm, taken as one vector, is at most ``max_norm``.

    It does what ``torch.nn.utils.clip_grad_norm_`` does, with one all-reduce of one number for each
    dimension of each mesh that gradients are cut along, and one kernel for each run of neighbours
    in memory. Must be called on every rank. Gradients that are not sharded must be the same on
    every rank.

    Returns:
        The norm before clipping, 0-dimensional. It is the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is true.
        ValueError: a gradient is a DTensor that is yet to be summed.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = gradients_of(with_gradient(list(parameters)))
    if not gradients:
        return torch.tensor(0.0)
    order = float(norm_type)
    flats: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    dtypes: list[torch.dtype] = []
    for spec, members in _by_cut(gradients):
        locals_ = locals_of(members)
        flat = _flat(members, locals_)
        flats += flat
        # Ranks must agree on the dtype, so members that this rank holds nothing of count too.
        wide = reduce(torch.promote_types, set(map(_dtype, locals_))).to_real()
        dtypes.append(wide)
        if order == 0:  # as in torch, the number of tensors that are not all zero
            counts = norms(members, order) if spec is not None else local_norms(members, order)
            parts.append(torch.linalg.vector_norm(torch.stack(list(counts)), order))
            continue
        each = local_norms(flat or locals_[:1], order, wide)
        part = torch.linalg.vector_norm(each, order)
        parts.append(combine_norms(part, order, spec) if spec is not None else part)
    device = gradients[0].device
    together = torch.stack([part.to(device) for part in parts])
    total = together.sum() if order == 0 else torch.linalg.vector_norm(together, order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {total.item()}, not finite, so it cannot "
            "be clipped; pass error_if_nonfinite=False to scale by it anyway"
        )
    # A scale of 1 is multiplied by too, because comparing would make a GPU's host wait.
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for on_device in {flat.device for flat in flats}:
        torch._foreach_mul_(
            [flat for flat in flats if flat.device == on_device], scale.to(on_device)
        )
    return total.to(reduce(torch.promote_types, dtypes))


def _by_cut(gradients: list[Any]) -> list[tuple[DTensorSpec | None, list[Any]]]:
    """Groups gradients that are cut among the same ranks. ``None`` stands for plain gradients."""
    sharded, plain = gradients, []
    if not all(issubclass(each, DTensor) for each in classes_of(gradients)):
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    found: list[tuple[DTensorSpec | None, list[Any]]] = [
        (spec, [sharded[index] for index in members]) for spec, members in by_cut(sharded)
    ]
    return [*found, (None, plain)] if plain else found


def _flat(gradients: list[torch.Tensor], locals_: list[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank holds of the gradients. Neighbours in memory are one flat tensor."""
    held = list(compress(locals_, numels_of(locals_)))
    marks: list[object] = list(map(_dtype, held))
    if not classes_of(gradients) <= {ShardedTensor}:  # whose ranges are flat
        is_sharded = isinstance(gradients[0], DTensor)
        marks = [
            local.dtype if is_sharded and local.is_contiguous() else object() for local in held
        ]
    return flatten(held, find_runs([held], marks))
