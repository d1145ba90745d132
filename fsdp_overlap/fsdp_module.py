"""What :func:`fully_shard` gives a module: the verbs of sharding, and copies, moves and state dicts
that know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.comm.collectives import CustomComms
from fsdp_overlap.runtime import hooks
from fsdp_overlap.runtime.bucket import Bucket
from fsdp_overlap.runtime.context import unit_of
from fsdp_overlap.runtime.ownership import modules_outside_units, move_buffers
from fsdp_overlap.runtime.unit import Unit
from fsdp_overlap.tensor.sharded_tensor import attributes_of

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Makes compute wait for the all-gather and registers the unsharded parameters."""
        if self._unit is not None:
            self._unit.wait()
            self._unit.use_unsharded()
            self._unit = None


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


class FsdpModule(nn.Module):
    """Mixed into the class of every module given to :func:`fully_shard`."""

    _fsdp_unit: Unit

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, not those of inner units, and registers them in the
        module until :meth:`reshard` or the end of its next forward. Collective over the mesh.

        With ``async_op`` returns a handle; the parameters may be used after its ``wait()``.
        """
        unit = self._fsdp_unit
        unit.context.settle()
        unit.follow_trainability()
        unit.watch_gradients()
        gathers = unit.context.schedule.gathers
        gathers.after_edits()
        gathers.use(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this unit's full buffers and registers its sharded parameters."""
        unit = self._fsdp_unit
        unit.use_sharded()
        if unit.is_gathered:
            gathers = unit.context.schedule.gathers
            gathers.release(unit)
            gathers.flush()
        if unit.is_offloaded:
            unit.context.finish_reading()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients. Without, they are summed on each rank, unsharded and
        in the reduce dtype, until a backward that does: gradient accumulation without
        communication. ``zero_grad()`` does not know of such sums; ``ctx.reset()`` drops them."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync
            unit.reducing.across_copies = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a mesh ``(replicate, shard)``: whether backward reduces gradients across copies too.
        Without, they are reduced among shards and summed, until a backward that does: gradient
        accumulation with the communication inside a node alone. ``.grad`` is what it was until
        then. :meth:`set_requires_gradient_sync` sets this too."""
        for unit in self._units(recurse):
            unit.reducing.across_copies = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of this unit's gradients over all ranks of its mesh is divided by, instead
        of their number.

        Experts that are sharded over a part of the ranks, and get tokens from all of them, want
        the number of all.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): use a positive number")
        self._fsdp_unit.reducing.divisor = float(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives of this unit's gradients must be sums, and divisions apart."""
        self._fsdp_unit.reducing.sums_only = enable

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Calls ``hook`` with what was reduced, this rank's range of the unit's gradients, flat and
        in the reduce dtype, before it becomes or is added to ``.grad``: once for each bucket, after
        the reduction across copies if there are any. It may edit the tensor in place.

        Args:
            hook: runs on the lane of the reduction, on a CPU when compute waits for that.
            stream: the CUDA stream to run it on instead; not with copies.

        Raises:
            ValueError: ``stream`` is given on a mesh ``(replicate, shard)``.
        """
        unit = self._fsdp_unit
        if stream is not None and any(bucket.domain.copies > 1 for bucket in unit.buckets):
            raise ValueError(
                "set_all_reduce_hook(stream=...) on a mesh (replicate, shard): the hook runs where "
                "the reduction across copies does; leave stream out"
            )
        unit.reducing.hook, unit.reducing.hook_stream = hook, stream

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Whether reductions run on a process group of their own, beside all-gathers, as they do
        unless the context was made with ``separate_groups=False``. Must be called on every rank of
        the mesh, between iterations."""
        for unit in self._units(recurse):
            unit.separates_reductions = enable
            unit.context.unsettle()

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gathers this unit by ``comm``, ``torch.distributed.fsdp``'s interface of an all-gather.

        Parameters are views of memory that the library gives, so that what is gathered is copied
        from the memory that ``comm`` allocates, which takes as much again meanwhile. On a CPU it
        hides behind no compute. One rank alone gathers without it. Between iterations, on every
        rank.

        Raises:
            ValueError: ranks hold shards of different sizes, or the unit lies on several meshes.
        """
        comms = replace(self._fsdp_unit.comms, all_gather=comm)
        self._customize("set_custom_all_gather", comms)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduces this unit's gradients by ``comm``, ``torch.distributed.fsdp``'s interface of a
        reduce-scatter: a mean, or a sum where a divisor was given. All else as for
        :meth:`set_custom_all_gather`."""
        comms = replace(self._fsdp_unit.comms, reduce_scatter=comm)
        self._customize("set_custom_reduce_scatter", comms)

    def _customize(self, verb: str, comms: CustomComms) -> None:
        unit = self._fsdp_unit
        if len({bucket.domain for bucket in unit.buckets}) > 1:
            raise ValueError(
                f"{verb}() on unit {unit.name!r}, whose parameters lie on several meshes: make a "
                "unit for each"
            )
        for bucket in unit.buckets:
            if not bucket.plan.is_equal:
                raise ValueError(
                    f"{verb}() on unit {unit.name!r}, of which ranks hold "
                    f"{bucket.plan.shard_numels} elements: use FsdpContext(layout=Flat()), which "
                    "makes equal shards"
                )
        unit.comms = comms
        unit.context.unsettle()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """For FSDP2's callers; ``False`` changes nothing.

        Raises:
            ValueError: ``enable`` is true.
        """
        if enable:
            raise ValueError(
                "set_allocate_memory_from_process_group_for_comm(True): what travels is the memory "
                "that parameters are views of, so there are no buffers for the process group to "
                "allocate; leave the call out, or allocate from it in set_custom_all_gather()"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """For FSDP2's callers.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"set_symm_mem_for_comm({backend!r}): what travels is the memory that parameters are "
            "views of, so there are no buffers to put in symmetric memory; leave the call out, or "
            "allocate it in set_custom_all_gather()"
        )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer's step. At stage 1 of
        :meth:`set_zero_stage` it is the one that reduces gradients."""
        for unit in self._units(recurse=True):
            unit.is_last_backward = is_last_backward

    def set_zero_stage(self, stage: int, *, recurse: bool = True) -> None:
        """What is sharded at rest, in the words of ZeRO (arXiv 1910.02054).

        3: all, as :func:`fully_shard` does by default. 2: gradients and optimizer states; full
        buffers are kept, and gathered again after the optimizer's step, under the next forward. 1:
        as 2, and gradients too are full until the last backward of a step, which alone reduces
        them; say which is by :meth:`set_is_last_backward`.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in (1, 2, 3):
            raise ValueError(f"set_zero_stage({stage!r}): use 1, 2 or 3")
        for unit in self._units(recurse):
            unit.reshard_after_forward = None if stage == 3 else False
            unit.reshard_after_backward = stage == 3
            unit.reduces_last_only = stage == 1

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, *, recurse: bool = True
    ) -> None:
        """Whether forward frees the full buffers. As the argument of :func:`fully_shard`."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward frees the full buffers. Buffers that are kept are gathered again before
        their next use if the parameters were edited."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def _units(self, recurse: bool) -> Iterable[Unit]:
        modules = self.modules() if recurse else [self]
        return [unit for unit in map(unit_of, modules) if unit is not None]

    def _apply(self, fn: Any, recurse: bool = True) -> FsdpModule:
        """What ``to_empty()``, ``to()`` and the like do to a module: gives memory to a unit on the
        meta device, and leaves alone a unit that is where it should be.

        Raises:
            RuntimeError: the shards would change dtype or device. Nothing was changed then.
        """
        buckets = self._fsdp_unit.buckets
        with torch.no_grad():
            applied = [fn(bucket.shard) for bucket in buckets]
        device = self._fsdp_unit.context.device
        for bucket, shard in zip(buckets, applied, strict=True):
            is_moved = shard.device != bucket.shard.device
            is_given_memory = bucket.is_meta and shard.device.type == bucket.rest_device.type
            if shard.dtype != bucket.shard.dtype or (is_moved and not is_given_memory):
                raise RuntimeError(
                    f"{type(self).__name__} is sharded, its shards are {bucket.shard.dtype} on "
                    f"{bucket.shard.device}: move or cast a module (to(), cuda(), half(), ...) "
                    f"before fully_shard(); from meta, to_empty(device="
                    f"{bucket.rest_device.type!r})"
                )
        with hidden(buckets):
            super()._apply(fn, recurse)
        if self._fsdp_unit.is_offloaded:  # whose shards alone are on the host
            move_buffers(self, device)
        if any(
            bucket.is_meta and not shard.is_meta
            for bucket, shard in zip(buckets, applied, strict=True)
        ):
            self._fsdp_unit.materialize(device)
        else:
            for bucket, shard in zip(buckets, applied, strict=True):
                if shard is not bucket.shard:
                    bucket.shard.copy_(shard)
        self._announce_unsharded()
        return self

    def _announce_unsharded(self) -> None:
        """Assigns the unsharded parameters where they belong, for modules that keep references of
        their own, as ``nn.LSTM`` does, and registers the sharded ones again."""
        for bucket in self._fsdp_unit.buckets:
            unsharded = dict(
                zip(map(id, bucket.sharded_parameters), bucket.parameters, strict=True)
            )
            for _, module in modules_outside_units(self):
                for name, parameter in list(module._parameters.items()):
                    if id(parameter) in unsharded:
                        setattr(module, name, unsharded[id(parameter)])
            bucket.use_sharded()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace the sharded parameters of "
                f"{type(self).__name__}: use assign=False, after to_empty() if the model is on the "
                "meta device"
            )
        self._show_sharded()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._show_sharded()
        super()._save_to_state_dict(*args)

    def _show_sharded(self) -> None:
        """After an explicit :meth:`unshard`: what is loaded and saved are the shards."""
        if not self._fsdp_unit.context.schedule.is_in_use(self._fsdp_unit):
            self.reshard()

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpModule:
        """A copy, sharded likewise, with memory and a context of its own."""
        from fsdp_overlap.fully_shard import fully_shard

        unit = self._fsdp_unit
        kept = set()
        for bucket in unit.buckets:
            for spec, parameter, sharded in zip(
                bucket.plan.specs, bucket.parameters, bucket.sharded_parameters, strict=True
            ):
                # For fully_shard() to take over: of the values, only the shards are copied.
                empty = torch.empty(spec.shape, dtype=spec.dtype, device=bucket.shard.device)
                copied = nn.Parameter(empty, spec.requires_grad)
                attributes = attributes_of(parameter) | attributes_of(sharded)
                vars(copied).update(deepcopy(attributes, memo))
                del copied.__dict__["_fsdp_owner"]
                memo[id(parameter)] = memo[id(sharded)] = copied
                if spec.keeps_dtype:
                    kept.add(copied)
        plain_class: Any = type(self).__bases__[1]
        duplicate = plain_class.__new__(plain_class)
        memo[id(self)] = duplicate
        state = hooks.without_hooks(self.__getstate__())
        del state["_fsdp_unit"]
        duplicate.__setstate__(deepcopy(state, memo))
        context = deepcopy(unit.context, memo)
        domain = context.domain_of(unit.mesh)
        domain.plans.place(duplicate, [bucket.plan for bucket in unit.buckets])
        fully_shard(
            duplicate,
            context,
            mesh=unit.mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=_keeping_dtypes(unit.mp_policy, kept),
            offload_policy=unit.offload_policy,
            ignored_params={deepcopy(parameter, memo) for parameter in unit.ignored},
        )
        for mine, its in zip(unit.buckets, duplicate._fsdp_unit.buckets, strict=True):
            # For an optimizer that is copied together with the model.
            memo.update(zip(map(id, mine.sharded_parameters), its.sharded_parameters, strict=True))
        unit.copy_to(duplicate._fsdp_unit)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: save its state_dict()")
