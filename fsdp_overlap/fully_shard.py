"""The entry point: :func:`fully_shard` and what it gives a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_overlap.fsdp_module import FsdpModule
from fsdp_overlap.layout import BucketPlan, ParamSpec
from fsdp_overlap.runtime import hooks, tiles
from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.context import FsdpContext
from fsdp_overlap.runtime.domain import Domain
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
from fsdp_overlap.runtime.plans import all_or_none
from fsdp_overlap.runtime.stale_optimizers import note_replacement
from fsdp_overlap.runtime.starts import take_from_first
from fsdp_overlap.runtime.unit import Unit, reduce_dtype, unit_of
from fsdp_overlap.tensor.carried import SUMMED
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor

ModulesT = TypeVar("ModulesT", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: ModulesT,
    ctx: FsdpContext | None = None,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008, frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: object | None = None,
) -> ModulesT:
    """Makes ``module`` a unit: shards its parameters, gradients and optimizer states over a mesh.

    Call it on inner modules first, then on the module around them, with one context. The unit owns
    the parameters of ``module``'s subtree that no inner unit owns; they become ``ShardedTensor``
    parameters, in place. Those that are DTensors already, over another dimension of the mesh, as
    tensor parallelism makes them, lie over both then, and compute sees the DTensors. Every rank
    must hold the same values before, and call it in the same order. A model built on the meta
    device gets memory by ``model.to_empty(device=...)`` afterwards, that of its shards alone.

    A list of modules, as ``[norm, head]``, is one unit: what they own travels together, and is
    whole from the first of them that runs until each has run, at the longest to the end of the
    outermost unit around them. Any of them may run several times, or alone after the model's
    forward, as a head does on one chunk of the loss after the other: it then is whole already.

    Args:
        module: at rest its parameters are sharded; its own forward sees them whole. The root's
            inputs are moved to the GPU, if it is on one, and the host does not wait for those in
            pinned memory: do not overwrite these before the step is over. Of a list, those that lie
            within others of it only say that they are part of them.
        ctx: what the units of one model share. Without one, the units of a tree share one from the
            first forward of its root on.
        mesh: what the unit is sharded over, of one dimension or ``(replicate, shard)``, by default
            the mesh of ``ctx``, and all ranks if neither is given. A unit within others may have a
            mesh of its own, as experts have. Its gradients are divided by the size of that:
            :meth:`FsdpModule.set_gradient_divide_factor` says otherwise.
        reshard_after_forward: whether the full parameters are freed between forward and backward.
            ``None``: for all units but the root, which backward needs first. A number: they are
            sharded among so many neighbouring ranks instead, usually those of one machine, from
            which backward gathers them.
        shard_placement_fn: gives some parameters a mesh of their own, by a ``ShardPlacementResult``
            of ``torch.distributed.fsdp``. ``None`` and ``Shard(0)`` stand for what is done anyway;
            where parameters are cut is the context's ``layout``.
        mp_policy: dtypes of compute, of the reduction, of inputs and outputs. Sharded parameters
            and their gradients keep the dtype they have. Without a ``reduce_dtype`` gradients are
            reduced, and accumulated where they are not synchronized, in that dtype, as in torch
            2.15; older releases of FSDP2 reduce them in the dtype of compute.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer states in the
            host's memory. Shards are copied to the device when they are gathered, gradients back
            once they are reduced; backward ends when they have arrived. On a CPU it changes
            nothing.
        ignored_params: left as they are.
        dp_mesh_dims: not supported; pass the data-parallel dimensions as ``mesh``.

    Returns:
        ``module``, whose class, or that of each of its modules, now also is :class:`FsdpModule`.

    Raises:
        TypeError, ValueError: the module or a parameter cannot be sharded. Nothing was changed
        then.
    """
    modules = _modules_of(module)
    _check_arguments(ctx, dp_mesh_dims)
    ignored = frozenset(ignored_params or ())
    owned = owned_parameters(modules, ignored)
    if ctx is None:
        ctx = FsdpContext(mesh)
        ctx.is_implicit = True
    kind = kind_of(modules)
    _check_parameters(modules, owned, ctx.device)
    _check_gradients(kind, owned, mp_policy)
    if ctx.sync_module_states:
        _check_synced(kind, owned)
    mesh = ctx.mesh if mesh is None else mesh
    by_domain = _by_domain(kind, owned, ctx, mesh, shard_placement_fn)
    for domain, items in by_domain.items():
        _check_reshard_after_forward(reshard_after_forward, domain.shard_size)
        for item in items:
            if isinstance(item.parameter, DTensor):
                tiles.check(_name(kind, item), item.parameter, domain.mesh)
    _note_kept_dtypes(kind, owned, mp_policy)
    offload = _offload_on(ctx.device, offload_policy)
    with all_or_none(domain.plans for domain in by_domain):
        planned = {
            domain: _plan(modules, items, ctx, domain) for domain, items in by_domain.items()
        }
    # Nothing was changed so far, and nothing is refused from here on.
    if ctx.sync_module_states:
        take_from_first(modules, by_domain, mesh)
    buckets = [
        bucket
        for domain, items in by_domain.items()
        for bucket in _make_buckets(planned[domain], items, domain, mp_policy, offload)
    ]
    unit = Unit(modules, ctx, mesh, buckets, mp_policy, reshard_after_forward)
    unit.ignored = ignored
    unit.offload_policy = offload_policy
    _mark_owner(unit)
    move_buffers(modules, ctx.device)
    for each in modules:
        each.__dict__["_fsdp_unit"] = unit
        each.__class__ = _fsdp_class(type(each))
        hooks.install(each, unit)
    return module


def _mark_owner(unit: Unit) -> None:
    """So that another unit and an optimizer that meet the parameters can say what they are."""
    for bucket in unit.buckets:
        for item, sharded in zip(bucket.owned, bucket.sharded_parameters, strict=True):
            owner = Owner(unit.module_kind, item.fqn)
            mark_owner(sharded, owner)
            mark_owner(item.parameter, owner)
            mark_replaced(item.parameter, by="fully_shard()")
    note_replacement()


def _offload_on(device: torch.device, policy: OffloadPolicy) -> CPUOffloadPolicy | None:
    """``policy`` where there is anything to offload."""
    is_asked = isinstance(policy, CPUOffloadPolicy) and device.type != "cpu"
    return policy if is_asked else None  # type: ignore[return-value]


def _by_domain(
    kind: str,
    owned: list[OwnedParameter],
    ctx: FsdpContext,
    mesh: DeviceMesh,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
) -> dict[Domain, list[OwnedParameter]]:
    """The unit's parameters by the mesh they are sharded over."""
    found: dict[Domain, list[OwnedParameter]] = {ctx.domain_of(mesh): []}
    for item in owned:
        wanted: Any = None if shard_placement_fn is None else shard_placement_fn(item.parameter)
        own_mesh = mesh
        if mesh_info := getattr(wanted, "mesh_info", None):
            own_mesh, wanted = mesh_info.mesh, wanted.placement
        if wanted is not None and wanted != Shard(0):
            raise ValueError(
                f"shard_placement_fn wants parameter {item.fqn!r} of {kind} "
                f"placed as {wanted}; parameters are cut between rows, so return None, Shard(0) or "
                "a ShardPlacementResult of these, and choose a layout by FsdpContext(layout=...)"
            )
        found.setdefault(ctx.domain_of(own_mesh), []).append(item)
    return {domain: items for domain, items in found.items() if items or len(found) == 1}


