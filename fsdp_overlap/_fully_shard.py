"""The entry point, :func:`fully_shard`: own, check, plan, allocate and install."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_overlap.context import FsdpContext
from fsdp_overlap.engine import hooks
from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.options import CommPolicy, UnitOptions
from fsdp_overlap.engine.param import (
    Owner,
    ParamInfo,
    is_replicated,
    mark_owner,
    module_class_name,
    move_buffers,
    owned_parameters,
    owner_of,
    record_replacement,
    reduce_dtype,
)
from fsdp_overlap.engine.param_group import DEVICE, MakeGatherer, ParamGroup, Storage
from fsdp_overlap.engine.unit import Tie, Unit, unit_of
from fsdp_overlap.fsdp_module import FSDPModule
from fsdp_overlap.layout import ParamGroupPlan, Plan
from fsdp_overlap.layout.plan import RowLayout, rollback_on_error
from fsdp_overlap.tensor.comm_dtypes import REDUCE_DTYPES
from fsdp_overlap.torch_internals import (
    ComposableRegistryItem,
    composable_registry_key,
    patch_fully_shard_state,
)

# ---- fully_shard() ----

if TYPE_CHECKING:
    from fsdp_overlap.features.full_mesh import DataParallelMeshDims, SPMDMesh
    from fsdp_overlap.features.quantized.policy import QuantizedCommPolicy

    class Sharded(FSDPModule, Any):
        """What a type checker knows of a sharded module: it has the methods of
        :class:`FSDPModule`, and it is still of its own class, which may be any.

        The exact type would be an intersection of both classes, and Python has none. Considered and
        not taken: to return the module's class, which hides our methods; to return ``FSDPModule``,
        as FSDP2 does, which hides the module's own methods and does not fit the variable that held
        the module; a plugin, which only mypy reads, and only if users ask for it.
        """

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


class ShardOptions(TypedDict, total=False):
    """The keyword arguments of :func:`fully_shard`."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    comm_policy: QuantizedCommPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    conditional: bool


@overload
def fully_shard(
    module: nn.Module, ctx: FsdpContext | None = None, **options: Unpack[ShardOptions]
) -> Sharded: ...
@overload
def fully_shard(
    module: Sequence[nn.Module], ctx: FsdpContext | None = None, **options: Unpack[ShardOptions]
) -> Sequence[Sharded]: ...
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    ctx: FsdpContext | None = None,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008, frozen
    comm_policy: QuantizedCommPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    conditional: bool = False,
) -> FSDPModule | Sequence[FSDPModule]:
    """Make ``module`` a unit: shard its parameters, gradients and optimizer states over a mesh.

    Call it on inner modules first, then on the module around them, with one context, in the same
    order on every rank, and with the same values on every rank. A unit owns the parameters of
    ``module``'s subtree that no earlier unit owns. Around other units, large modules of these may
    become units too: ``FsdpContext(implicit_units=)``. It reads those that an earlier unit beside
    it owns, as of tied weights: that unit is gathered for its forwards and backwards too.
    Parameters become ``RaggedDTensor`` parameters, in place, or under the layout ``PerTensor()``
    DTensors as FSDP2's are. If the layout keeps matrices whole, balance them over all units by
    :meth:`FsdpContext.plan_layout` before, or by :func:`fully_shard_model`; otherwise each call
    places its unit given those before it.

    A list of modules, such as ``[norm, head]``, becomes one unit. It is unsharded from the first of
    them that runs until each has run, or the outermost unit around them ends.

    Args:
        module: the module, or a list of modules. Inputs of the root are moved to the mesh's GPU
            without waiting: do not overwrite pinned inputs before the step is over.
        ctx: what the units of one model share. Without it, the units of a tree share a context from
            the first forward of their root on.
        mesh: the ranks to shard over: one dimension, or two, ``(replicate, shard)``. By default the
            mesh of ``ctx``, else all ranks. An inner unit may have its own, as experts have.
        reshard_after_forward: whether to free the full parameters between forward and backward.
            ``None`` frees them in all units but the root, whose parameters backward needs first. A
            number keeps them sharded among that many neighboring ranks, usually those of one
            machine.
        shard_placement_fn: gives parameters a mesh of their own, by a ``ShardPlacementResult`` as
            in FSDP2, or under ``PerTensor()`` another dimension, by ``Shard(d)``. ``None`` and
            ``Shard(0)`` change nothing.
        mp_policy: the dtypes of compute, reduction, inputs and outputs. Without a ``reduce_dtype``
            gradients are reduced, and unsynchronized ones summed, in the dtype of their parameter.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer states on the
            host. It changes nothing on a CPU.
        comm_policy: sends matrices, their gradients or both in few bits.
        ignored_params: the parameters to leave as they are.
        dp_mesh_dims: which dimensions of ``mesh`` to shard and to replicate along, by name.
            Parameters lie over all of ``mesh``, replicated along these: as DTensors, or annotated
            by ``spmd_types``. A context takes the named dimensions alone.
        conditional: whether each rank may run the unit and those within it or not, in any order
            and any number of times. The others take part in its collectives. Its gradient is the
            mean over all ranks, to which a rank that did not run it adds zero; ``None`` if none
            ran it.

    Returns:
        ``module``. Its class, or each module's of a list, now derives from :class:`FSDPModule`.

    Raises:
        TypeError, ValueError: the module or a parameter cannot be sharded. Nothing was changed.
    """
    modules = [module] if isinstance(module, nn.Module) else _modules_in(module)
    for member in modules:
        _check_module(member)
    classes = [_fsdp_class(type(member)) for member in modules]
    full_mesh = None if dp_mesh_dims is None else _full_mesh(mesh, dp_mesh_dims)
    mesh = mesh if full_mesh is None else full_mesh.data
    ctx = _implicit_context(mesh) if ctx is None else _checked_context(ctx)
    mesh, storage = ctx.mesh if mesh is None else mesh, _storage_on(ctx.device, offload_policy)
    asked = comm_policy, reshard_after_forward, shard_placement_fn, frozenset(ignored_params or ())
    options = UnitOptions(mesh, mp_policy, storage, *asked, conditional, full_mesh)
    make_unit(modules, ctx, options)
    for member, fsdp_class in zip(modules, classes, strict=True):
        _change_class(member, fsdp_class)
    return cast(FSDPModule | Sequence[FSDPModule], module)


