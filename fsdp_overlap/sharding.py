"""How modules become a unit: what :func:`fully_shard` checks, plans and builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_overlap.layout import Plan, Rows
from fsdp_overlap.layout.layouts import layout_for
from fsdp_overlap.runtime import hooks, tiles
from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.context import FsdpContext
from fsdp_overlap.runtime.domain import Domain
from fsdp_overlap.runtime.full_mesh import FullMesh, full_mesh_of, lie_over
from fsdp_overlap.runtime.ownership import (
    OwnedParameter,
    Owner,
    kind_of,
    mark_owner,
    mark_replaced,
    move_buffers,
    owned_parameters,
    owner_of,
)
from fsdp_overlap.runtime.replanning import plan_again
from fsdp_overlap.runtime.stale_optimizers import note_replacement
from fsdp_overlap.runtime.starts import take_from_first
from fsdp_overlap.runtime.unit import Unit, compute_dtype, reduce_dtype
from fsdp_overlap.runtime.unit_plans import all_or_none
from fsdp_overlap.runtime.wire_policy import WirePolicy
from fsdp_overlap.tensor.carried import SUMMED
from fsdp_overlap.tensor.held_gradient import refused_grad_dtype
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor


def make_unit(
    modules: Sequence[nn.Module],
    ctx: FsdpContext,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    wire_policy: WirePolicy | None,
    ignored: frozenset[nn.Parameter],
    full: FullMesh | None = None,
) -> Unit:
    """Shards what ``modules`` own and hooks their forwards. Their classes are left to the caller.

    The arguments mean what they mean to :func:`fully_shard`. Parameters are sharded over ``mesh``
    unless ``shard_placement_fn`` gives them another. ``full``: the mesh that they lie over, if it
    has more dimensions.

    Raises:
        TypeError, ValueError: a parameter cannot be sharded. Nothing was changed then.
    """
    owned = owned_parameters(modules, ignored)
    kind = kind_of(modules)
    _check_parameters(modules, owned, ctx.device)
    _check_gradients(kind, owned, mp_policy)
    if ctx.sync_module_states:
        _check_synced(kind, owned)
    if wire_policy is not None:
        for item in owned:
            item.block = wire_policy.grain(item.spec)
            item.is_kept = wire_policy.keeps(item.spec)
    by_domain = _by_domain(kind, owned, ctx, mesh, full, shard_placement_fn)
    reshard_after_forward = _checked_reshard_after_forward(
        reshard_after_forward, {domain.shard_size for domain in by_domain}
    )
    for domain, items in by_domain.items():
        for item in items:
            if isinstance(item.parameter, DTensor):
                tiles.check(_name(kind, item), item.parameter)
                if item.on_full_mesh is None:
                    tiles.check_beside(_name(kind, item), item.parameter, domain.mesh)
    _note_kept_dtypes(kind, owned, mp_policy)
    offload = _offload_on(ctx.device, offload_policy)
    with all_or_none(domain.plans for domain in by_domain):
        planned = {
            domain: _plan(modules, items, ctx, domain) for domain, items in by_domain.items()
        }
        if wire_policy is not None:
            for plan in chain.from_iterable(planned.values()):
                wire_policy.check(plan)
    # Nothing was changed so far, and nothing is refused from here on.
    if ctx.sync_module_states:
        take_from_first(modules, by_domain, mesh)
    buckets = [
        bucket
        for domain, items in by_domain.items()
        for bucket in _make_buckets(planned[domain], items, domain, mp_policy, offload, wire_policy)
    ]
    unit = Unit(modules, ctx, mesh, buckets, mp_policy, reshard_after_forward)
    unit.ignored = ignored
    unit.offload_policy = offload_policy
    unit.wire_policy = wire_policy
    _mark_owner(unit)
    move_buffers(modules, ctx.device)
    for each in modules:
        each.__dict__["_fsdp_unit"] = unit
        hooks.install(each, unit)
    return unit


def plan_late(unit: Unit, ctx: FsdpContext) -> None:
    """Plans all units of ``ctx`` together if ``unit`` is around them. See :func:`plan_again`."""
    for other in plan_again(ctx, unit):
        _mark_owner(other)


def _check_parameters(
    modules: Sequence[nn.Module], owned: list[OwnedParameter], device: torch.device
) -> None:
    kind = kind_of(modules)
    for item in owned:
        parameter = item.parameter
        where = _name(kind, item)
        _check_no_owner(modules, item, where)
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"{where} is not initialized; run a forward before fully_shard()")
        if item.is_opaque:
            _check_opaque(where, parameter, device)
        elif type(parameter) not in (nn.Parameter, DTensor):
            raise TypeError(
                f"{where} is a {type(parameter).__name__}; only plain torch.nn.Parameter, frozen "
                "ones of a class derived from it, and DTensors of tensor parallelism are supported"
            )
        held = tiles.tile_in(parameter)
        if not held.is_contiguous():
            raise ValueError(
                f"{where} is not contiguous (shape {tuple(held.shape)}, strides "
                f"{held.stride()}); replace its data by .contiguous() first"
            )
        grad_dtype = parameter.grad_dtype
        if (refused := refused_grad_dtype(parameter.dtype, grad_dtype)) is not None:
            raise ValueError(
                f"{where} is {parameter.dtype} and its grad_dtype {grad_dtype}: {refused}"
            )
        if parameter.layout is not torch.strided:
            raise TypeError(f"{where} has layout {parameter.layout}; only strided is supported")
        if parameter.device.type not in (device.type, "cpu", "meta"):
            raise ValueError(
                f"{where} is on {parameter.device}, the mesh on {device.type}; move the module "
                "first"
            )
        if parameter.is_meta != owned[0].parameter.is_meta:
            raise ValueError(
                f"{where} is on {parameter.device}, {owned[0].fqn!r} on "
                f"{owned[0].parameter.device}: put all parameters of a unit on the meta device, or "
                "none"
            )


def _check_opaque(where: str, parameter: nn.Parameter, device: torch.device) -> None:
    """Checks that a parameter of a class of its own can be sharded with what its class knows.

    Raises:
        TypeError, ValueError: it cannot.
    """
    kind = type(parameter).__name__
    if parameter.requires_grad:
        raise TypeError(
            f"{where} is a {kind} that requires grad; parameters of a class of their own are "
            "supported if they are frozen, and are then never cast: call requires_grad_(False), or "
            "use a plain torch.nn.Parameter"
        )
    is_there = parameter.device.type == device.type
    if not is_there or (device.index is not None and parameter.device.index != device.index):
        raise ValueError(
            f"{where} is a {kind} on {parameter.device}, and the unit computes on {device}: move "
            "the module there first, because what the class holds beside the elements, such as "
            "scales, would stay behind"
        )


def _check_no_owner(modules: Sequence[nn.Module], item: OwnedParameter, where: str) -> None:
    owner = owner_of(item.parameter)
    if owner is None:
        return
    name = item.fqn if len(modules) == 1 else item.fqn.partition(".")[2]
    # A unit around these modules registered its sharded parameter in them. The parameter's name in
    # that unit is longer, and ends as this one does.
    if isinstance(item.parameter, ShardedTensor) and owner.fqn.endswith(f".{name}"):
        raise ValueError(
            f"{where} was sharded already, as {owner.fqn!r} of the unit {owner.unit} around it: "
            "call fully_shard on inner modules first, then on the module around them"
        )
    raise ValueError(
        f"{where} is also {owner.fqn!r} of the unit {owner.unit}: a parameter belongs to one unit; "
        "call fully_shard only on a module that holds both, or on a list of the two"
    )


def _check_gradients(
    kind: str, owned: list[OwnedParameter], mp_policy: MixedPrecisionPolicy
) -> None:
    for item in owned:
        dtype = reduce_dtype(item.spec.grad_dtype or item.parameter.dtype, mp_policy)
        if item.parameter.requires_grad and dtype not in SUMMED:
            raise ValueError(
                f"gradients of {_name(kind, item)} would be reduced in {dtype}, in which nothing "
                "can be summed: use MixedPrecisionPolicy(reduce_dtype=torch.float32), or freeze it "
                "by requires_grad_(False)"
            )


def _check_synced(kind: str, owned: list[OwnedParameter]) -> None:
    for item in owned:
        if item.parameter.is_meta:
            raise ValueError(
                f"{_name(kind, item)} is on the meta device, and sync_module_states=True takes it "
                "from the first rank: build the model with memory on every rank, or leave the "
                "argument out and load the weights after to_empty()"
            )
        if item.is_opaque:
            raise ValueError(
                f"{_name(kind, item)} is a {type(item.parameter).__name__}, and "
                "sync_module_states=True takes elements alone from the first rank, without what "
                "the class holds beside them: quantize the same weights on every rank"
            )


def _checked_reshard_after_forward(value: bool | int | None, sizes: set[int]) -> bool | int | None:
    """``value``, but ``False`` for 1 and ``True`` for all ranks, which mean the same. ``sizes`` has
    how many ranks the unit's parameters are sharded among."""
    if value is None or isinstance(value, bool):
        return value
    for size in sizes:
        if not isinstance(value, int) or value < 1 or size % value:
            raise ValueError(
                f"reshard_after_forward={value!r}: use True, False, None or a divisor of {size}, "
                "the number of ranks that parameters are sharded among"
            )
    if value == 1:
        return False
    return True if sizes == {value} else value


