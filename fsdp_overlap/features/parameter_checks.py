"""Checks parameters that are not plain, or of which the user asked something: a mesh, a dimension,
a dtype, few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_overlap.engine.context import ModelContext
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.options import CommPolicy, UnitOptions
from fsdp_overlap.engine.param import ParamInfo, concatenate_meshes, reduce_dtype, tp_local_tensor
from fsdp_overlap.features.full_mesh import spmd_mesh_of, spmd_placement
from fsdp_overlap.features.opaque_parameters import with_aliases
from fsdp_overlap.features.tensor_parallel_specs import spec_over_both
from fsdp_overlap.layout.layouts import layout_for
from fsdp_overlap.layout.plan import RowLayout
from fsdp_overlap.tensor.comm_dtypes import REDUCE_DTYPES
from fsdp_overlap.tensor.ragged_dtensor import refused_grad_dtype
from fsdp_overlap.tensor.subclasses import inner_tensors, is_subclass, missing_methods
from fsdp_overlap.tensor.tiles import tile_of
from fsdp_overlap.torch_internals import DTensorSpec


def check_parameters(
    owned: list[ParamInfo],
    modules: Sequence[nn.Module],
    ctx: ModelContext,
    options: UnitOptions,
) -> tuple[dict[MeshInfo, list[ParamInfo]], UnitOptions]:
    """Note what the user asked of parameters of ``modules``, which become a unit. Return them by
    the mesh that they are sharded over, and ``options`` as the unit needs them.

    Raises:
        TypeError, ValueError: a parameter cannot be sharded.
    """
    mp_policy, comm_policy = options.mp_policy, options.comm_policy
    owned = with_aliases(owned, modules)
    for item in owned:
        _check_parameter(item, owned[0], ctx)
        _check_gradient(item, mp_policy)
        if comm_policy is not None:
            block, is_kept = comm_policy.block_numel(item.spec), comm_policy.keeps(item.spec)
            item.spec = replace(item.spec, block=block, is_kept=is_kept)
    by_mesh = _by_mesh(owned, ctx, options)
    reshard_after_forward = _checked_reshard_after_forward(
        options.reshard_after_forward, {mesh_info.shard_size for mesh_info in by_mesh}
    )
    for mesh_info, items in by_mesh.items():
        for item in items:
            if item.spec.is_extension:
                _check_extension(item, ctx, reshard_after_forward, comm_policy)
            if isinstance(item.parameter, DTensor) or item.placement is not None:
                item.make_spec = spec_over_both
            if isinstance(item.parameter, DTensor):
                _check_tensor_parallel(item.where, item.parameter)
                if item.placement is None:
                    _check_concatenation(item.where, item.parameter, mesh_info.mesh)
    _record_kept_dtypes(owned, mp_policy)
    return by_mesh, replace(options, reshard_after_forward=reshard_after_forward)


# ---- Each parameter ----


def _check_parameter(item: ParamInfo, first: ParamInfo, ctx: ModelContext) -> None:
    """Raise TypeError or ValueError if a parameter cannot be sharded in ``ctx``, in one unit with
    ``first``."""
    where, parameter, device = item.where, item.parameter, ctx.device
    if isinstance(parameter, nn.UninitializedParameter):
        raise ValueError(f"{where} is not initialized; run a forward before fully_shard()")
    held = tp_local_tensor(parameter)
    if item.never_cast:
        _check_opaque(item, ctx)
    else:
        _check_class(where, held)
    if not held.is_contiguous():
        raise ValueError(
            f"{where} is not contiguous (shape {tuple(held.shape)}, strides {held.stride()}); "
            "replace its data by .contiguous() first"
        )
    grad_dtype = parameter.grad_dtype
    if (refused := refused_grad_dtype(parameter.dtype, grad_dtype)) is not None:
        raise ValueError(f"{where} is {parameter.dtype} and its grad_dtype {grad_dtype}: {refused}")
    if parameter.layout is not torch.strided:
        raise TypeError(f"{where} has layout {parameter.layout}; only strided is supported")
    if parameter.device.type not in (device.type, "cpu", "meta"):
        raise ValueError(
            f"{where} is on {parameter.device}, the mesh on {device.type}; move the module first"
        )
    if parameter.is_meta != first.parameter.is_meta:
        raise ValueError(
            f"{where} is on {parameter.device}, {first.fqn!r} on {first.parameter.device}: put all "
            "parameters of a unit on the meta device, or none"
        )
    if ctx.sync_module_states and parameter.is_meta:
        raise ValueError(
            f"{where} is on the meta device, and sync_module_states=True takes it from the first "
            "rank: build the model with memory on every rank, or leave the argument out and load "
            "the weights after to_empty()"
        )


def _check_opaque(item: ParamInfo, ctx: ModelContext) -> None:
    """Raise TypeError or ValueError if a parameter of a class of its own cannot be sharded with
    what its class knows."""
    where, parameter, device = item.where, item.parameter, ctx.device
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
    if ctx.sync_module_states:
        raise ValueError(
            f"{where} is a {kind}, and sync_module_states=True takes elements alone from the first "
            "rank, without what the class holds beside them: quantize the same weights on every "
            "rank"
        )


def _check_class(where: str, held: torch.Tensor) -> None:
    """Raise TypeError if the parameter whose tensor is ``held`` cannot be gathered. A tensor that
    consists of others may get both methods of an extension later, as in FSDP2."""
    missing = missing_methods(held)
    may_come_later = len(missing) == 2 and bool(inner_tensors(held))
    if is_subclass(held) and missing and not may_come_later:
        raise TypeError(
            f"{where} is a {type(held).__name__} without {' and '.join(missing)}; only plain "
            "torch.nn.Parameter, frozen ones of a class derived from it, DTensors of tensor "
            "parallelism and tensors with both methods of FSDP2's extensions are supported"
        )


def _check_gradient(item: ParamInfo, mp_policy: MixedPrecisionPolicy) -> None:
    dtype = reduce_dtype(item.spec.grad_dtype or item.parameter.dtype, mp_policy)
    if item.parameter.requires_grad and dtype not in REDUCE_DTYPES:
        raise ValueError(
            f"gradients of {item.where} would be reduced in {dtype}, in which nothing can be "
            "summed: use MixedPrecisionPolicy(reduce_dtype=torch.float32), or freeze it by "
            "requires_grad_(False)"
        )


def _check_extension(
    item: ParamInfo,
    ctx: ModelContext,
    reshard_after_forward: bool | int | None,
    comm_policy: CommPolicy | None,
) -> None:
    """Raise ValueError if a parameter that says itself how it is gathered cannot be."""
    what = f"{item.where} is a {type(tp_local_tensor(item.parameter)).__name__}, "
    if not _is_in_rows(item, ctx):
        raise ValueError(
            f"{what}which is cut between rows alone: use FsdpContext(layout=PerTensor()), or a "
            "function that returns PerTensor() for it"
        )
    if item.spec.cut_dim:
        raise ValueError(
            f"{what}which is cut along its first dimension alone, and shard_placement_fn wants "
            f"Shard({item.spec.cut_dim}): return None or Shard(0)"
        )
    if comm_policy is not None:
        raise ValueError(
            f"{what}which says itself what travels: leave out comm_policy, or make a unit of its "
            "own of the module that has it"
        )
    if type(reshard_after_forward) is int:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward}: {what}of which no part can be kept: "
            "use True, False or None"
        )


def _check_rows(item: ParamInfo, mesh_info: MeshInfo) -> None:
    """Raise ValueError if a parameter cannot be cut into rows."""
    if item.parameter.ndim == 0:
        raise ValueError(
            f"{item.where} is a scalar, of which there are no rows: make it a tensor of one "
            "dimension, or give it the layout Flat()"
        )
    if mesh_info.shards_replicas:
        raise ValueError(
            f"{item.where} is in PerTensor(), which replicas cannot divide: leave out "
            "shard_optimizer_over_replicas=True, or choose another layout"
        )


def _is_in_rows(item: ParamInfo, ctx: ModelContext) -> bool:
    return isinstance(layout_for(ctx.layout, item.spec), RowLayout)


def _checked_reshard_after_forward(value: bool | int | None, sizes: set[int]) -> bool | int | None:
    """Return ``value``, but ``False`` for 1 and ``True`` for all ranks, which mean the same.
    ``sizes`` has how many ranks the unit's parameters are sharded among."""
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
    owned: list[ParamInfo],
    ctx: ModelContext,
    options: UnitOptions,
) -> dict[MeshInfo, list[ParamInfo]]:
    """Sort the unit's parameters by the mesh that they are sharded over."""
    mesh, placement_fn = options.mesh, options.shard_placement_fn
    by_mesh: dict[MeshInfo, list[ParamInfo]] = {ctx.mesh_info_of(mesh): []}
    for item in owned:
        wanted: Any = None if placement_fn is None else placement_fn(item.parameter)
        own_mesh, own_spmd = mesh, options.full_mesh
        if mesh_info := getattr(wanted, "mesh_info", None):
            own_mesh, wanted = mesh_info.mesh, wanted.placement
            own_spmd = spmd_mesh_of(mesh_info)
        mesh_info = ctx.mesh_info_of(own_mesh)
        if own_spmd is not None:
            item.placement = spmd_placement(item.where, item.parameter, own_spmd)
        if isinstance(wanted, Shard):
            item.spec = replace(item.spec, cut_dim=_cut_dim(item, wanted))
        is_in_rows = _is_in_rows(item, ctx)
        if is_in_rows:
            _check_rows(item, mesh_info)
        if type(wanted) not in (Shard, NoneType) or (item.spec.cut_dim and not is_in_rows):
            raise ValueError(
                f"shard_placement_fn wants {item.where} placed as {wanted}: return None, Shard(0) "
                "or a ShardPlacementResult of these; other dimensions are cut under "
                "FsdpContext(layout=PerTensor()) alone"
            )
        by_mesh.setdefault(mesh_info, []).append(item)
    return {mesh_info: items for mesh_info, items in by_mesh.items() if items or len(by_mesh) == 1}


