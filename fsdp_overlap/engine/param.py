"""Parameters of a unit: ownership, the modules that register them, tensor parallelism and
subclasses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from hashlib import sha256
from math import isqrt
from operator import add
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_overlap.layout import ParamSpec
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam
from fsdp_overlap.tensor.subclasses import inner_tensors, missing_methods
from fsdp_overlap.torch_internals import (
    AsyncCollectiveTensor,
    DisableTorchFunctionSubclass,
    DTensorSpec,
    TensorMeta,
    composable_registry_key,
    given_grad_dtype,
    tells_given_grad_dtype,
)

# ---- Parameters of classes of their own, which alone know what the elements stand for ----


def is_of_own_class(value: Any) -> bool:
    """Return whether ``value`` is a parameter of a class of its own, derived from
    ``torch.nn.Parameter``, and holds its elements as a plain tensor does."""
    cls = type(value)
    if cls is nn.Parameter or nn.Parameter not in cls.__mro__ or nn.parameter.is_lazy(value):
        return False
    if not missing_methods(value):  # it says itself how it is gathered
        return False
    return bool(cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__)


def unwrap(parameter: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``parameter`` as a plain tensor. It shares memory and version
    counter."""
    with DisableTorchFunctionSubclass():
        return parameter.detach()


def check_frozen(
    label: str, parameters: Sequence[torch.Tensor], sharded: Sequence[torch.Tensor]
) -> None:
    """Raise RuntimeError if a ``sharded`` form of ``parameters``, which are never cast, requires
    grad. ``label`` names their unit."""
    for parameter, form in zip(parameters, sharded, strict=True):
        if form.requires_grad:
            raise RuntimeError(
                f"a {type(parameter).__name__} in unit {label!r} has requires_grad=True but is not "
                "trainable: call requires_grad_(False) and train adapters instead"
            )


# ---- Parameters that are DTensors of tensor parallelism ----


def tp_local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's tile of an unsharded parameter, which shares its memory: all of a plain
    one."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def concatenate_meshes(mesh: DeviceMesh, tensor_parallel: DeviceMesh) -> DeviceMesh:
    """Return the mesh that has the dimensions of both. Raise RuntimeError or TypeError unless these
    are different named dimensions of one mesh."""
    return DeviceMesh._concatenate([mesh, tensor_parallel])


def parameter_like(
    parameter: torch.Tensor, tile: torch.Tensor, requires_grad: bool
) -> nn.Parameter:
    """Return a new parameter that lies over the ranks of tensor parallelism as ``parameter`` does,
    and has its class. This rank has ``tile`` of it."""
    if is_of_own_class(parameter):
        return cast(nn.Parameter, tile.data.as_subclass(type(parameter)))
    if isinstance(parameter, DTensor):
        return nn.Parameter(_wrap(tile, parameter._spec), requires_grad)
    return nn.Parameter(tile, requires_grad)


def _give_tile(parameter: DTensor, view: torch.Tensor) -> None:
    wrapped = _wrap(view.data, parameter._spec)
    parameter.data = wrapped  # sets its dtype alone
    parameter._local_tensor = wrapped._local_tensor
    parameter._spec = wrapped._spec


def _wrap(tile: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return the DTensor that lies as ``spec`` says. It has this rank's ``tile``, and the tile's
    dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    spec = DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, tile.dtype)
    )
    return DTensor.__new__(DTensor, tile, spec, requires_grad=False)


# ---- Dtypes ----