def _check_gradients(
    kind: str, owned: list[OwnedParameter], mp_policy: MixedPrecisionPolicy
) -> None:
    for item in owned:
        dtype = reduce_dtype(item.parameter.dtype, mp_policy)
        if item.parameter.requires_grad and dtype not in SUMMED:
            raise ValueError(
                f"gradients of {_name(kind, item)} would be reduced in {dtype}, in which nothing "
                "can be summed: use MixedPrecisionPolicy(reduce_dtype=torch.float32), or freeze it "
                "by requires_grad_(False)"
            )


def _plan(
    modules: Sequence[nn.Module], owned: list[OwnedParameter], ctx: FsdpContext, domain: Domain
) -> list[BucketPlan]:
    """How the unit's parameters over the mesh of ``domain`` lie."""
    first = modules[0]
    if not domain.plans.has(first) and any(other.plans.has(first) for other in ctx.domains):
        raise ValueError(
            f"{kind_of(modules)} was planned for another mesh than {domain.mesh}: name its "
            "mesh in ctx.plan(..., meshes={module: mesh})"
        )
    return domain.plans.take(modules, [item.spec for item in owned])


def _make_buckets(
    plans: list[BucketPlan],
    owned: list[OwnedParameter],
    domain: Domain,
    mp_policy: MixedPrecisionPolicy,
    offload: CPUOffloadPolicy | None,
) -> list[Bucket]:
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
        for plan in plans
    ]


def _note_kept_dtypes(
    kind: str, owned: list[OwnedParameter], mp_policy: MixedPrecisionPolicy
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
                f"{kind}: return its own dtype, {dtype}, or None for that of the "
                f"policy, {mp_policy.param_dtype}"
            )
        item.keeps_dtype = chosen is dtype and mp_policy.param_dtype not in (None, dtype)


