"""The entry point: :func:`fully_shard` and what it gives a module."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_overlap.fsdp_module import FsdpModule
from fsdp_overlap.layout import ParamSpec
from fsdp_overlap.runtime import hooks
from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.context import FsdpContext, unit_of
from fsdp_overlap.runtime.domain import Domain
from fsdp_overlap.runtime.ownership import (
    OwnedParameter,
    move_buffers,
    owned_parameters,
)
from fsdp_overlap.runtime.unit import Unit

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def fully_shard(
    module: ModuleT,
    ctx: FsdpContext | None = None,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008, frozen
    ignored_params: set[nn.Parameter] | None = None,
) -> ModuleT:
    """Makes ``module`` a unit: shards its parameters, gradients and optimizer states over a mesh.

    Call it on inner modules first, then on the module around them, with one context. The unit owns
    the parameters of ``module``'s subtree that no inner unit owns; they become ``ShardedTensor``
    parameters, in place. Every rank must hold the same values before, and call it in the same
    order. A model built on the meta device gets memory by ``model.to_empty(device=...)``
    afterwards, that of its shards alone.

    Args:
        module: at rest its parameters are sharded; its own forward sees them whole.
        ctx: what the units of one model share. Without one, the units of a tree share one from the
            first forward of its root on.
        mesh: what the unit is sharded over, of one dimension or ``(replicate, shard)``, by default
            the mesh of ``ctx``, and all ranks if neither is given. A unit within others may have a
            mesh of its own, as experts have. Its gradients are divided by the size of that:
            :meth:`FsdpModule.set_gradient_divide_factor` says otherwise.
        reshard_after_forward: whether the full parameters are freed between forward and backward.
            ``None``: for all units but the root, which backward needs first.
        mp_policy: dtypes of compute, of the reduction, of inputs and outputs. Sharded parameters
            and their gradients keep the dtype they have. Without a ``reduce_dtype`` gradients are
            reduced, and accumulated where they are not synchronized, in that dtype, as in torch
            2.15; older releases of FSDP2 reduce them in the dtype of compute.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer states in the
            host's memory. Shards are copied to the device when they are gathered, gradients back
            once they are reduced; backward ends when they have arrived. On a CPU it changes
            nothing.
        ignored_params: left as they are.

    Returns:
        ``module``, whose class now also is :class:`FsdpModule`.

    Raises:
        TypeError, ValueError: the module or a parameter cannot be sharded. Nothing was changed
        then.
    """
    _check_module(module)
    _check_arguments(ctx, reshard_after_forward)
    ignored = frozenset(ignored_params or ())
    owned = owned_parameters(module, ignored)
    if ctx is None:
        ctx = FsdpContext(mesh)
        ctx.is_implicit = True
    _check_parameters(module, owned, ctx.device)
    _note_kept_dtypes(module, owned, mp_policy)
    domain = ctx.domain_of(ctx.mesh if mesh is None else mesh)
    offload = _offload_on(domain.device, offload_policy)
    buckets = _make_buckets(module, owned, ctx, domain, mp_policy, offload)
    unit = Unit(module, ctx, domain.mesh, buckets, mp_policy, reshard_after_forward)
    unit.ignored = ignored
    unit.offload_policy = offload_policy
    _mark_owner(unit)
    move_buffers(module, ctx.device)
    module.__dict__["_fsdp_unit"] = unit
    module.__class__ = _fsdp_class(type(module))
    hooks.install(module, unit)
    return module


def _mark_owner(unit: Unit) -> None:
    """So that an outer unit that meets the parameters again can say whose they are."""
    for bucket in unit.buckets:
        for item, sharded in zip(bucket.owned, bucket.sharded_parameters, strict=True):
            for parameter in (item.parameter, sharded):
                parameter._fsdp_owner = (unit.module_kind, item.fqn)  # type: ignore[union-attr]


def _offload_on(device: torch.device, policy: OffloadPolicy) -> CPUOffloadPolicy | None:
    """``policy`` where there is anything to offload."""
    is_asked = isinstance(policy, CPUOffloadPolicy) and device.type != "cpu"
    return policy if is_asked else None  # type: ignore[return-value]


def _make_buckets(
    module: nn.Module,
    owned: list[OwnedParameter],
    ctx: FsdpContext,
    domain: Domain,
    mp_policy: MixedPrecisionPolicy,
    offload: CPUOffloadPolicy | None,
) -> list[Bucket]:
    if not domain.plans.has(module) and any(other.plans.has(module) for other in ctx.domains):
        raise ValueError(
            f"{type(module).__name__} was planned for another mesh than {domain.mesh}: name its "
            "mesh in ctx.plan(..., meshes={module: mesh})"
        )
    by_fqn = {item.fqn: item for item in owned}
    is_meta = any(item.parameter.is_meta for item in owned)
    return [
        Bucket(
            plan,
            [by_fqn[spec.fqn] for spec in plan.specs],
            domain,
            torch.device("meta") if is_meta else domain.device,
            _compute_dtype(plan.specs[0], mp_policy),
            offload,
        )
        for plan in domain.plans.take(module, [item.spec for item in owned])
    ]


def _note_kept_dtypes(
    module: nn.Module, owned: list[OwnedParameter], mp_policy: MixedPrecisionPolicy
) -> None:
    """Asks the policy which parameters compute uses in their own dtype."""
    override = getattr(mp_policy, "param_dtype_override_fn", None)  # of torch 2.15
    if override is None:
        return
    for item in owned:
        dtype, chosen = item.parameter.dtype, override(item.parameter)
        if chosen not in (None, mp_policy.param_dtype, dtype):
            raise ValueError(
                f"param_dtype_override_fn gave {chosen!r} for parameter {item.fqn!r} of "
                f"{type(module).__name__}: return its own dtype, {dtype}, or None for that of the "
                f"policy, {mp_policy.param_dtype}"
            )
        item.keeps_dtype = chosen is dtype and mp_policy.param_dtype not in (None, dtype)


def _compute_dtype(spec: ParamSpec, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    if mp_policy.param_dtype is None or spec.keeps_dtype or not spec.dtype.is_floating_point:
        return spec.dtype
    return mp_policy.param_dtype


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes a torch.nn.Module, got {type(module).__name__}")
    if unit_of(module) is not None:
        raise ValueError(
            f"{type(module).__name__} is a unit already; call fully_shard once on each module"
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"{type(module).__name__} has no forward to hook; call fully_shard on each of its "
            "modules"
        )


def _check_arguments(
    ctx: FsdpContext | None,
    reshard_after_forward: bool | None,
) -> None:
    if ctx is not None and not isinstance(ctx, FsdpContext):
        raise TypeError(
            f"ctx is a {type(ctx).__name__}, not an FsdpContext; pass a mesh as mesh=..."
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r} is not supported; use True, False "
            "or None"
        )


def _check_parameters(module: nn.Module, owned: list[OwnedParameter], device: torch.device) -> None:
    for item in owned:
        parameter = item.parameter
        where = f"parameter {item.fqn!r} of {type(module).__name__}"
        other = getattr(parameter, "_fsdp_owner", None)
        if other is not None:
            raise ValueError(
                f"{where} is also {other[1]!r} of the unit {other[0]}: a parameter belongs to one "
                "unit; call fully_shard only on a module that holds both"
            )
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"{where} is not initialized; run a forward before fully_shard()")
        if isinstance(parameter, DTensor) or type(parameter) is not nn.Parameter:
            raise TypeError(
                f"{where} is a {type(parameter).__name__}; only plain torch.nn.Parameter is "
                "supported"
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"{where} is not contiguous (shape {tuple(parameter.shape)}, strides "
                f"{parameter.stride()}); replace its data by .contiguous() first"
            )
        if getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype:
            raise ValueError(
                f"{where} is {parameter.dtype} and its grad_dtype {parameter.grad_dtype}: sharded "
                "gradients have the dtype of their parameters; for the dtype they are reduced in, "
                "use MixedPrecisionPolicy(reduce_dtype=...)"
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


_fsdp_classes: dict[type, Any] = {}


def _fsdp_class(cls: type) -> Any:
    """``cls`` with :class:`FsdpModule` mixed in, the same for all its instances."""
    if cls not in _fsdp_classes:
        _fsdp_classes[cls] = type(f"Fsdp{cls.__name__}", (FsdpModule, cls), {})
    return _fsdp_classes[cls]