def _cut_dim(item: ParamInfo, placement: Shard) -> int:
    """Return the dimension that ``placement`` cuts, counted from the first. Raise ValueError if the
    parameter has no such dimension."""
    ndim = item.parameter.ndim
    if not -ndim <= placement.dim < max(1, ndim):
        raise ValueError(
            f"shard_placement_fn wants {item.where} placed as {placement}, and it has {ndim} "
            f"dimensions, {tuple(item.parameter.shape)}: choose one of these"
        )
    return placement.dim % max(1, ndim)


def _record_kept_dtypes(owned: list[ParamInfo], mp_policy: MixedPrecisionPolicy) -> None:
    """Ask the policy which parameters keep their own dtype in compute, and note them."""
    override = getattr(mp_policy, "param_dtype_override_fn", None)  # of torch 2.15
    if override is None:
        return
    for item in owned:
        dtype, chosen = item.parameter.dtype, override(item.parameter)
        if chosen not in (None, mp_policy.param_dtype, dtype):
            raise ValueError(
                f"param_dtype_override_fn gave {chosen!r} for {item.where}: return its own dtype, "
                f"{dtype}, or None for that of the policy, {mp_policy.param_dtype}"
            )
        keeps_dtype = chosen is dtype and mp_policy.param_dtype not in (None, dtype)
        item.spec = replace(item.spec, keeps_dtype=keeps_dtype)


