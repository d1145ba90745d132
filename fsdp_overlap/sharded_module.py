"""How a sharded module is moved, copied, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fsdp_overlap.engine import hooks
from fsdp_overlap.engine.bucket import Bucket
from fsdp_overlap.engine.casting import cast as cast_bucket
from fsdp_overlap.engine.casting import refusal
from fsdp_overlap.engine.context import context_of
from fsdp_overlap.engine.full_mesh import FullMesh
from fsdp_overlap.engine.grad_dtypes import follow_grad_dtypes
from fsdp_overlap.engine.late_memory import announce_unsharded, materialize
from fsdp_overlap.engine.ownership import (
    modules_outside_units,
    move_buffers,
    parameters_outside_units,
)
from fsdp_overlap.engine.tiles import parameter_like, tile_in
from fsdp_overlap.engine.unit import Unit, unit_of
from fsdp_overlap.engine.units import unit_names
from fsdp_overlap.sharding import make_unit
from fsdp_overlap.tensor.ragged_dtensor import attributes_of


@contextmanager
def hidden(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Takes the parameters of ``buckets`` out of their modules inside the ``with`` block."""
    for bucket in buckets:
        bucket.places.use_none()
    try:
        yield
    finally:
        for bucket in buckets:
            bucket.places.use_sharded()


def _keeping_dtypes(
    policy: MixedPrecisionPolicy, parameters: set[nn.Parameter]
) -> MixedPrecisionPolicy:
    """The policy of a copy, in which ``parameters`` keep their dtype. ``policy`` itself may know
    the original parameters by identity, and the copy has others."""
    if not parameters:
        return policy
    changes: Any = {"param_dtype_override_fn": lambda p: p.dtype if p in parameters else None}
    return replace(policy, **changes)


@dataclass(frozen=True)
class _MeshInfo:
    mesh: DeviceMesh
    spmd_mesh: DeviceMesh | None = None
    dp_mesh_dims: FullMesh | None = None


@dataclass(frozen=True)
class _On:
    """Says over which mesh a parameter is sharded and how, in the form that ``shard_placement_fn``
    uses."""

    mesh_info: _MeshInfo
    placement: Shard


