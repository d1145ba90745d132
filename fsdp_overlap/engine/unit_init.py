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

from fsdp_overlap.engine import hooks
from fsdp_overlap.engine.checks import (
    check_extension,
    check_gradients,
    check_kept_parts,
    check_parameters,
    check_rows,
    check_synced,
    name_of,
    sync_module_states_from_first,
)
from fsdp_overlap.engine.context import FsdpContext
from fsdp_overlap.engine.extensions import ExtensionBucket
from fsdp_overlap.engine.mesh import MeshInfo, rollback_on_error
from fsdp_overlap.engine.options import QuantizedCommPolicy, compute_dtype
from fsdp_overlap.engine.param import (
    Owner,
    ParamInfo,
    UnownedParameters,
    check_concatenation,
    check_tensor_parallel,
    kind_of,
    mark_owner,
    mark_replaced,
    move_buffers,
    note_replacement,
    owned_parameters,
)
from fsdp_overlap.engine.param_group import Bucket
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.layout import PerTensor, Plan, RowsPlan
from fsdp_overlap.layout.layouts import layout_for
from fsdp_overlap.tensor.spmd_mesh import SPMDMesh, spmd_mesh_of, spmd_placement


def make_unit(
    modules: Sequence[nn.Module],
    ctx: FsdpContext,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    comm_policy: QuantizedCommPolicy | None,
    ignored: frozenset[nn.Parameter],
    spmd: SPMDMesh | None = None,
) -> Unit:
    """Shard what ``modules`` own and hooks their forwards. Their classes are left to the caller.

    The arguments mean what they mean to :func:`fully_shard`. Parameters are sharded over ``mesh``
    unless ``shard_placement_fn`` gives them another. ``spmd``: the mesh that they lie over, if it
    has more dimensions.

    Raises:
        TypeError, ValueError: a parameter cannot be sharded. Nothing was changed then.
    """
    owned = owned_parameters(modules, ignored)
    kind = kind_of(modules)
    check_parameters(modules, owned, ctx.device)
    check_gradients(kind, owned, mp_policy)
    if ctx.sync_module_states:
        check_synced(kind, owned)
    if comm_policy is not None:
        for item in owned:
            item.block = comm_policy.block_numel(item.spec)
            item.is_kept = comm_policy.keeps(item.spec)
    by_mesh = _by_mesh(kind, owned, ctx, mesh, spmd, shard_placement_fn)
    for item in owned:
        if item.is_extension:
            is_in_rows = isinstance(layout_for(ctx.layout, item.spec), PerTensor)
            check_extension(kind, item, is_in_rows, comm_policy)
    reshard_after_forward = _checked_reshard_after_forward(
        reshard_after_forward, {mesh_info.shard_size for mesh_info in by_mesh}
    )
    check_kept_parts(kind, owned, reshard_after_forward)
    for mesh_info, items in by_mesh.items():
        for item in items:
            if isinstance(item.parameter, DTensor):
                check_tensor_parallel(name_of(kind, item), item.parameter)
                if item.spmd is None:
                    check_concatenation(name_of(kind, item), item.parameter, mesh_info.mesh)
    _note_kept_dtypes(kind, owned, mp_policy)
    offload = _offload_on(ctx.device, offload_policy)
    with rollback_on_error(mesh_info.plans for mesh_info in by_mesh):
        planned = {
            mesh_info: _plan(modules, items, ctx, mesh_info) for mesh_info, items in by_mesh.items()
        }
        if comm_policy is not None:
            for plan in chain.from_iterable(planned.values()):
                comm_policy.check(plan)
    # Nothing was changed so far, and nothing is refused from here on.
    if ctx.sync_module_states:
        sync_module_states_from_first(modules, by_mesh, mesh)
    originals = [item.parameter for item in owned]
    buckets = [
        bucket
        for mesh_info, items in by_mesh.items()
        for bucket in _make_buckets(
            planned[mesh_info], items, mesh_info, mp_policy, offload, comm_policy
        )
    ]
    unit = Unit(modules, ctx, mesh, buckets, mp_policy, reshard_after_forward)
    unit.unowned = UnownedParameters(modules, ignored)
    unit.offload_policy = offload_policy
    unit.comm_policy = comm_policy
    _mark_owner(unit)
    for item, original in zip(owned, originals, strict=True):
        _mark(original, Owner(unit.module_kind, item.fqn))
    move_buffers(modules, ctx.device)
    for each in modules:
        each.__dict__["_fsdp_unit"] = unit
        hooks.install(each, unit)
    return unit


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