def _by_domain(
    kind: str,
    owned: list[OwnedParameter],
    ctx: FsdpContext,
    mesh: DeviceMesh,
    full: FullMesh | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
) -> dict[Domain, list[OwnedParameter]]:
    """Sorts the unit's parameters by the mesh that they are sharded over."""
    found: dict[Domain, list[OwnedParameter]] = {ctx.domain_of(mesh): []}
    for item in owned:
        wanted: Any = None if shard_placement_fn is None else shard_placement_fn(item.parameter)
        own_mesh, own_full = mesh, full
        if mesh_info := getattr(wanted, "mesh_info", None):
            own_mesh, wanted = mesh_info.mesh, wanted.placement
            own_full = full_mesh_of(mesh_info)
        domain = ctx.domain_of(own_mesh)
        if own_full is not None:
            item.on_full_mesh = lie_over(_name(kind, item), item.parameter, own_full)
        if isinstance(wanted, Shard):
            item.cut_dim = _cut_dim(kind, item, wanted)
        is_in_rows = isinstance(layout_for(ctx.layout, item.spec), Rows)
        if is_in_rows:
            _check_rows(kind, item, domain)
        if type(wanted) not in (Shard, NoneType) or (item.cut_dim and not is_in_rows):
            raise ValueError(
                f"shard_placement_fn wants parameter {item.fqn!r} of {kind} placed as {wanted}: "
                "return None, Shard(0) or a ShardPlacementResult of these; other dimensions are "
                "cut under FsdpContext(layout=Rows()) alone"
            )
        found.setdefault(domain, []).append(item)
    return {domain: items for domain, items in found.items() if items or len(found) == 1}