def _change_class(module: nn.Module, fsdp_class: Any) -> None:
    object.__setattr__(module, "__class__", fsdp_class)  # modules may guard their attributes
    noted = module.__dict__.setdefault(composable_registry_key, {})
    noted["fully_shard"] = ComposableRegistryItem()  # for replicate() on a module around it


def _checked_context(ctx: Any) -> FsdpContext:
    if isinstance(ctx, FsdpContext):
        return ctx
    raise TypeError(f"ctx is a {type(ctx).__name__}, not an FsdpContext; pass a mesh as mesh=...")


def _implicit_context(mesh: DeviceMesh | None) -> FsdpContext:
    """Return the context of a unit that was given none."""
    ctx = FsdpContext(mesh)
    ctx.is_implicit = True
    return ctx


def fully_shard_model(
    model: nn.Module,
    ctx: FsdpContext | None = None,
    *,
    units: Sequence[nn.Module | Sequence[nn.Module]] | None = None,
    **options: Unpack[ShardOptions],
) -> Sharded:
    """Shard a whole model: one unit for each of its blocks, and the root for the rest.

    Call :meth:`FsdpContext.plan_layout` for all units, then :func:`fully_shard` on each of them,
    and on ``model`` last. Units are planned one by one if the options may give parameters of one
    unit different meshes, dtypes or communication: ``shard_placement_fn``, ``comm_policy``, and a
    policy with ``param_dtype_override_fn``.

    Args:
        model: the root.
        ctx: what the units share. By default a new context over ``mesh``.
        units: modules within ``model`` to make a unit of each, or lists of modules that become one
            unit, inner ones first. By default those that :func:`~fsdp_overlap.find_blocks` finds.
        options: arguments of :func:`fully_shard`, for every unit.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: as :func:`~fsdp_overlap.find_blocks`,
            :meth:`FsdpContext.plan_layout` and :func:`fully_shard` do.
    """
    from fsdp_overlap.blocks import find_blocks

    units = find_blocks(model) if units is None else units
    mesh, dims = options.get("mesh"), options.get("dp_mesh_dims")
    if dims is not None:
        mesh = _full_mesh(mesh, dims).data
    ctx = FsdpContext(mesh) if ctx is None else ctx
    policy = options.get("mp_policy")
    if not (
        options.get("shard_placement_fn")
        or options.get("comm_policy")
        or getattr(policy, "param_dtype_override_fn", None)
    ):
        firsts = [unit if isinstance(unit, nn.Module) else unit[0] for unit in (*units, model)]
        ctx.plan_layout(
            [*units, model],
            ignored_params=options.get("ignored_params") or (),
            meshes={} if mesh is None else dict.fromkeys(firsts, mesh),
        )
    for unit in units:
        fully_shard(unit, ctx, **options)
    return fully_shard(model, ctx, **options)


