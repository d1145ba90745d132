"""A DCP stager whose saves read shards in place, until an optimizer is about to edit them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_overlap.checkpoint.staged_save import Offsets, StagedSave, StagedShard, StagingBuffers
from fsdp_overlap.features.cuda_graphs.graphs import (
    before_capture,
    before_capture_or_replay,
    refuse_in_capture,
)
from fsdp_overlap.features.rows.row_tensor import RowTensor
from fsdp_overlap.tensor.pending_steps import before_steps, finish_pending_steps
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, ShardedParam
from fsdp_overlap.tensor.subclasses import is_subclass
from fsdp_overlap.torch_internals import tree_map_only


class ShardStager(AsyncStager):
    """An ``AsyncStager`` for ``dcp.async_save(..., async_stager=...)``, with which saves read
    sharded parameters and optimizer states in place, as long as nobody edits them.

    Before the next step of any ``torch.optim.Optimizer`` what is not yet written is copied to the
    host, and beyond ``max_copied_bytes`` the step waits for the writer. On a device with streams
    copies are made ahead, beside compute, in pinned memory, and a step waits on its stream. Values
    that are no sharded tensors of this library are copied within the call, as by torch's own
    stager. The writer holds one chunk more, of at most 32 MiB, or all of a rank's rows of a
    parameter under ``PerTensor()``.

    Call :meth:`synchronize_staging` before edits other than an optimizer's step. Without it the
    save fails. Use one stager for all saves, and ``AsyncCheckpointerType.THREAD``.
    ``async_save()`` returns an ``AsyncSaveResponse``: its ``upload_completion`` is the save. Not
    collective.

    Args:
        max_copied_bytes: how much copies that are not yet written may take on this rank, for all
            saves together.
    """

    def __init__(self, max_copied_bytes: int = 1 << 30) -> None:
        if max_copied_bytes < 0:
            raise ValueError(f"max_copied_bytes is a number of bytes, not {max_copied_bytes}")
        self._buffers = StagingBuffers(max_copied_bytes)

    @property
    def peak_copied_bytes(self) -> int:
        """The most that copies have taken at once so far."""
        return self._buffers.peak_bytes

    def stage(self, state_dict: STATE_DICT_TYPE) -> Future[STATE_DICT_TYPE]:
        """Return a state dict that ``dcp.save()`` can write, once, in another thread.

        Raises:
            RuntimeError: a CUDA graph is captured.
        """
        refuse_in_capture("an asynchronous save begins")
        finish_pending_steps()
        save = StagedSave(self._buffers)
        shards: list[StagedShard] = []
        others: list[Any] = []
        staged = _staged(state_dict, "", save, shards, others)
        save.begin(shards)
        # A stager for each save: one that is used again would overwrite the memory of the last.
        plain = DefaultStager(StagingOptions(False, False, False, False))
        copied = cast(dict[str, Any], plain.stage({"others": others}))
        plain.close()
        _guard(save)
        ready = _StagedFuture(save)
        ready.set_result(tree_map_only(_CopiedIndex, copied["others"].__getitem__, staged))
        return ready

    def synchronize_staging(self) -> None:
        """Wait until all shards that are being saved may be edited, as optimizers' steps do."""
        _copy_remaining()


class _StagedFuture(Future[STATE_DICT_TYPE]):
    """A staged state dict, which is ready. The thread that saves asks for it first, and the save is
    released when this thread ends."""

    def __init__(self, save: StagedSave) -> None:
        super().__init__()
        self._save = save

    def result(self, timeout: float | None = None) -> STATE_DICT_TYPE:
        self._save.release_after(threading.current_thread())
        return super().result(timeout)


class StagedTensor:
    """A sharded tensor that is being saved: sharded as the original, on the meta device."""

    save: StagedSave
    shard: StagedShard

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.save.take(self.shard, tuple(index.offset or ()))

    def peek(self, index: MetadataIndex) -> torch.Tensor:
        """Return values that are written later."""
        return self.save.peek(self.shard, tuple(index.offset or ()))

    def free(self, index: MetadataIndex) -> None:
        """Free the result of :meth:`__get_tensor_shard__` for ``index``, which is written."""
        self.shard.free(tuple(index.offset or ()))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        failure = RuntimeError(
            f"{self.shard.name!r} is read by this process while it is saved: a ShardStager needs "
            "async_checkpointer_type=AsyncCheckpointerType.THREAD"
        )
        self.save.refuse(failure)
        raise failure


class _StagedRaggedDTensor(StagedTensor, RaggedDTensor):
    pass


class _StagedRowTensor(StagedTensor, RowTensor):
    pass


class _CopiedIndex(int):
    """The index, in the list of copied values, of the value that it stands for."""


def _staged(
    value: Any, name: str, save: StagedSave, shards: list[StagedShard], others: list[Any]
) -> Any:
    """Return ``value`` with staged tensors in place of sharded ones, whose shards are added to
    ``shards``, and indices into ``others`` in place of other values. Names are those of DCP."""
    if isinstance(value, (Mapping, list)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        staged_items = {
            key: _staged(item, f"{name}.{key}" if name else str(key), save, shards, others)
            for key, item in items
        }
        return staged_items if isinstance(value, Mapping) else [*staged_items.values()]
    if isinstance(value, ShardedParam) and _is_readable(value):
        local = torch.empty_like(value._local_tensor, device="meta")
        kind: Any = _StagedRaggedDTensor if isinstance(value, RaggedDTensor) else _StagedRowTensor
        staged = kind.wrap(local, value._spec)
        shards.append(StagedShard(name, value))
        staged.save, staged.shard = save, shards[-1]
        return staged
    others.append(value)
    return _CopiedIndex(len(others) - 1)


def _is_readable(tensor: ShardedParam) -> bool:
    """Return whether this rank's shard is plain memory whose edits are counted."""
    local = tensor._local_tensor
    is_here = tensor.device_mesh.get_coordinate() is not None
    return is_here and not (is_subclass(local) or local.is_meta or local.is_inference())


def keep_planned(plan: SavePlan, planner: SavePlanner) -> dict[str, StagedTensor]:
    """Return the tensors that a stager staged, by name. Drop their chunks that are not in ``plan``,
    which other replicas write."""
    planned: dict[StagedSave, dict[StagedShard, set[Offsets]]] = {}
    staged: dict[str, StagedTensor] = {}
    for name, value in getattr(planner, "state_dict", {}).items():  # a planner need not have one
        if isinstance(value, StagedTensor):
            staged[name] = value
            planned.setdefault(value.save, {})[value.shard] = set()
    for item in plan.items:
        value = staged.get(item.index.fqn)
        if value is not None:
            planned[value.save][value.shard].add(tuple(item.index.offset or ()))
    for save, offsets in planned.items():
        save.keep(offsets)
    return staged


_saves: WeakSet[StagedSave] = WeakSet()
_has_guard = False


def _guard(save: StagedSave) -> None:
    """Make optimizers' steps copy what remains of ``save``."""
    global _has_guard
    _saves.add(save)
    if not _has_guard:
        register_optimizer_step_pre_hook(_before_step)
        before_steps.append(_copy_remaining)
        before_capture_or_replay.append(_copy_remaining)
        before_capture.append(_finish_copies)
        _has_guard = True


def _copy_remaining() -> None:
    for save in list(_saves):
        save.copy_remaining()


def _finish_copies() -> None:
    """Leave writers nothing to ask the device for. All is copied."""
    for save in list(_saves):
        save.finish_copies()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Before the step of any optimizer: averages of weights, say, are edited after another's.
    _copy_remaining()