def compute_dtype(spec: ParamSpec, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype that compute uses a parameter in."""
    is_cast = spec.dtype.is_floating_point and not (spec.keeps_dtype or spec.never_cast)
    return (mp_policy.param_dtype or spec.dtype) if is_cast else spec.dtype


def reduce_dtype(dtype: torch.dtype, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype that gradients kept in ``dtype`` are reduced in. Complex ones keep
    theirs."""
    return (mp_policy.reduce_dtype or dtype) if dtype.is_floating_point else dtype


# ---- Which parameters a unit owns ----


@dataclass
class ParamInfo:
    """A parameter of a unit and every place in the unit's modules where it is registered."""

    fqn: str
    parameter: nn.Parameter
    module: weakref.ref[nn.Module]
    """The first module that has it."""
    unit: str
    """The classes of the unit's modules."""
    registrations: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """``(module._parameters, name)``; more than one for a tied parameter."""
    is_embedding: bool = False
    never_cast: bool = False
    placement: Any = None
    """How it lies over the mesh of all parallelism, if the user named dimensions of that."""
    make_spec: Callable[..., DTensorSpec] | None = None
    """Returns the spec of its sharded form, if it lies over a mesh of its own too."""

    @property
    def where(self) -> str:
        """Name the parameter in errors."""
        return f"parameter {self.fqn!r} of {self.unit}"

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether its gradient is a DTensor, or a part of a sum over tensor parallelism."""
        is_part = self.placement is not None and self.placement.plain_grad_is_partial
        return is_part or isinstance(self.parameter, DTensor)

    def give_memory(self, view: torch.Tensor) -> None:
        """Make ``view`` this rank's tile of the unsharded parameter, with a version counter of its
        own."""
        if isinstance(self.parameter, DTensor):
            _give_tile(self.parameter, view)
        else:
            self.parameter.data = view

    def complete(self, sharded: ShardedParam) -> None:
        """Give the sharded parameter what its class has beside elements, if it has anything."""

    @cached_property
    def spec(self) -> ParamSpec:
        """What planning knows of the parameter. What the user asked for it is added while its unit
        is made."""
        parameter = self.parameter
        tile, grad_dtype = tp_local_tensor(parameter), None
        if tells_given_grad_dtype or parameter.grad_dtype != parameter.dtype:
            grad_dtype = given_grad_dtype(parameter)
        return ParamSpec(
            self.fqn,
            tuple(tile.shape),
            parameter.dtype,
            parameter.requires_grad,
            is_embedding=self.is_embedding,
            grad_dtype=grad_dtype,
            never_cast=self.never_cast,
            is_extension=not self.never_cast and type(tile) not in (torch.Tensor, nn.Parameter),
        )


def _nothing() -> None:
    """Find no unit."""


@dataclass(frozen=True)
class Owner:
    """The unit that a parameter belongs to, noted on its sharded and on its unsharded form."""

    unit: str
    fqn: str
    replaced_by: str = ""
    """What put another parameter in the place of this one. Empty if nothing did. A replaced
    parameter is no longer one of ``model.parameters()``."""
    find: Callable[[], Any] = _nothing
    """Return the unit. ``None`` if it is gone, and in a copy of this."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "find": _nothing}  # parameters are pickled, weak references cannot be


def owner_of(parameter: torch.Tensor) -> Owner | None:
    """Return the unit that ``parameter`` belongs to, or belonged to, if any."""
    return getattr(parameter, "_fsdp_owner", None)


def mark_owner(parameter: torch.Tensor, owner: Owner) -> None:
    """Note on ``parameter`` which unit it belongs to."""
    parameter._fsdp_owner = owner  # type: ignore[attr-defined]


def mark_replaced(parameter: torch.Tensor, by: str) -> None:
    """Note on ``parameter``, which belongs to a unit, that another was put in its place."""
    owner = owner_of(parameter)
    assert owner is not None
    mark_owner(parameter, replace(owner, replaced_by=by))


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's ``replicate()`` was called on ``module``, and trains what is in it."""
    return "replicate" in module.__dict__.get(composable_registry_key, ())


def modules_outside_units(
    modules: Sequence[nn.Module], units: Collection[nn.Module] = ()
) -> Iterable[tuple[str, nn.Module]]:
    """Yield ``(name, module)`` for each module in the subtrees of ``modules`` that no inner unit
    holds, parents first, each module once. If ``modules`` are several, a name begins with the place
    of its subtree among them, as in ``1.norm``. What lies within a module that torch's
    ``replicate()`` trains is left out.

    ``units``: modules that count as units, because they will be.
    """
    seen = set()
    tops = {id(module) for module in modules}
    prefixes = [""] if len(modules) == 1 else map(str, range(len(modules)))
    pending = list(zip(prefixes, modules, strict=True))[::-1]
    while pending:
        prefix, current = pending.pop()
        is_unit = "_fsdp_unit" in current.__dict__ or current in units
        if id(current) in seen or (is_unit and id(current) not in tops) or is_replicated(current):
            continue
        seen.add(id(current))
        yield prefix, current
        children = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in current._modules.items()
            if child is not None
        ]
        pending.extend(reversed(children))