def _full_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> SPMDMesh:
    from fsdp_overlap.features.full_mesh import spmd_mesh

    return spmd_mesh(mesh, dims)


def _modules_in(module: Any) -> list[nn.Module]:
    """Return the modules of a list that will be one unit, without those that lie within others."""
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
    return modules


def _check_module(module: nn.Module) -> None:
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    has_forward = not is_container or type(module).forward is not nn.Module.forward
    if unit_of(module) is not None or is_replicated(module) or not has_forward:
        raise ValueError(_why_no_unit(module))


def _why_no_unit(module: nn.Module) -> str:
    kind = type(module).__name__
    if unit_of(module) is not None:
        return f"{kind} is a unit already; call fully_shard once on each module"
    if is_replicated(module):
        return (
            f"replicate() was called on {kind}, so it trains the parameters: call one of the two, "
            "or fully_shard() over a mesh (replicate, shard) for both"
        )
    return f"{kind} has no forward to hook; call fully_shard on each of its modules"


_fsdp_classes: dict[type, Any] = {}


def _fsdp_class(cls: type) -> Any:
    """Return the subclass of :class:`FSDPModule` and ``cls``. All modules of class ``cls`` share
    it.

    The name begins with ``FSDP``, as FSDP2's do: transformers drops that where it saves a model. It
    stands in the module of ``cls``: transformers looks there to tell its own models from those of
    users, which it initializes otherwise.

    Raises:
        TypeError: no subclass of ``cls`` can be made, or none that its modules can change to.
    """
    if cls not in _fsdp_classes:
        try:
            _fsdp_classes[cls] = _make_fsdp_class(cls)
        except Exception as error:
            raise TypeError(_why_no_class(cls.__name__, error)) from error
    return _fsdp_classes[cls]


def _why_no_class(name: str, error: Exception) -> str:
    return (
        f"{name} cannot be sharded, because a class cannot be made that derives from FSDPModule "
        f"and from {name}, as class FSDP{name}(FSDPModule, {name}) would be: {error}. Make that "
        "possible, for example by a metaclass whose arguments have defaults, or shard the modules "
        "within it"
    )


def _make_fsdp_class(cls: type) -> Any:
    name, namespace = f"FSDP{cls.__name__}", {"__module__": cls.__module__}
    made = type(name, (FSDPModule, cls), namespace)
    try:
        object.__setattr__(object.__new__(cls), "__class__", made)
    except TypeError:
        # Python lays objects out by the first base. It does not take those of a class whose first
        # base has no attributes, such as ABC, Generic or Protocol, for those of FSDPModule. So cls
        # is the first base, and only methods are looked up in FSDPModule before.
        made = _methods_first(type(cls))(name, (cls, FSDPModule), namespace)
        object.__setattr__(object.__new__(cls), "__class__", made)
    return made


def _methods_first(metaclass: Any) -> Any:
    """Return a metaclass of classes whose methods are looked up in :class:`FSDPModule` first."""

    class MethodsFirst(metaclass):
        def mro(cls) -> list[type]:  # noqa: N805 (a metaclass)
            own, *bases = super().mro()
            return [own, *sorted(bases, key=lambda base: not issubclass(base, FSDPModule))]

    return MethodsFirst


# ---- Make a unit ----

# Features are imported where a unit needs them: most need none.


def make_unit(modules: Sequence[nn.Module], ctx: FsdpContext, options: UnitOptions) -> Unit:
    """Shard what ``modules`` own and hook their forwards. Their classes are left to the caller.

    Raises:
        TypeError, ValueError: a parameter cannot be sharded. Nothing was changed then.
    """
    owned, ties = _own(modules, ctx, options)
    by_mesh, checked = _check(owned, modules, ctx, options)
    if ctx.implicit_units and (inner := _implicit_modules(modules, owned)):
        return _make_with_implicit(inner, modules, ctx, options)
    options = checked
    planned = _plan(modules, by_mesh, ctx, options.comm_policy)
    # Nothing was changed so far, and nothing is refused from here on.
    if ctx.sync_module_states:
        _sync_from_first(modules, by_mesh, options.mesh)  # before shards copy the values
    originals = [item.parameter for item in owned]  # before others take their place
    param_groups = _allocate(by_mesh, planned, options)
    unit = Unit(modules, ctx, options, param_groups, _adopt)
    unit.make_unit = make_unit
    _mark_owners(unit, owned, originals)
    _choose_schedule(unit)
    if ties:
        _connect_ties(unit, ties)
    if options.has_implicit:
        _connect_implicit(unit, modules)
    _install(unit, modules, ctx)  # after ties, which hooks depend on
    return unit