# ---- DTensors of tensor parallelism ----


def _check_tensor_parallel(where: str, parameter: DTensor) -> None:
    """Raise TypeError if ``parameter`` is placed otherwise than by ``Shard`` and ``Replicate``, or
    cut in another order than that of its mesh's dimensions, and ValueError if not as
    ``distribute_tensor`` cuts. ``where`` names it."""
    for placement in parameter.placements:
        if type(placement) not in (Shard, Replicate):
            raise TypeError(
                f"{where} is a DTensor placed as {parameter.placements}; only Shard(dim) and "
                "Replicate() are supported"
            )
    spec = parameter._spec
    if spec.shard_order != DTensorSpec.compute_default_shard_order(spec.placements):
        raise TypeError(
            f"{where} is a DTensor cut in the order {spec.shard_order}; only that of the "
            "dimensions of its mesh is supported"
        )
    held, expected = tuple(parameter._local_tensor.shape), tile_of(spec).shape
    if held != expected:
        raise ValueError(
            f"{where} is a DTensor of shape {tuple(parameter.shape)} placed as "
            f"{parameter.placements}, of which this rank holds {held} and not {expected}: cut it "
            "by torch.distributed.tensor.distribute_tensor"
        )


def _check_concatenation(where: str, parameter: DTensor, mesh: DeviceMesh) -> None:
    """Raise ValueError if ``parameter``, which lies over the ranks of tensor parallelism, cannot be
    sharded over ``mesh`` as well, because the two meshes do not go together."""
    try:
        concatenate_meshes(mesh, parameter.device_mesh)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{where} is a DTensor over {parameter.device_mesh}, which does not go together with "
            f"{mesh}, over which it is to be sharded: make one mesh, as init_device_mesh("
            f'{mesh.device_type!r}, (2, 4), mesh_dim_names=("dp", "tp")), and use mesh["tp"] for '
            'tensor parallelism and mesh["dp"] here. For DTensors over all of it, use '
            'dp_mesh_dims=DataParallelMeshDims(shard="dp")'
        ) from error