class UnownedParameters:
    """Finds trainable parameters in the modules of a unit that belong to no unit, because they were
    registered after it was made. Each rank would train them on its own data alone.

    ``ignored``: the parameters that :func:`fully_shard` was told to leave as they are. What takes
    their places later is left alone too.
    """

    registrations = -1
    """What was counted when they were last looked for."""

    def __init__(self, modules: Sequence[nn.Module], ignored: frozenset[nn.Parameter]) -> None:
        self._ignored = ignored
        outside = parameters_outside_units(modules if ignored else ())
        self._ignored_names = {fqn for fqn, parameter, *_ in outside if parameter in ignored}
        _count_registrations()

    def find(self, modules: Sequence[nn.Module], own: Iterable[torch.Tensor]) -> str | None:
        """Return the name of such a parameter in ``modules``, or ``None``. ``own`` are the
        parameters of the unit, in both forms. What torch's DDP or FSDP2 trains is left out."""
        self.registrations = -1
        known = {*map(id, own), *map(id, self._ignored)}
        trained = {
            inner
            for module in modules
            for inner in module.modules()
            if isinstance(inner, (nn.parallel.DistributedDataParallel, FSDPModule))
        }
        for fqn, parameter, *_ in parameters_outside_units(modules, trained):
            is_known = id(parameter) in known or fqn in self._ignored_names
            if parameter.requires_grad and not is_known and owner_of(parameter) is None:
                return fqn
        self.registrations = REGISTERED.count
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> UnownedParameters:
        copied = UnownedParameters((), frozenset(deepcopy(p, memo) for p in self._ignored))
        copied._ignored_names = self._ignored_names
        return copied


class Registered:
    """Counts the parameters and modules that modules of this process have registered."""

    count = 0


REGISTERED = Registered()  # an object: Dynamo of torch 2.11 traces no assignment to a class


@cache
def _count_registrations() -> None:
    def count(*registered: Any) -> None:
        REGISTERED.count += 1

    register_module_module_registration_hook(count)
    register_module_parameter_registration_hook(count)


def parameters_outside_units(
    modules: Sequence[nn.Module], units: Collection[nn.Module] = ()
) -> Iterable[tuple[str, nn.Parameter, nn.Module, str]]:
    """Yield ``(fqn, parameter, module, name)`` for each place where a module that
    :func:`modules_outside_units` finds has registered a parameter."""
    for prefix, module in modules_outside_units(modules, units):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter, module, name


def move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move buffers to where the unit computes, because they are not sharded."""
    for _, owner in modules_outside_units(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and buffer.device.type not in (device.type, "meta"):
                buffer.data = buffer.to(device)


def owned_parameters(
    modules: Sequence[nn.Module],
    ignored: Collection[nn.Parameter] = (),
    units: Collection[nn.Module] = (),
) -> list[ParamInfo]:
    """Return the parameters that a unit of ``modules`` owns, each once, in registration order,
    without those that are ``ignored``. ``units``: modules that will be units."""
    kind, ignored_ids = module_class_name(modules), {id(parameter) for parameter in ignored}
    by_id: dict[int, ParamInfo] = {}
    for fqn, parameter, owner, name in parameters_outside_units(modules, units):
        if id(parameter) in ignored_ids:
            continue
        item = by_id.setdefault(id(parameter), ParamInfo(fqn, parameter, weakref.ref(owner), kind))
        item.registrations.append((owner._parameters, name))
        item.is_embedding |= isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        item.never_cast = type(parameter) is not nn.Parameter and is_of_own_class(parameter)
    return list(by_id.values())


def module_class_name(modules: Sequence[nn.Module]) -> str:
    """Return the names of the modules' classes as the user wrote them."""
    return ", ".join(type(module).__name__.removeprefix("FSDP") for module in modules)