def _compute_dtype(spec: ParamSpec, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    if mp_policy.param_dtype is None or spec.keeps_dtype or not spec.dtype.is_floating_point:
        return spec.dtype
    return mp_policy.param_dtype


def _modules_of(module: Any) -> list[nn.Module]:
    """The modules that will be one unit: of a list, without those that lie within others."""
    if isinstance(module, nn.Module):
        _check_module(module)
        return [module]
    if not isinstance(module, (list, tuple)):
        raise TypeError(
            f"fully_shard takes a torch.nn.Module or a list of them, got {type(module).__name__}"
        )
    for item in module:
        if not isinstance(item, nn.Module):
            raise TypeError(
                f"fully_shard takes a list of torch.nn.Module, got one with a {type(item).__name__}"
            )
    inner = {id(child) for item in module for child in item.modules() if child is not item}
    modules = [item for item in module if id(item) not in inner]
    if not modules or len(set(modules)) != len(modules):
        raise ValueError("fully_shard takes a list of at least one module, each named once")
    for each in modules:
        _check_module(each)
    return modules


def _check_module(module: nn.Module) -> None:
    if unit_of(module) is not None:
        raise ValueError(
            f"{type(module).__name__} is a unit already; call fully_shard once on each module"
        )
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward to hook; call fully_shard on each of its "
            "modules"
        )


def _check_arguments(
    ctx: FsdpContext | None,
    dp_mesh_dims: object | None,
) -> None:
    if dp_mesh_dims is not None:
        raise ValueError(
            f"dp_mesh_dims={dp_mesh_dims} is not supported: pass the data-parallel dimensions "
            "alone as the mesh, as mesh['dp'], and parameters that are DTensors over the others"
        )
    if ctx is not None and not isinstance(ctx, FsdpContext):
        raise TypeError(
            f"ctx is a {type(ctx).__name__}, not an FsdpContext; pass a mesh as mesh=..."
        )


def _check_reshard_after_forward(value: bool | int | None, ranks: int) -> None:
    if value is None or isinstance(value, bool):
        return
    sizes = [size for size in range(2, ranks) if ranks % size == 0]
    if value not in sizes:
        raise ValueError(
            f"reshard_after_forward={value!r}: use True, False, None or, as parameters are sharded "
            f"among {ranks} ranks, {' or '.join(map(str, sizes)) or 'no number'}"
        )


def _name(kind: str, item: OwnedParameter) -> str:
    return f"parameter {item.fqn!r} of {kind}"


def _check_no_owner(modules: Sequence[nn.Module], item: OwnedParameter, where: str) -> None:
    owner = owner_of(item.parameter)
    if owner is None:
        return
    name = item.fqn if len(modules) == 1 else item.fqn.partition(".")[2]
    # The unit put the sharded form where it found the parameter, which has a longer name there.
    if isinstance(item.parameter, ShardedTensor) and owner.fqn.endswith(f".{name}"):
        raise ValueError(
            f"{where} was sharded already, as {owner.fqn!r} of the unit {owner.unit} around it: "
            "call fully_shard on inner modules first, then on the module around them"
        )
    raise ValueError(
        f"{where} is also {owner.fqn!r} of the unit {owner.unit}: a parameter belongs to one unit; "
        "call fully_shard only on a module that holds both, or on a list of the two"
    )


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
        if type(parameter) not in (nn.Parameter, DTensor):
            raise TypeError(
                f"{where} is a {type(parameter).__name__}; only plain torch.nn.Parameter and "
                "DTensors of tensor parallelism are supported"
            )
        held = tiles.tile_in(parameter)
        if not held.is_contiguous():
            raise ValueError(
                f"{where} is not contiguous (shape {tuple(held.shape)}, strides "
                f"{held.stride()}); replace its data by .contiguous() first"
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


def _check_synced(kind: str, owned: list[OwnedParameter]) -> None:
    for item in owned:
        if item.parameter.is_meta:
            raise ValueError(
                f"{_name(kind, item)} is on the meta device, and sync_module_states=True takes it "
                "from the first rank: build the model with memory on every rank, or leave the "
                "argument out and load the weights after to_empty()"
            )


_fsdp_classes: dict[type, Any] = {}


def _fsdp_class(cls: type) -> Any:
    """``cls`` with :class:`FsdpModule` mixed in, the same for all its instances.

    Its name begins as FSDP2's do, which transformers drops where it saves. Its module is that of
    ``cls``, by which transformers tells its own models, initialized otherwise, from their users'.
    """
    if cls not in _fsdp_classes:
        _fsdp_classes[cls] = type(
            f"FSDP{cls.__name__}", (FsdpModule, cls), {"__module__": cls.__module__}
        )
    return _fsdp_classes[cls]