def _by_mesh(
    kind: str,
    owned: list[ParamInfo],
    ctx: FsdpContext,
    mesh: DeviceMesh,
    spmd: SPMDMesh | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
) -> dict[MeshInfo, list[ParamInfo]]:
    """Sort the unit's parameters by the mesh that they are sharded over."""
    found: dict[MeshInfo, list[ParamInfo]] = {ctx.mesh_info_of(mesh): []}
    for item in owned:
        wanted: Any = None if shard_placement_fn is None else shard_placement_fn(item.parameter)
        own_mesh, own_spmd = mesh, spmd
        if mesh_info := getattr(wanted, "mesh_info", None):
            own_mesh, wanted = mesh_info.mesh, wanted.placement
            own_spmd = spmd_mesh_of(mesh_info)
        mesh_info = ctx.mesh_info_of(own_mesh)
        if own_spmd is not None:
            item.spmd = spmd_placement(name_of(kind, item), item.parameter, own_spmd)
        if isinstance(wanted, Shard):
            item.cut_dim = _cut_dim(kind, item, wanted)
        is_in_rows = isinstance(layout_for(ctx.layout, item.spec), PerTensor)
        if is_in_rows:
            check_rows(kind, item, mesh_info)
        if type(wanted) not in (Shard, NoneType) or (item.cut_dim and not is_in_rows):
            raise ValueError(
                f"shard_placement_fn wants parameter {item.fqn!r} of {kind} placed as {wanted}: "
                "return None, Shard(0) or a ShardPlacementResult of these; other dimensions are "
                "cut under FsdpContext(layout=PerTensor()) alone"
            )
        found.setdefault(mesh_info, []).append(item)
    return {mesh_info: items for mesh_info, items in found.items() if items or len(found) == 1}


def _cut_dim(kind: str, item: ParamInfo, placement: Shard) -> int:
    """Return the dimension that ``placement`` cuts, counted from the first.

    Raises:
        ValueError: the parameter has no such dimension.
    """
    ndim = item.parameter.ndim
    if not -ndim <= placement.dim < max(1, ndim):
        raise ValueError(
            f"shard_placement_fn wants {name_of(kind, item)} placed as {placement}, and it has "
            f"{ndim} dimensions, {tuple(item.parameter.shape)}: choose one of these"
        )
    return placement.dim % max(1, ndim)


def _note_kept_dtypes(kind: str, owned: list[ParamInfo], mp_policy: MixedPrecisionPolicy) -> None:
    """Ask the policy which parameters keep their own dtype in compute, and notes them."""
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
    modules: Sequence[nn.Module], owned: list[ParamInfo], ctx: FsdpContext, mesh_info: MeshInfo
) -> list[Plan]:
    """Decide how the parameters that are sharded over ``mesh_info`` are laid out."""
    first = modules[0]
    if not mesh_info.plans.has(first) and any(other.plans.has(first) for other in ctx.mesh_infos):
        raise ValueError(
            f"{kind_of(modules)} was planned for another mesh than {mesh_info.mesh}: name its "
            "mesh in ctx.plan_layout(..., meshes={module: mesh})"
        )
    # A unit that was given no context has one of its own, so nothing tells which unit is first.
    return mesh_info.plans.take(modules, [item.spec for item in owned], not ctx.is_implicit)


def _make_buckets(
    plans: list[Plan],
    owned: list[ParamInfo],
    mesh_info: MeshInfo,
    mp_policy: MixedPrecisionPolicy,
    offload: CPUOffloadPolicy | None,
    comm_policy: QuantizedCommPolicy | None,
) -> list[Bucket]:
    by_fqn = {item.fqn: item for item in owned}
    is_meta = any(item.parameter.is_meta for item in owned)
    device = torch.device("meta") if is_meta else mesh_info.device
    buckets: list[Bucket] = []
    for plan in plans:
        items = [by_fqn[spec.fqn] for spec in plan.specs]
        dtype = compute_dtype(plan.specs[0], mp_policy)
        if isinstance(plan, RowsPlan) and plan.specs[0].is_extension:
            buckets.append(
                ExtensionBucket(plan, items, mesh_info, device, dtype, offload, mp_policy)
            )
        else:
            buckets.append(Bucket(plan, items, mesh_info, device, dtype, offload, comm_policy))
    return buckets


def _mark_owner(unit: Unit) -> None:
    """Note on each parameter which unit owns it. Errors of other units and optimizers name it."""
    for bucket in unit.buckets:
        for item, sharded in zip(bucket.owned, bucket.sharded_parameters, strict=True):
            owner = Owner(unit.module_kind, item.fqn)
            mark_owner(sharded, owner)
            _mark(item.parameter, owner)
    note_replacement()


def _mark(parameter: nn.Parameter, owner: Owner) -> None:
    mark_owner(parameter, owner)
    mark_replaced(parameter, by="fully_shard()")