def plain_class(cls: type) -> Any:
    """Return the class that the user wrote, without what :func:`fully_shard` added."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


# ---- Where modules have registered parameters ----

Registration = tuple[dict[str, Any], str, torch.Tensor, ShardedParam]
"""A module's ``_parameters``, the name in it, the unsharded parameter and the sharded one."""


class ParamModuleInfo:
    """The registrations of one param group. A parameter that modules share has several."""

    def __init__(
        self,
        owned: Sequence[ParamInfo],
        parameters: Sequence[torch.Tensor],
        sharded: Sequence[ShardedParam],
    ) -> None:
        self._indices = {id(parameter): index for index, parameter in enumerate(sharded)}
        found: list[Registration] = [
            (table, name, its_parameter, its_sharded)
            for item, its_parameter, its_sharded in zip(owned, parameters, sharded, strict=True)
            for table, name in item.registrations
        ]
        self.registrations = found
        self.places = [table for table, *_ in found], [name for _, name, *_ in found]
        """The tables, and the name in each."""
        self.unsharded = [parameter for *_, parameter, _ in found]

    def __iter__(self) -> Iterator[Registration]:
        return iter(self.registrations)

    def index_of(self, sharded: torch.Tensor) -> int | None:
        """Return the index of a sharded parameter in the param group. ``None`` if it is none of
        it."""
        return self._indices.get(id(sharded))

    def replaced(self) -> str | None:
        """Return the name of a parameter in whose place something else is registered."""
        for table, name, parameter, sharded in self.registrations:
            current = table.get(name)
            if current is not sharded and current is not parameter:
                return name
        return None

    def check(self, label: str) -> None:
        """Raise RuntimeError if something is registered in place of a parameter. ``label`` names
        the unit."""
        for table, name, parameter, sharded in self.registrations:
            current = table.get(name)
            if current is not sharded and current is not parameter:
                refuse_replaced(name, label, current, sharded)

    def to_sharded(self) -> None:
        """Register the sharded parameters."""
        for table, name, _, sharded in self.registrations:
            table[name] = sharded

    def to_none(self) -> None:
        """Register nothing, so that what is done to all parameters of a module skips these."""
        for table, name, _, _ in self.registrations:
            table[name] = None

    def assigned(self) -> dict[int, torch.Tensor]:
        """Return the tensors that somebody else has registered in place of parameters, by the index
        of the parameter in the param group. If a shared parameter has several, the last. Tensors on
        the meta device are left out."""
        return {
            self._indices[id(sharded)]: current
            for table, name, parameter, sharded in self.registrations
            if (current := table.get(name)) is not sharded
            and current is not parameter
            and isinstance(current, torch.Tensor)
            and not current.is_meta
        }


def difference(given: Any, sharded: Any) -> str:
    """Return what keeps ``given``, which somebody registered in place of ``sharded``, from becoming
    the sharded parameter, in words. Empty if nothing does."""
    if not (isinstance(given, nn.Parameter) and isinstance(given, DTensor)):
        return f"a {type(given).__name__} that is not sharded"
    if "unsharded_form" in vars(sharded):
        return f"one that is not the {type(sharded.unsharded_form).__name__} that was sharded"
    for what, its, own in (
        ("shape", tuple(given.shape), tuple(sharded.shape)),
        ("mesh", given.device_mesh, sharded.device_mesh),
        ("placements", given.placements, sharded.placements),
        ("local shape", tuple(given._local_tensor.shape), tuple(sharded._local_tensor.shape)),
    ):
        if its != own:
            return f"one of {what} {its}, not {own}"
    return "one on the meta device" if given._local_tensor.is_meta else ""


def refuse_replaced(name: str, label: str, given: Any, sharded: ShardedParam) -> NoReturn:
    what = difference(given, sharded) or "another, and either its unit has run or weights are tied"
    raise RuntimeError(
        f"parameter {name!r} of unit {label!r} was replaced after fully_shard() by {what}, which "
        "would not be trained: assign and tie parameters before, or, before the first forward, tie "
        "those of one unit and assign to each, under all its names, one DTensor of the same shape, "
        "mesh and placements; afterwards edit them in place, under torch.no_grad(), or by "
        "load_state_dict(assign=True). torch.func.functional_call() replaces them too: call the "
        "model itself, or functional_call() with an unsharded copy of it"
    )


