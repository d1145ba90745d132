"""Moves, copies and state dicts of a module that is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.runtime import hooks
from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.domain import Domain
from fsdp_overlap.runtime.ownership import modules_outside_units, move_buffers
from fsdp_overlap.runtime.tensor_parallel import parameter_like
from fsdp_overlap.runtime.unit import Unit, unit_names, unit_of
from fsdp_overlap.sharding import make_unit
from fsdp_overlap.tensor.sharded_tensor import attributes_of


@contextmanager
def hidden(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Takes the parameters of ``buckets`` out of their modules meanwhile."""
    for bucket in buckets:
        bucket.use_none()
    try:
        yield
    finally:
        for bucket in buckets:
            bucket.use_sharded()


def _keeping_dtypes(
    policy: MixedPrecisionPolicy, parameters: set[nn.Parameter]
) -> MixedPrecisionPolicy:
    """``policy`` for a copy, of which it left ``parameters`` their dtype: it may know them by
    identity, and the copy's are others."""
    if not parameters:
        return policy
    changes: Any = {"param_dtype_override_fn": lambda p: p.dtype if p in parameters else None}
    return replace(policy, **changes)


@dataclass(frozen=True)
class _On:
    """Names a parameter's mesh as ``shard_placement_fn`` does."""

    mesh_info: Domain
    placement: None = None


