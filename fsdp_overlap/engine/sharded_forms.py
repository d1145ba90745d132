"""The sharded parameters of a bucket, in the form that its plan gives them: ranges, or rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.engine.domain import Domain
from fsdp_overlap.engine.opaque import share_attributes
from fsdp_overlap.engine.ownership import OwnedParameter
from fsdp_overlap.layout import BucketPlan, Plan, RowsPlan
from fsdp_overlap.tensor.extension import is_subclass, missing_methods
from fsdp_overlap.tensor.ragged_dtensor import (
    RaggedDTensor,
    ShardEdits,
    give_grads,
    users_attributes,
)
from fsdp_overlap.tensor.row_tensor import (
    RowTensor,
    Sharded,
    call_gradient_hooks,
    call_hooks,
    give_row_grads,
    read_numbers_of_wholes,
)
from fsdp_overlap.torch_internals import StridedShard


def sharded_parameters(
    forms: Sequence[Sharded],
    like: Sequence[torch.Tensor],
    plan: Plan,
    owned: Sequence[OwnedParameter],
) -> list[Sharded]:
    """The sharded parameters of a bucket, of which ``forms`` are the tensors. They take their
    attributes from ``like``."""
    found: list[Sharded] = []
    for form, model, spec, item in zip(forms, like, plan.specs, owned, strict=True):
        parameter = nn.Parameter(form, requires_grad=model.requires_grad)
        vars(parameter).update(users_attributes(model, form._local_tensor))
        if item.is_opaque:
            share_attributes(parameter, item.parameter, item.aliases)
        # isinstance() takes it for a Parameter, and its type is that of the form.
        sharded = cast(Sharded, parameter)
        sharded.keep_gradients_in(getattr(model, "_given_grad_dtype", spec.grad_dtype))
        found.append(sharded)
    return found


def sharded_forms(
    plan: Plan,
    shard: torch.Tensor,
    owned: Sequence[OwnedParameter],
    domain: Domain,
    edits: ShardEdits,
) -> list[Sharded]:
    """What ``shard``, this rank's of a bucket, has of each parameter."""
    dtype = plan.specs[0].dtype
    if isinstance(plan, RowsPlan):
        rows = [
            RowTensor.wrap(chunk, domain.spec(item, row_shard(item, spec.cut_dim), dtype), edits)
            for chunk, item, spec in zip(
                _chunks(plan, shard, domain.plan_rank), owned, plan.specs, strict=True
            )
        ]
        for each in rows:
            read_numbers_of_wholes(each.device_mesh)
        return [*rows]
    return [
        RaggedDTensor.wrap(
            local, domain.spec(item, domain.range_shard(plan, spec.fqn), dtype), edits
        )
        for local, item, spec in zip(
            _ranges(plan, shard, domain.plan_rank), owned, plan.specs, strict=True
        )
    ]


def _ranges(plan: BucketPlan, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
    return [shard[first : first + size] for first, size in places_in_shard(plan, rank)]


def _range(plan: BucketPlan, fqn: str, rank: int) -> tuple[int, int]:
    held = ((start, stop) for owner, start, stop in plan.ranges(fqn) if owner == rank)
    return next(held, (0, 0))


def _chunks(plan: RowsPlan, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
    return [
        shard[first : first + size].view(plan.chunk_shape(spec, rank))
        for spec, (first, size) in zip(plan.specs, places_in_shard(plan, rank), strict=True)
    ]


def row_shard(item: OwnedParameter, dim: int) -> Placement:
    """The placement of chunks of a parameter. Where tensor parallelism has cut the same dimension,
    the chunks of all ranks do not follow each other in the order of the mesh."""
    factor, parameter = 1, item.parameter
    if item.on_full_mesh is not None:
        factor = item.on_full_mesh.cuts_after(dim)
    elif isinstance(parameter, DTensor):
        for other, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard) and placement.dim == dim:
                factor *= parameter.device_mesh.size(other)
    return Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)


def own_parts(plan: Plan, wholes: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """What ``rank`` has of each of ``wholes``, in the shape that its sharded form has."""
    if isinstance(plan, BucketPlan):
        ranges = [_range(plan, spec.fqn, rank) for spec in plan.specs]
        return [
            whole.reshape(-1)[start:stop]
            for whole, (start, stop) in zip(wholes, ranges, strict=True)
        ]
    held = [plan.held(spec, rank) for spec in plan.specs]
    return [
        whole.narrow(spec.cut_dim, first, last - first)
        for whole, spec, (first, last) in zip(wholes, plan.specs, held, strict=True)
    ]


def places_in_shard(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """Where in a shard of ``rank`` each parameter begins, and how many elements it has there."""
    if isinstance(plan, RowsPlan):
        sizes = [prod(plan.chunk_shape(spec, rank)) for spec in plan.specs]
        return list(zip(plan.starts, sizes, strict=True))
    found = []
    for spec, offset in zip(plan.specs, plan.offsets, strict=True):
        start, stop = _range(plan, spec.fqn, rank)
        found.append(
            (offset + start - plan.shard_starts[rank] if stop > start else 0, stop - start)
        )
    return found


def refuse_methods(label: str, parameters: Sequence[Sharded]) -> None:
    """Refuses plain parameters that were given the methods of a tensor extension, which would not
    be called. ``label`` names their unit.

    Raises:
        TypeError: there is one.
    """
    for parameter in parameters:
        local = parameter._local_tensor
        if not is_subclass(local) and len(missing_methods(local)) < 2:
            raise TypeError(
                f"a parameter of unit {label!r}, of shape {tuple(parameter.shape)}, was given the "
                "methods of a tensor extension after fully_shard(), and is a plain tensor: make it "
                "one of a class that has them, before fully_shard()"
            )


def give_gradients(parameters: Sequence[Any], locals_: list[torch.Tensor]) -> None:
    """Gives sharded parameters of a bucket the gradients of what this rank has of them, which are
    flat. Before and after it calls the hooks that users registered for that."""
    edits = parameters[0].edits
    if edits.has_hooks:
        call_gradient_hooks(parameters, locals_)
    if isinstance(parameters[0], RowTensor):
        give_row_grads(parameters, locals_)
    else:
        give_grads(parameters, locals_)
    if edits.has_hooks:
        call_hooks(parameters)