# ---- Optimizers of parameters that were replaced: Note [replaced parameters] ----

# The number of replacements, and of the optimizer's parameters, when it was last looked at.
_looked_at: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
_replacements = 0


def record_replacement() -> None:
    """Note that parameters were replaced. Each optimizer is looked at in its next step."""
    global _replacements
    if not _replacements:
        register_optimizer_step_pre_hook(_before_step)
    _replacements += 1


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError if the optimizer has a parameter that was replaced. Look only if something
    has changed since the last look."""
    now = _replacements, sum([len(group["params"]) for group in optimizer.param_groups])
    if _looked_at.get(optimizer) == now:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is not None and owner.replaced_by:
                _refuse_step(optimizer, owner)
    _looked_at[optimizer] = now


def _refuse_step(optimizer: Optimizer, owner: Owner) -> NoReturn:
    raise RuntimeError(
        f"{type(optimizer).__name__} was made before {owner.replaced_by}, which put another "
        f"parameter in the place of {owner.fqn!r} of {owner.unit}: this step would change nothing "
        "that the model computes with; make the optimizer afterwards, from model.parameters()"
    )


# ---- Hashes of what parameters held when they were sharded ----

# Odd, with about as many ones as zeros: a small difference in a factor changes many bits of the
# product.
FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB

# Up to this many elements go into a hash one by one.
FEW = 4096

# Stands for the hash of values that are not known any more.
UNKNOWN = -(2**63)


def hash_tensor(values: torch.Tensor) -> torch.Tensor:
    """Return a number that almost surely differs if the bits of ``values`` or their order differ.
    It is a 0-dimensional tensor on their device, so the host does not wait for it. Take little
    memory, and two passes over ``values``."""
    integers = {1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32)
    bits = values.resolve_conj().resolve_neg().reshape(-1).view(integers)
    # The bits as a matrix: every element counts in the sum of its row and in that of its column.
    # Width and height are odd, because a sum of an odd number of equal elements tells which element
    # that is, whatever the width of integers.
    width = isqrt(bits.numel()) | 1
    height = bits.numel() // width if bits.numel() > FEW else 0
    height = max(0, height - 1 + height % 2)
    matrix = bits[: height * width].view(height, width)
    sums = [matrix.sum(0, dtype=integers), matrix.sum(1, dtype=integers), bits[matrix.numel() :]]
    mixed = torch.cat(sums).long()
    mixed = mixed * FACTORS[0] + torch.arange(len(mixed), device=mixed.device) * FACTORS[1]
    mixed = (mixed ^ (mixed >> 31)) * FACTORS[2]
    return (mixed ^ (mixed >> 29)).sum()


def hash_of(content: bytes) -> int:
    """Return a number of 56 bits that almost surely differs if ``content`` differs."""
    return int.from_bytes(sha256(content).digest()[:7], "little")


class ParamHashes:
    """Hashes of ``values``, the unsharded parameters of a param group as this rank had them. They
    are valid while the shard is still of ``version``."""

    def __init__(self, values: Sequence[torch.Tensor], version: int) -> None:
        parts = [[v] if type(v) is torch.Tensor else inner_tensors(v) for v in values]
        are_known = all(parts) and not any(value.is_meta for value in values)
        self._hashes = [reduce(add, map(hash_tensor, inner)) for inner in parts if are_known]
        self._count = len(values)
        self._version = version

    def hashes(self, version: int) -> list[int]:
        """Return the hash of each parameter. ``UNKNOWN`` if ``version``, that of the shard now,
        is not the first, or if the values were on the meta device. The host waits for them."""
        if not self._hashes or version != self._version:
            return [UNKNOWN] * self._count
        device = self._hashes[0].device  # some may be on the host
        numbers: list[int] = torch.stack([number.to(device) for number in self._hashes]).tolist()
        return numbers

    def move(self, version: int, new_version: int) -> None:
        """Follow the parameters into another shard. The old one was of ``version``, the new one is
        of ``new_version``."""
        self._version = new_version if self._version == version else -1