def _cut_dim(kind: str, item: OwnedParameter, placement: Shard) -> int:
    """The dimension that ``placement`` cuts, counted from the first.

    Raises:
        ValueError: the parameter has no such dimension.
    """
    ndim = item.parameter.ndim
    if not -ndim <= placement.dim < max(1, ndim):
        raise ValueError(
            f"shard_placement_fn wants {_name(kind, item)} placed as {placement}, and it has "
            f"{ndim} dimensions, {tuple(item.parameter.shape)}: choose one of these"
        )
    return placement.dim % max(1, ndim)


def _check_rows(kind: str, item: OwnedParameter, domain: Domain) -> None:
    """Checks that a parameter can be cut into rows.

    Raises:
        ValueError: it cannot.
    """
    if item.parameter.ndim == 0:
        raise ValueError(
            f"{_name(kind, item)} is a scalar, of which there are no rows: make it a tensor of one "
            "dimension, or give it the layout Flat()"
        )
    if domain.divides_copies:
        raise ValueError(
            f"{_name(kind, item)} is in Rows(), which copies cannot divide: leave out "
            "divide_copies=True, or choose another layout"
        )


def _note_kept_dtypes(
    kind: str, owned: list[OwnedParameter], mp_policy: MixedPrecisionPolicy
) -> None:
    """Asks the policy which parameters keep their own dtype in compute, and notes them."""
    override = getattr(mp_policy, "param_dtype_override_fn", None)  # of torch 2.15
    if override is None:
        return
    for item in owned:
        dtype, chosen = item.parameter.dtype, override(item.parameter)
        if chosen not in (None, mp_policy.param_dtype, dtype):
            raise ValueError(
                f"param_dtype_override_fn gave {chosen!r} for parameter {item.fqn!r} of "
                f"{kind}: return its own dtype, {dtype}, or None for that of the "
                f"policy, {mp_policy.param_dtype}"
            )
        item.keeps_dtype = chosen is dtype and mp_policy.param_dtype not in (None, dtype)


def _offload_on(device: torch.device, policy: OffloadPolicy) -> CPUOffloadPolicy | None:
    """``policy`` if it asks for offloading and there is a device to offload from."""
    is_asked = isinstance(policy, CPUOffloadPolicy) and device.type != "cpu"
    return policy if is_asked else None  # type: ignore[return-value]


def _plan(
    modules: Sequence[nn.Module], owned: list[OwnedParameter], ctx: FsdpContext, domain: Domain
) -> list[Plan]:
    """Decides how the parameters that are sharded over the mesh of ``domain`` lie."""
    first = modules[0]
    if not domain.plans.has(first) and any(other.plans.has(first) for other in ctx.domains):
        raise ValueError(
            f"{kind_of(modules)} was planned for another mesh than {domain.mesh}: name its "
            "mesh in ctx.plan(..., meshes={module: mesh})"
        )
    return domain.plans.take(modules, [item.spec for item in owned])


def _make_buckets(
    plans: list[Plan],
    owned: list[OwnedParameter],
    domain: Domain,
    mp_policy: MixedPrecisionPolicy,
    offload: CPUOffloadPolicy | None,
    wire_policy: WirePolicy | None,
) -> list[Bucket]:
    by_fqn = {item.fqn: item for item in owned}
    is_meta = any(item.parameter.is_meta for item in owned)
    return [
        Bucket(
            plan,
            [by_fqn[spec.fqn] for spec in plan.specs],
            domain,
            torch.device("meta") if is_meta else domain.device,
            compute_dtype(plan.specs[0], mp_policy),
            offload,
            wire_policy,
        )
        for plan in plans
    ]


def _mark_owner(unit: Unit) -> None:
    """Notes on each parameter which unit owns it. Errors of other units and optimizers name it."""
    for bucket in unit.buckets:
        for item, sharded in zip(bucket.owned, bucket.sharded_parameters, strict=True):
            owner = Owner(unit.module_kind, item.fqn)
            mark_owner(sharded, owner)
            mark_owner(item.parameter, owner)
            mark_replaced(item.parameter, by="fully_shard()")
    note_replacement()


def _name(kind: str, item: OwnedParameter) -> str:
    return f"parameter {item.fqn!r} of {kind}"