# ---- implicit units ----


def _implicit_modules(modules: Sequence[nn.Module], owned: Sequence[ParamInfo]) -> list[nn.Module]:
    from fsdp_overlap.features.implicit_units import large_modules

    return large_modules(modules, owned)


def _make_with_implicit(
    inner: Sequence[nn.Module], modules: Sequence[nn.Module], ctx: FsdpContext, options: UnitOptions
) -> Unit:
    """Make units of the ``inner`` modules, then of ``modules`` around them."""
    from fsdp_overlap.features.implicit_units import options_of, reads_in_backward

    inner_options = options_of(options)
    classes = [_fsdp_class(type(module)) for module in inner]
    with _planned_in_vain(ctx):  # so that nothing was changed if one cannot be planned
        for made in ([module] for module in inner):
            own = owned_parameters(made, options.ignored)
            by_mesh, checked = _check(own, made, ctx, inner_options)
            _plan(made, by_mesh, ctx, checked.comm_policy)
        rest = owned_parameters(modules, options.ignored, inner)
        own = [item for item in rest if owner_of(item.parameter) is None]
        by_mesh, checked = _check(own, modules, ctx, options)
        _plan(modules, by_mesh, ctx, checked.comm_policy)
    for module, fsdp_class in zip(inner, classes, strict=True):
        is_read = reads_in_backward(module)  # before the hooks of its unit
        make_unit([module], ctx, inner_options).settings.unshard_in_backward = is_read
        _change_class(module, fsdp_class)
    return make_unit(modules, ctx, replace(options, has_implicit=True))


@contextmanager
def _planned_in_vain(ctx: FsdpContext) -> Iterator[None]:
    """Take back what is planned in the ``with`` block."""
    before = [(mesh_info.plans, mesh_info.plans.copy()) for mesh_info in ctx.mesh_infos]
    try:
        yield
    finally:
        for planner, as_before in before:
            vars(planner).update(vars(as_before))


def _connect_implicit(unit: Unit, modules: Sequence[nn.Module]) -> None:
    from fsdp_overlap.features.implicit_units import connect_implicit

    connect_implicit(unit, modules)


# ---- own ----


def _own(
    modules: Sequence[nn.Module], ctx: FsdpContext, options: UnitOptions
) -> tuple[list[ParamInfo], Sequence[Tie]]:
    """Return the parameters that the unit will own, and those that it will read."""
    owned = owned_parameters(modules, options.ignored)
    if all(owner_of(item.parameter) is None for item in owned):
        return owned, ()
    from fsdp_overlap.features.tied_parameters import find_ties

    return find_ties(modules, owned, ctx, options.mesh, options.mp_policy)


# ---- check ----


def _check(
    owned: list[ParamInfo], modules: Sequence[nn.Module], ctx: FsdpContext, options: UnitOptions
) -> tuple[dict[MeshInfo, list[ParamInfo]], UnitOptions]:
    """Return the parameters by the mesh that they are sharded over, and what the unit needs of
    ``options``. There is nothing to check if all parameters are plain and the user asked nothing
    that depends on them."""
    if (
        options.full_mesh is None
        and options.shard_placement_fn is None
        and options.comm_policy is None
        and type(options.reshard_after_forward) is not int
        and getattr(options.mp_policy, "param_dtype_override_fn", None) is None  # of torch 2.15
        and not callable(ctx.layout)
        and not isinstance(ctx.layout, RowLayout)
        and all(_is_plain(item.parameter, ctx.device, options.mp_policy) for item in owned)
    ):
        return {ctx.mesh_info_of(options.mesh): owned}, options
    from fsdp_overlap.features.parameter_checks import check_parameters

    return check_parameters(owned, modules, ctx, options)


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
    if len(ctx.mesh_infos) > 1:
        _check_planned_meshes(modules, by_mesh, ctx)
    can_fail_late = len(by_mesh) > 1 or comm_policy is not None
    with rollback_on_error(each.plans for each in by_mesh) if can_fail_late else nullcontext():
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


def _check_planned_meshes(
    modules: Sequence[nn.Module], by_mesh: Iterable[MeshInfo], ctx: FsdpContext
) -> None:
    """Raise ValueError if the unit was planned for another mesh."""
    for mesh_info in by_mesh:
        has_none = not mesh_info.plans.has(modules[0])
        if has_none and any(other.plans.has(modules[0]) for other in ctx.mesh_infos):
            raise ValueError(
                f"{module_class_name(modules)} was planned for another mesh than {mesh_info.mesh}: "
                "name its mesh in ctx.plan_layout(..., meshes={module: mesh})"
            )