class ShardedModule(nn.Module):
    """What :class:`FsdpModule` does that nn.Module does otherwise."""

    _fsdp_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new module of the class is not a unit: the plain class makes it, as where a slice of a
        container makes another."""
        return plain_class(cls)(*args, **kwargs)

    def reshard(self) -> None:
        """Frees this unit's full buffers and registers its sharded parameters.

        Raises:
            RuntimeError: the unsharded ones were edited, which is lost.
        """
        unit = self._fsdp_unit
        lost = unit.changed() if unit.is_gathered else None
        unit.use_sharded()
        if unit.is_gathered:
            gathers = unit.context.schedule.gathers
            gathers.unkeep(unit)
            gathers.release(unit)
            gathers.flush()
        if unit.is_offloaded:
            unit.context.finish_reading()
        if lost is not None:
            raise RuntimeError(lost)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModule:
        """What ``to_empty()``, ``to()`` and the like do to a module: gives memory to a unit on the
        meta device, and leaves alone a unit that is where it should be.

        Raises:
            RuntimeError: the shards would change dtype or device. Nothing was changed then.
        """
        shards = self._shards()
        with torch.no_grad():
            applied = [fn(shard) for _, shard in shards]
        device = self._fsdp_unit.context.device
        for (bucket, shard), result in zip(shards, applied, strict=True):
            is_moved = result.device != shard.device
            is_given_memory = bucket.is_meta and result.device.type == bucket.rest_device.type
            if result.dtype != shard.dtype or (is_moved and not is_given_memory):
                raise RuntimeError(
                    f"{type(self).__name__} is sharded, its shards are {shard.dtype} on "
                    f"{shard.device}: move or cast a module (to(), cuda(), half(), ...) "
                    f"before fully_shard(); from meta, to_empty(device={bucket.rest_device.type!r})"
                )
        with hidden(self._fsdp_unit.buckets):
            super()._apply(fn, recurse)
        if self._fsdp_unit.is_offloaded:  # whose shards alone are on the host
            move_buffers([self], device)
        if any(
            bucket.is_meta and not result.is_meta
            for (bucket, _), result in zip(shards, applied, strict=True)
        ):
            self._fsdp_unit.materialize(device)
        else:
            for (_, shard), result in zip(shards, applied, strict=True):
                if result is not shard:
                    shard.copy_(result)
        self._fsdp_unit.announce_unsharded()
        return self

    def _shards(self) -> list[tuple[Bucket, torch.Tensor]]:
        """What a function of tensors is applied to: the unit's shards, but in a unit of several
        modules, each of which is asked, the ranges of this one's parameters."""
        unit = self._fsdp_unit
        if not unit.is_list:
            return [(bucket, bucket.shard) for bucket in unit.buckets]
        mine = {id(module._parameters) for _, module in modules_outside_units([self])}
        return [
            (bucket, sharded.to_local())
            for bucket in unit.buckets
            for item, sharded in zip(bucket.owned, bucket.sharded_parameters, strict=True)
            if any(id(registered) in mine for registered, _ in item.places)
        ]

    def _load_from_state_dict(self, *args: Any) -> None:
        if not self._fsdp_unit.is_meta:  # which may wait for what is assigned to more modules
            self._show_sharded()
        super()._load_from_state_dict(*args)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._show_sharded()
        super()._save_to_state_dict(*args)

    def _show_sharded(self) -> None:
        """After an explicit :meth:`unshard`: what is loaded and saved are the shards."""
        if not self._fsdp_unit.context.schedule.is_in_use(self._fsdp_unit):
            self.reshard()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy, sharded likewise, with memory and a context of its own. What is one unit is
        copied as one: all modules of a list. What it should prefetch is left to its own order.

        Raises:
            RuntimeError: of a list of modules, one was deleted.
        """
        unit = self._fsdp_unit
        if not unit.is_complete:
            raise RuntimeError(
                f"unit {unit.name!r} is of several modules, of which one was deleted, and cannot "
                "be copied without it: keep, and copy, the module that holds all of them"
            )
        kept = set()
        for bucket in unit.buckets:
            for spec, parameter, sharded in zip(
                bucket.plan.specs, bucket.parameters, bucket.sharded_parameters, strict=True
            ):
                # For make_unit() to take over. Only the shards of their values are copied, below.
                empty = torch.empty(spec.shape, dtype=spec.dtype, device=bucket.shard.device)
                copied = parameter_like(parameter, empty, spec.requires_grad)
                attributes = attributes_of(parameter) | attributes_of(sharded)
                vars(copied).update(deepcopy(attributes, memo))
                del copied.__dict__["_fsdp_owner"]
                memo[id(parameter)] = memo[id(sharded)] = copied
                if spec.keeps_dtype:
                    kept.add(copied)
        originals = unit.modules
        duplicates = []
        for module in originals:
            plain = plain_class(type(module))
            memo[id(module)] = duplicate = plain.__new__(plain)
            duplicates.append(duplicate)
        for module, duplicate in zip(originals, duplicates, strict=True):
            state = hooks.without_hooks(module.__getstate__())
            del state["_fsdp_unit"]
            duplicate.__setstate__(deepcopy(state, memo))
        context = deepcopy(unit.context, memo)
        meshes = {}
        for bucket in unit.buckets:
            domain = context.domain_of(bucket.domain.mesh)
            domain.plans.place(duplicates, [bucket.plan])
            for parameter in bucket.parameters:
                meshes[memo[id(parameter)]] = _On(domain)
        copied_unit = make_unit(
            duplicates,
            context,
            unit.mesh,
            reshard_after_forward=unit.reshard_after_forward,
            shard_placement_fn=meshes.__getitem__,
            mp_policy=_keeping_dtypes(unit.mp_policy, kept),
            offload_policy=unit.offload_policy,
            ignored=frozenset(deepcopy(parameter, memo) for parameter in unit.ignored),
        )
        for module, duplicate in zip(originals, duplicates, strict=True):
            duplicate.__class__ = type(module)
        for mine, its in zip(unit.buckets, copied_unit.buckets, strict=True):
            # For an optimizer that is copied together with the model.
            memo.update(zip(map(id, mine.sharded_parameters), its.sharded_parameters, strict=True))
        unit.copy_to(copied_unit)
        return cast(nn.Module, memo[id(self)])

    def _units(self, recurse: bool) -> Iterable[Unit]:
        modules = self.modules() if recurse else [self]
        found = (unit for unit in map(unit_of, modules) if unit is not None)
        return dict.fromkeys(found)  # a list of modules shares one

    def _check_outermost(self, verb: str) -> None:
        unit = self._fsdp_unit
        if unit in unit_names(unit.context.units):
            raise RuntimeError(
                f"{verb}() is for the root, and unit {unit.name!r} lies within another: call it on "
                "the outermost"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: save its state_dict()")


def plain_class(cls: type) -> Any:
    """The class as the user wrote it."""
    return next(base for base in cls.__mro__ if not issubclass(base, ShardedModule))
