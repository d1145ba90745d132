"""The entry point, :func:`fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_overlap.context import FsdpContext
from fsdp_overlap.engine.unit import unit_of
from fsdp_overlap.fsdp_module import FSDPModule
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.torch_internals import (
    is_replicated,
    patch_fully_shard_state,
    record_fully_sharded,
)
from fsdp_overlap.unit_init import make_unit

# ---- fully_shard() ----

if TYPE_CHECKING:
    from fsdp_overlap.features.quantized.policy import QuantizedCommPolicy
    from fsdp_overlap.tensor.spmd_mesh import DataParallelMeshDims, SPMDMesh

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
    ``module``'s subtree that no earlier unit owns. It reads those that an earlier unit beside it
    owns, as of tied weights: that unit is gathered for its forwards and backwards too. Parameters
    become ``RaggedDTensor`` parameters, in place, or under the layout ``PerTensor()`` DTensors as
    FSDP2's are. If the layout keeps matrices whole, balance them over all units by
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
    if ctx is not None and not isinstance(ctx, FsdpContext):
        raise TypeError(
            f"ctx is a {type(ctx).__name__}, not an FsdpContext; pass a mesh as mesh=..."
        )
    spmd = None
    if dp_mesh_dims is not None:
        spmd = _spmd_mesh(mesh, dp_mesh_dims)
        mesh = spmd.data
    if ctx is None:
        ctx = FsdpContext(mesh)
        ctx.is_implicit = True
    unit = make_unit(
        modules,
        ctx,
        ctx.mesh if mesh is None else mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        comm_policy=comm_policy,
        ignored=frozenset(ignored_params or ()),
        spmd=spmd,
        conditional=conditional,
    )
    unit.schedule_class = _schedule_class(len(modules) > 1, conditional)
    for member, fsdp_class in zip(modules, classes, strict=True):
        object.__setattr__(member, "__class__", fsdp_class)  # modules may guard their attributes
        record_fully_sharded(member)
    return cast(FSDPModule | Sequence[FSDPModule], module)


def _schedule_class(is_list: bool, conditional: bool) -> type[Schedule]:
    """Return the class of schedules for a unit."""
    if conditional:
        from fsdp_overlap.features.negotiation.schedule import NegotiatedSchedule

        return NegotiatedSchedule
    if is_list:
        from fsdp_overlap.features.module_lists import ListSchedule

        return ListSchedule
    return Schedule


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
        mesh = _spmd_mesh(mesh, dims).data
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


def _spmd_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> SPMDMesh:
    from fsdp_overlap.tensor.spmd_mesh import spmd_mesh

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
            raise TypeError(
                f"{cls.__name__} cannot be sharded, because a class cannot be made that derives "
                f"from FSDPModule and from {cls.__name__}, as class FSDP{cls.__name__}(FSDPModule, "
                f"{cls.__name__}) would be: {error}. Make that possible, for example by a "
                "metaclass whose arguments have defaults, or shard the modules within it"
            ) from error
    return _fsdp_classes[cls]


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


def _state_of(module: nn.Module) -> Any:
    """Return what ``fully_shard.state(module)`` gives. ``None`` if ``module`` is not ours."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


patch_fully_shard_state(_state_of)