def _sync_from_first(
    modules: Sequence[nn.Module], by_mesh: dict[MeshInfo, list[ParamInfo]], mesh: DeviceMesh
) -> None:
    from fsdp_overlap.features.sync_module_states import sync_module_states_from_first

    sync_module_states_from_first(modules, by_mesh, mesh)


# ---- allocate ----


def _storage_on(device: torch.device, policy: OffloadPolicy) -> Storage:
    """Return where shards rest: on the host if the user asks for it, and there is a device to
    offload from."""
    if device.type == "cpu" or not isinstance(policy, CPUOffloadPolicy):
        return DEVICE
    from fsdp_overlap.features.offload import HostStorage

    return HostStorage(policy.pin_memory)


def _allocate(
    by_mesh: dict[MeshInfo, list[ParamInfo]],
    planned: dict[MeshInfo, list[Plan]],
    options: UnitOptions,
) -> list[ParamGroup]:
    """Make the param groups, with their full buffers, shards and sharded parameters."""
    param_groups: list[ParamGroup] = []
    for mesh_info, items in by_mesh.items():
        by_fqn = {item.fqn: item for item in items}
        is_meta = any(item.parameter.is_meta for item in items)
        device = torch.device("meta") if is_meta else mesh_info.device
        for plan in planned[mesh_info]:
            own = [by_fqn[spec.fqn] for spec in plan.specs]
            make = ParamGroup if isinstance(plan, ParamGroupPlan) else _class_for_rows(plan)
            param_group = make(plan, own, mesh_info, device, options)
            _choose_strategies(param_group, options)
            param_groups.append(param_group)
    return param_groups


def _class_for_rows(plan: Plan) -> type[ParamGroup]:
    if plan.specs[0].is_extension:
        from fsdp_overlap.features.extensions.param_group import ExtensionParamGroup

        return ExtensionParamGroup
    from fsdp_overlap.features.rows.param_group import RowsParamGroup

    return RowsParamGroup


def _choose_strategies(param_group: ParamGroup, options: UnitOptions) -> None:
    """Give a param group what makes its gradients and its gatherer, if these are no plain ones."""
    mesh_info, is_on_host = param_group.mesh_info, param_group.storage.is_on_host
    if (
        param_group.is_tensor_parallel
        or param_group.is_extension
        or mesh_info.num_replicas > 1
        or is_on_host
    ):
        param_group.make_gradients = _gradients_class(param_group)
    if is_on_host or mesh_info.shards_replicas or type(options.reshard_after_forward) is int:
        param_group.make_gatherer = _gatherer_of(mesh_info)


def _gatherer_of(mesh_info: MeshInfo) -> MakeGatherer:
    """Return what makes gatherers where replicas divide shards, neighbors keep parts, or shards
    rest on the host."""
    from fsdp_overlap.features import kept_parts, outer_shard

    return outer_shard.make_gatherer if mesh_info.shards_replicas else kept_parts.make_gatherer


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
        return classes[0]
    return type("".join(each.__name__ for each in classes), tuple(classes), {})


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


def _choose_schedule(unit: Unit) -> None:
    """Choose the class of schedules that knows ``unit``, if that is no plain one."""
    if unit.is_conditional:
        from fsdp_overlap.features.negotiation.schedule import NegotiatedSchedule

        unit.schedule_class = NegotiatedSchedule
    elif unit.has_several_modules:
        from fsdp_overlap.features.module_lists import ListSchedule

        unit.schedule_class = ListSchedule


def _connect_ties(unit: Unit, ties: Sequence[Tie]) -> None:
    from fsdp_overlap.features.tied_parameters import connect_ties

    connect_ties(unit, ties)


def _install(unit: Unit, modules: Sequence[nn.Module], ctx: FsdpContext) -> None:
    """Make forwards, backwards and loads of ``modules`` those of ``unit``."""
    move_buffers(modules, ctx.device)
    before: Any = hooks.before_reading_forward if unit.owners else hooks.before_forward
    after: Any = hooks.after_reading_forward if unit.owners else hooks.after_forward
    for module in modules:
        module.__dict__["_fsdp_unit"] = unit
        # Always called, so that a forward that raised leaves the sharded parameters there too.
        module.register_forward_hook(partial(after, unit), always_call=True)
        module.register_forward_pre_hook(partial(before, unit), prepend=True, with_kwargs=True)
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


# ---- what FSDP2's own functions ask ----


def _state_of(module: nn.Module) -> Any:
    """Return what ``fully_shard.state(module)`` gives. ``None`` if ``module`` is not ours."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


patch_fully_shard_state(_state_of)
