"""A DCP reader for untrusted or damaged checkpoints."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from fsdp_overlap.checkpoint.entries import StoredTensor, read_entry, read_value
from fsdp_overlap.checkpoint.files import (
    CheckpointError,
    LocalFileSystem,
    local_path,
    opened,
    refuse_holes,
    refusing,
)
from fsdp_overlap.checkpoint.metadata import can_copy, read_metadata
from fsdp_overlap.comm.threads import thread_pool
from fsdp_overlap.features.opaque_parameters import takes
from fsdp_overlap.torch_internals import StorageInfo


class SafeFileSystemReader(FileSystemReader):
    """A ``FileSystemReader`` that runs no code from a checkpoint and trusts nothing in it.

    ``torch.distributed.checkpoint.load(state, storage_reader=SafeFileSystemReader(folder))`` loads
    what torch's own reader loads, from any DCP writer. Before anything is changed, every rank
    verifies the checksums, sizes and dtypes of what it is about to read; if one rank refuses, all
    do. Beside the tensors that it loads into, it uses a few megabytes, whatever the size of a
    tensor. Values other than tensors may be numbers, strings, bytes, ``BytesIO``, ``None``, dtypes,
    devices, numbers and arrays of numpy, times, paths, ranges and slices, and dicts, lists, tuples
    and sets of these and of tensors. If a checkpoint holds another value, leave its key out of the
    state dict, and the rest loads.

    Args:
        path: the checkpoint's folder, or its URL, as ``file:///mnt/step-1``.
        verify: whether the elements of tensors are compared with their checksums. They are then
            read twice. Everything else is always checked.

    Raises:
        ValueError: ``path`` is a URL of other storage.
        CheckpointException: with the :class:`CheckpointError` of each rank that refused: a file is
            missing, damaged, not a regular file or outside the folder; sizes do not fit; or a
            pickle names something that is not a value.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__(local_path(path))
        self.fs = LocalFileSystem()  # for other paths in dcp.load(checkpoint_id=...)
        self.verify = verify

    def read_metadata(self) -> Metadata:
        """Return the checked metadata. If it is refused, the result is empty and
        :meth:`set_up_storage_reader` raises."""
        # torch.distributed.checkpoint.load() swallows exceptions raised here.
        self._refused: CheckpointError | None = None
        try:
            self._metadata = read_metadata(Path(self.path))
        except CheckpointError as error:
            self._refused = error
            self._metadata = Metadata({}, {}, {}, StorageMeta())
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._refused is not None:
            raise self._refused
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify what this rank is about to load, and record where it is."""
        runs = self._runs({item.storage_index for item in plan.items}, _threads())
        self._values: dict[MetadataIndex, Any] = {}
        with thread_pool(len(runs), None) as threads:  # they read files
            for values in threads.map(self._verify_run, runs):
                self._values |= values
        return plan

    def _verify_run(self, indices: list[MetadataIndex]) -> dict[MetadataIndex, Any]:
        values = {}
        for name, file, in_file in self._by_file(indices):
            for index in in_file:
                info = self.storage_data[index]
                item = self._metadata.state_dict_metadata[index.fqn]
                with refusing(f"{name}, {index.fqn!r}"):
                    values[index] = _verified(file, info, item, index, self.verify)
        return values

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._check_targets(planner)
        items: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            items.setdefault(item.storage_index, []).append(item)
        for _, file, indices in self._by_file(self._in_file_order(set(items))):
            for index in indices:
                value = self._values[index]
                for item in items[index]:
                    if item.type == LoadItemType.BYTE_IO:
                        value.seek(0)
                        planner.load_bytes(item, value)
                        continue
                    target = planner.resolve_tensor(item).detach()
                    value.copy_box(file, item.storage_offsets, item.lengths, target)
                    planner.commit_tensor(item, target)
        self._values = {}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_targets(self, planner: LoadPlanner) -> None:
        """Check the targets before anything is changed. Each rank has all keys, so all ranks
        refuse alike."""
        targets = getattr(planner, "state_dict", {})  # a planner need not have one
        for fqn, target in targets.items():
            item = self._metadata.state_dict_metadata.get(fqn)
            if item is None or not isinstance(target, torch.Tensor):
                continue
            if isinstance(item, BytesStorageMetadata):
                # The planner would replace the tensor in the state dict by another value. The
                # tensor itself, most often a model's own, would stay as it was.
                raise CheckpointError(f"{self.path}: {fqn!r} is no tensor in this checkpoint")
            if not can_copy(item.properties.dtype, target.dtype):
                raise CheckpointError(
                    f"{self.path}: {fqn!r} is of {item.properties.dtype} in this checkpoint, which "
                    f"torch cannot copy into {target.dtype}"
                )
            if not takes(target, item.properties.dtype):
                raise CheckpointError(
                    f"{self.path}: {fqn!r} is of {item.properties.dtype} in this checkpoint, and "
                    f"quantized elements of {target.dtype} in the model, which are never cast: "
                    f"load what was stored as {target.dtype}"
                )

    def _in_file_order(self, indices: set[MetadataIndex]) -> list[MetadataIndex]:
        """Return the entries in the order of their files and offsets."""

        def place(index: MetadataIndex) -> tuple[str, int]:
            info = self.storage_data[index]
            return info.relative_path, info.offset

        return sorted(indices, key=place)

    def _runs(self, indices: set[MetadataIndex], count: int) -> list[list[MetadataIndex]]:
        """Return the entries in ``count`` parts of about equal bytes, in the order of files."""
        runs: list[list[MetadataIndex]] = [[] for _ in range(count)]
        total = sum(self.storage_data[index].length for index in indices)
        before = 0
        for index in self._in_file_order(indices):
            runs[min(count - 1, before * count // max(1, total))].append(index)
            before += self.storage_data[index].length
        return runs

    def _by_file(
        self, indices: list[MetadataIndex]
    ) -> Iterator[tuple[str, BufferedReader, list[MetadataIndex]]]:
        """Yield each file with the entries to read from it."""
        for name, in_file in groupby(indices, lambda index: self.storage_data[index].relative_path):
            path = Path(self.path) / name
            with opened(path) as file:
                yield str(path), file, list(in_file)


def _threads() -> int:
    """Return the number of this rank's cores, but at least two, so that one can wait for the disk,
    and at most four, since each holds a block in memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    return max(2, min(4, (cores or 1) // ranks))


def _verified(
    file: BufferedReader,
    info: StorageInfo,
    item: TensorStorageMetadata | BytesStorageMetadata,
    index: MetadataIndex,
    verify: bool,
) -> StoredTensor | io.BytesIO:
    """Return the tensor at ``info``. Another value is read and saved again by torch.save, because
    planners load the bytes without a check."""
    if isinstance(item, BytesStorageMetadata):
        refuse_holes(file, info.offset, info.length)
        data = io.BytesIO()
        try:
            torch.save(read_value(file, info.offset, info.length), data)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Leave it out of the state dict, and the rest loads"
            ) from None
        return data
    if not can_copy(item.properties.dtype, item.properties.dtype):
        raise CheckpointError(f"torch cannot copy tensors of {item.properties.dtype}")
    value = read_entry(file, info.offset, info.length, verify)
    assert index.index is not None  # which of the tensor's chunks
    size = tuple(item.chunks[index.index].sizes)
    if not isinstance(value, StoredTensor) or value.dtype != item.properties.dtype:
        raise CheckpointError(f"it is not the tensor of {item.properties.dtype} it should be")
    if value.size != size:
        raise CheckpointError(f"it has the shape {value.size}, not {size}")
    return value
