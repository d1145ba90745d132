"""Make a unit of modules: check, own, plan, allocate and install, for :func:`fully_shard`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_overlap.context import FsdpContext
from fsdp_overlap.engine import hooks
from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.mesh import MeshInfo, rollback_on_error
from fsdp_overlap.engine.options import CommPolicy, compute_dtype, reduce_dtype
from fsdp_overlap.engine.param import (
    Owner,
    ParamInfo,
    UnownedParameters,
    mark_owner,
    module_class_name,
    move_buffers,
    owned_parameters,
    owner_of,
    record_replacement,
)
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.storage import DEVICE, Storage
from fsdp_overlap.engine.unit import Tie, Unit
from fsdp_overlap.layout import ParamGroupPlan, Plan
from fsdp_overlap.layout.layouts import RowLayout
from fsdp_overlap.tensor.comm_dtypes import REDUCE_DTYPES

if TYPE_CHECKING:
    from fsdp_overlap.tensor.spmd_mesh import SPMDMesh

# Features are imported where a unit needs them: most need none.


def make_unit(
    modules: Sequence[nn.Module],
    ctx: FsdpContext,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    comm_policy: CommPolicy | None,
    ignored: frozenset[nn.Parameter],
    spmd: SPMDMesh | None = None,
    conditional: bool = False,
) -> Unit:
    """Shard what ``modules`` own and hook their forwards. Their classes are left to the caller.

    The arguments mean what they mean to :func:`fully_shard`. Parameters are sharded over ``mesh``
    unless ``shard_placement_fn`` gives them another. ``spmd``: the mesh that they lie over, if it
    has more dimensions.

    Raises:
        TypeError, ValueError: a parameter cannot be sharded. Nothing was changed then.
    """
    owned = owned_parameters(modules, ignored)
    ties: Sequence[Tie] = ()
    if any(owner_of(item.parameter) is not None for item in owned):
        from fsdp_overlap.features.tied_parameters import find_ties

        owned, ties = find_ties(modules, owned, ctx, mesh, mp_policy)
    asked = spmd, shard_placement_fn, comm_policy, mp_policy, reshard_after_forward
    if _are_plain(owned, ctx, *asked):
        by_mesh = {ctx.mesh_info_of(mesh): owned}
    else:
        from fsdp_overlap.features.parameter_checks import check_parameters

        by_mesh, reshard_after_forward = check_parameters(owned, modules, ctx, mesh, *asked)
    planned = _plan(modules, by_mesh, ctx, comm_policy)
    # Nothing was changed so far, and nothing is refused from here on.
    if ctx.sync_module_states:
        from fsdp_overlap.features.sync_module_states import sync_module_states_from_first

        sync_module_states_from_first(modules, by_mesh, mesh)
    originals = [item.parameter for item in owned]
    storage = _storage_on(ctx.device, offload_policy)
    param_groups = _allocate(by_mesh, planned, mp_policy, storage, comm_policy)
    _choose_gatherers(param_groups, reshard_after_forward)
    unit = Unit(
        modules,
        ctx,
        mesh,
        param_groups,
        mp_policy,
        offload_policy,
        comm_policy,
        reshard_after_forward,
        UnownedParameters(modules, ignored),
        _adopt,
        conditional,
    )
    unit.make_unit = make_unit
    _mark_owners(unit, owned, originals)
    if ties:
        from fsdp_overlap.features.tied_parameters import connect_ties

        connect_ties(unit, ties)
    _install(unit, modules, ctx)
    return unit


# ---- check ----


def _are_plain(
    owned: Sequence[ParamInfo],
    ctx: FsdpContext,
    spmd: SPMDMesh | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    comm_policy: CommPolicy | None,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int | None,
) -> bool:
    """Return whether there is nothing to check, because all parameters are plain and the user asked
    nothing that depends on them."""
    return (
        spmd is None
        and shard_placement_fn is None
        and comm_policy is None
        and getattr(mp_policy, "param_dtype_override_fn", None) is None  # of torch 2.15
        and not callable(ctx.layout)
        and not isinstance(ctx.layout, RowLayout)
        and (reshard_after_forward is None or isinstance(reshard_after_forward, bool))
        and all(_is_plain(item.parameter, ctx.device, mp_policy) for item in owned)
    )


def _is_plain(
    parameter: nn.Parameter, device: torch.device, mp_policy: MixedPrecisionPolicy
) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
        and parameter.device.type in (device.type, "cpu")
        and parameter.grad_dtype == parameter.dtype
        and reduce_dtype(parameter.dtype, mp_policy) in REDUCE_DTYPES
    )


# ---- plan ----


def _plan(
    modules: Sequence[nn.Module],
    by_mesh: dict[MeshInfo, list[ParamInfo]],
    ctx: FsdpContext,
    comm_policy: CommPolicy | None,
) -> dict[MeshInfo, list[Plan]]:
    """Decide how the parameters that are sharded over each mesh are laid out. If it raises, nothing
    was planned."""
    for mesh_info in by_mesh:
        has_none = not mesh_info.plans.has(modules[0])
        if has_none and any(other.plans.has(modules[0]) for other in ctx.mesh_infos):
            raise ValueError(
                f"{module_class_name(modules)} was planned for another mesh than {mesh_info.mesh}: "
                "name its mesh in ctx.plan_layout(..., meshes={module: mesh})"
            )
    can_fail_late = len(by_mesh) > 1 or comm_policy is not None
    plans = [mesh_info.plans for mesh_info in by_mesh]
    with rollback_on_error(plans) if can_fail_late else nullcontext():
        # A unit that was given no context has one of its own, so nothing tells which is first.
        planned = {
            mesh_info: mesh_info.plans.plan_unit(
                modules, [item.spec for item in items], not ctx.is_implicit
            )
            for mesh_info, items in by_mesh.items()
        }
        if comm_policy is not None:
            for plan in chain.from_iterable(planned.values()):
                comm_policy.check(plan)
    return planned


# ---- allocate ----


def _storage_on(device: torch.device, policy: OffloadPolicy) -> Storage:
    """Return where shards rest: on the host if ``policy`` asks for it, and there is a device to
    offload from."""
    if device.type == "cpu" or not isinstance(policy, CPUOffloadPolicy):
        return DEVICE
    from fsdp_overlap.features.offload import HostStorage

    return HostStorage(policy.pin_memory)


def _allocate(
    by_mesh: dict[MeshInfo, list[ParamInfo]],
    planned: dict[MeshInfo, list[Plan]],
    mp_policy: MixedPrecisionPolicy,
    storage: Storage,
    comm_policy: CommPolicy | None,
) -> list[ParamGroup]:
    """Make the param groups, with their full buffers, shards and sharded parameters."""
    param_groups: list[ParamGroup] = []
    for mesh_info, items in by_mesh.items():
        by_fqn = {item.fqn: item for item in items}
        is_meta = any(item.parameter.is_meta for item in items)
        device = torch.device("meta") if is_meta else mesh_info.device
        for plan in planned[mesh_info]:
            dtype = compute_dtype(plan.specs[0], mp_policy)
            own = [by_fqn[spec.fqn] for spec in plan.specs]
            make: Any = partial(ParamGroup, comm_policy=comm_policy)
            if not isinstance(plan, ParamGroupPlan):
                make = _rows_param_group(plan, mp_policy, comm_policy)
            param_group = make(plan, own, mesh_info, device, dtype, storage)
            param_group.make_gradients = _gradients_class(param_group)
            param_groups.append(param_group)
    return param_groups


def _rows_param_group(
    plan: Plan, mp_policy: MixedPrecisionPolicy, comm_policy: CommPolicy | None
) -> Callable[..., ParamGroup]:
    """Return what makes a param group of rows."""
    if plan.specs[0].is_extension:
        from fsdp_overlap.features.extensions.param_group import ExtensionParamGroup

        return partial(ExtensionParamGroup, mp_policy=mp_policy)
    from fsdp_overlap.features.rows.param_group import RowsParamGroup

    return partial(RowsParamGroup, comm_policy=comm_policy)


def _gradients_class(param_group: ParamGroup) -> type[ParamGroupGradients]:
    """Return the class of a param group's gradients. Of several features, one that does what each
    of theirs does."""
    classes: list[type[ParamGroupGradients]] = []
    if param_group.is_tensor_parallel:
        from fsdp_overlap.features.tensor_parallel_gradients import TensorParallelGradients

        classes.append(TensorParallelGradients)
    if param_group.is_extension:
        from fsdp_overlap.features.extensions.param_group import ExtensionGradients

        classes.append(ExtensionGradients)
    if param_group.mesh_info.num_replicas > 1:
        from fsdp_overlap.features.hsdp.gradients import ReplicatedGradients

        classes.append(ReplicatedGradients)
    if param_group.storage.is_on_host:
        from fsdp_overlap.features.offloaded_gradients import OffloadedGradients

        classes.append(OffloadedGradients)
    if len(classes) < 2:
        return classes[0] if classes else ParamGroupGradients
    return type("".join(each.__name__ for each in classes), tuple(classes), {})


def _choose_gatherers(
    param_groups: Sequence[ParamGroup], reshard_after_forward: bool | int | None
) -> None:
    """Give param groups what makes their gatherers, if these are no plain ones."""
    for param_group in param_groups:
        if param_group.mesh_info.shards_replicas:
            from fsdp_overlap.features import outer_shard

            param_group.make_gatherer = outer_shard.make_gatherer
        elif type(reshard_after_forward) is int:
            from fsdp_overlap.features import kept_parts

            param_group.make_gatherer = kept_parts.make_gatherer


# ---- install ----


def _mark_owners(unit: Unit, owned: Sequence[ParamInfo], originals: Sequence[nn.Parameter]) -> None:
    """Note on each parameter which unit owns it, and on those that were ``owned``, the
    ``originals``, that they were replaced. Errors of other units and optimizers say so."""
    original_of = dict(zip((item.fqn for item in owned), originals, strict=True))
    for param_group in unit.param_groups:
        for item, sharded in zip(param_group.owned, param_group.sharded_parameters, strict=True):
            owner = Owner(item.unit, item.fqn, find=weakref.ref(unit))
            mark_owner(sharded, owner)
            replaced = replace(owner, replaced_by="fully_shard()")
            mark_owner(item.parameter, replaced)
            mark_owner(original_of[item.fqn], replaced)
    record_replacement()


def _install(unit: Unit, modules: Sequence[nn.Module], ctx: FsdpContext) -> None:
    """Make forwards, backwards and loads of ``modules`` those of ``unit``."""
    move_buffers(modules, ctx.device)
    for module in modules:
        module.__dict__["_fsdp_unit"] = unit
        hooks.install(module, unit)
        module.register_load_state_dict_post_hook(partial(_after_load, unit))


def _adopt(unit: Unit) -> None:
    """Take over what was registered in place of the parameters of ``unit``."""
    from fsdp_overlap.features.adoption import adopt

    adopt(unit)


def _after_load(unit: Unit, module: nn.Module, keys: Any) -> None:
    """Take over the parameters that ``load_state_dict()``, which has loaded ``module`` and all in
    it, has assigned."""
    from fsdp_overlap.features.meta_init import load_assigned

    for each in (unit, *unit.owners):
        if each.has_replaced_parameters:
            load_assigned(each)