class ShardedModule(nn.Module):
    """The methods of nn.Module that a sharded module overrides, and what all verbs of
    :class:`FsdpModule` use."""

    _fsdp_unit: Unit

    def __init_subclass__(cls) -> None:
        """Do not call that of the user's class, which may want arguments, register each subclass,
        or wrap methods once more."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a module of the plain class, because a new module is not a unit. A slice of a
        sharded container comes here."""
        return plain_class(cls)(*args, **kwargs)

    def reshard(self) -> None:
        """Frees this unit's full buffers and registers its sharded parameters.

        Raises:
            RuntimeError: a parameter was replaced. Or the unsharded parameters were edited, and the
                edit is lost.
        """
        unit, context = self._fsdp_unit, context_of(self._fsdp_unit)
        unit.check_places()
        lost = unit.changed() if unit.is_gathered else None
        unit.use_sharded()
        if unit.is_gathered:
            gathers = context.schedule.gathers
            gathers.take_out_of_graphs(unit)
            gathers.release(unit)
            gathers.flush()
        if unit.is_offloaded:
            context.transfers.finish_reading()
        if lost is not None:
            raise RuntimeError(lost)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModule:
        """Does the work of ``to_empty()``, ``to()`` and the like. A unit on the meta device gets
        memory. A unit that has not run yet may be cast. A unit that is where it should be stays as
        it is. Opaque parameters always stay as they are.

        Raises:
            RuntimeError: the shards would move to another device, or would be cast after a forward.
                Nothing was changed then.
        """
        for unit in self._units(recurse):
            unit.follow_ties()
            _check_apply(unit, fn)
        shards = self._shards()
        with torch.no_grad():
            applied = [fn(shard) for _, shard in shards]
        context = context_of(self._fsdp_unit)
        device = context.device
        with hidden(self._fsdp_unit.buckets):
            super()._apply(fn, recurse)
        if self._fsdp_unit.is_offloaded:  # shards stay on the host, buffers do not
            move_buffers([self], device)
        if any(
            bucket.is_meta and not result.is_meta
            for (bucket, _), result in zip(shards, applied, strict=True)
        ):
            materialize(self._fsdp_unit, device)
            context.unsettle()
        else:
            for (bucket, shard), result in zip(shards, applied, strict=True):
                if result.dtype != shard.dtype:
                    cast_bucket(self._fsdp_unit, bucket, result)
                elif result is not shard:
                    shard.copy_(result)
        announce_unsharded(self._fsdp_unit)
        return self

    def _shards(self) -> list[tuple[Bucket, torch.Tensor]]:
        """The tensors that :meth:`_apply` works on: the shards of the unit, without what is opaque.
        If the unit has several modules, each of them is called, and works on the ranges of its own
        parameters. So it does if they are of a class of their own."""
        unit = self._fsdp_unit
        buckets = [bucket for bucket in unit.buckets if not bucket.is_opaque]
        mine = {id(module._parameters) for _, module in modules_outside_units([self])}
        flat = [] if unit.is_list else [each for each in buckets if not each.is_extension]
        return [(bucket, bucket.shard) for bucket in flat] + [
            (bucket, sharded._local_tensor)
            for bucket in buckets
            if bucket not in flat
            for item, sharded in zip(bucket.owned, bucket.sharded_parameters, strict=True)
            if any(id(registered) in mine for registered, _ in item.places)
        ]

    def _load_from_state_dict(self, *args: Any) -> None:
        # A unit on the meta device keeps what load_state_dict(assign=True) has registered so far,
        # and waits for the parameters of its other modules.
        self._fsdp_unit.follow_ties()
        if not self._fsdp_unit.is_meta and not self._is_in_use():
            self._fsdp_unit.use_sharded()  # in place of what a load that failed has left
            self.reshard()
        super()._load_from_state_dict(*args)

    def _save_to_state_dict(self, *args: Any) -> None:
        if not self._is_in_use():
            self.reshard()  # shards are saved, also after an explicit unshard()
        super()._save_to_state_dict(*args)

    def _is_in_use(self) -> bool:
        return context_of(self._fsdp_unit).schedule.is_in_use(self._fsdp_unit)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Makes a copy that is sharded in the same way, with memory and a context of its own.

        A unit is copied as a whole, with all its modules if they are several. The copy does not
        take over what the unit was told to prefetch; it learns its own order.

        Raises:
            RuntimeError: the unit is a list of modules, and one of them was deleted.
        """
        unit = self._fsdp_unit
        if not unit.is_complete:
            raise RuntimeError(
                f"unit {unit.name!r} is of several modules, of which one was deleted, and cannot "
                "be copied without it: keep, and copy, the module that holds all of them"
            )
        follow_grad_dtypes(unit.buckets)
        kept = _copy_parameters(unit, memo)
        if any(not item.places for bucket in unit.buckets for item in bucket.owned):
            raise RuntimeError(
                f"{unit.name!r} has weights that were tied after fully_shard(), and cannot be "
                "copied: tie them before"
            )
        originals = unit.modules
        duplicates = []
        for module in originals:
            plain = plain_class(type(module))
            memo[id(module)] = duplicate = plain.__new__(plain)
            duplicates.append(duplicate)
        for bucket in unit.buckets:
            # Not before, because attributes may lead to modules and other parameters.
            for parameter, sharded in zip(
                bucket.parameters, bucket.sharded_parameters, strict=True
            ):
                attributes = attributes_of(parameter) | attributes_of(sharded)
                del attributes["_fsdp_owner"]
                copied = memo[id(parameter)]
                own = vars(tile_in(copied))  # of its class, if it has one of its own
                given = {name: value for name, value in attributes.items() if name not in own}
                vars(copied).update(deepcopy(given, memo))
        for module, duplicate in zip(originals, duplicates, strict=True):
            state = hooks.without_hooks(module.__getstate__())
            del state["_fsdp_unit"]
            duplicate.__setstate__(deepcopy(state, memo))
        context = deepcopy(context_of(unit), memo)
        meshes = {}
        for bucket in unit.buckets:
            domain = context.domain_of(bucket.domain.mesh)
            domain.plans.place(duplicates, [bucket.plan])
            for item in bucket.owned:
                mesh_info = _MeshInfo(domain.mesh)
                if (lies := item.on_full_mesh) is not None:
                    mesh_info = _MeshInfo(domain.mesh, lies.full.mesh, lies.full)
                meshes[memo[id(item.parameter)]] = _On(mesh_info, Shard(item.cut_dim))
        copied_unit = make_unit(
            duplicates,
            context,
            unit.mesh,
            reshard_after_forward=unit.reshard_after_forward,
            shard_placement_fn=meshes.__getitem__,
            mp_policy=_keeping_dtypes(unit.mp_policy, kept),
            offload_policy=unit.offload_policy,
            comm_policy=unit.comm_policy,
            # What the unit does not own, the copy does not: ignored, or frozen and added later.
            ignored=frozenset(
                parameter
                for _, parameter, *_ in parameters_outside_units(duplicates)
                if parameter not in meshes
            ),
        )
        copied_unit.unowned = deepcopy(unit.unowned, memo)
        for module, duplicate in zip(originals, duplicates, strict=True):
            object.__setattr__(duplicate, "__class__", type(module))
        for mine, its in zip(unit.buckets, copied_unit.buckets, strict=True):
            # For an optimizer that is copied together with the model.
            memo.update(zip(map(id, mine.sharded_parameters), its.sharded_parameters, strict=True))
        unit.copy_to(copied_unit)
        return cast(nn.Module, memo[id(self)])

    def _units(self, recurse: bool) -> Iterable[Unit]:
        modules = self.modules() if recurse else [self]
        found = (unit for unit in map(unit_of, modules) if unit is not None)
        return dict.fromkeys(found)  # the modules of a list share one unit

    def _check_outermost(self, verb: str) -> None:
        unit = self._fsdp_unit
        if unit in unit_names(context_of(unit).units):
            raise RuntimeError(
                f"{verb}() is for the root, and unit {unit.name!r} lies within another: call it on "
                "the outermost"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: save its state_dict()")


def _check_apply(unit: Unit, fn: Any) -> None:
    """Checks that ``fn``, which ``_apply()`` is to call, leaves shards where they can be.

    Raises:
        RuntimeError: it does not.
    """
    has_run = context_of(unit).was_settled
    for bucket in unit.buckets:
        with torch.no_grad():
            result = fn(bucket.shard.new_empty(0))
        if bucket.is_opaque:  # left alone, whatever fn does to numbers
            result = result.to(bucket.shard.dtype)
        if (refused := refusal(unit, bucket, result, has_run)) is not None:
            raise RuntimeError(refused)


def plain_class(cls: type) -> Any:
    """The class that the user wrote, without what :func:`fully_shard` added."""
    return next(base for base in cls.__mro__ if not issubclass(base, ShardedModule))


def _copy_parameters(unit: Unit, memo: dict[int, Any]) -> set[nn.Parameter]:
    """Notes in ``memo`` a parameter without values for each of the unit's. Returns those that keep
    their dtype."""
    kept: set[nn.Parameter] = set()
    for bucket in unit.buckets:
        device = bucket.device if bucket.is_opaque else bucket.shard.device
        for spec, item, sharded in zip(
            bucket.plan.specs, bucket.owned, bucket.sharded_parameters, strict=True
        ):
            # make_unit() takes this over. Of its values only the shard is copied, below.
            empty = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            if bucket.is_extension:
                empty = sharded._local_tensor.new_zeros(spec.shape)
            copied = parameter_like(item.parameter, empty, spec.requires_grad)
            if spec.grad_dtype is not None:
                copied.grad_dtype = spec.grad_dtype
            memo[id(item.parameter)] = memo[id(sharded)] = copied
            memo.update((alias, empty.view_as(empty)) for alias in item.aliases)
            if spec.keeps_dtype:
                kept.add(copied)
    return kept
