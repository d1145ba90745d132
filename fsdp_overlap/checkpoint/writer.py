"""A DCP writer whose checkpoints show any damage."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from fsdp_overlap.checkpoint.checksums import ChecksumStream, streams_work
from fsdp_overlap.checkpoint.entries import read_value
from fsdp_overlap.checkpoint.files import CheckpointError, LocalFileSystem, local_path
from fsdp_overlap.checkpoint.metadata import CHECKSUM_FILE, METADATA_FILE, can_copy, check_paths
from fsdp_overlap.checkpoint.planner import (
    PlannedMetadata,
    PlannedStorageMeta,
    RankWriteResult,
    ShardedSavePlanner,
    merge_results,
)
from fsdp_overlap.checkpoint.stager import StagedTensor, keep_planned
from fsdp_overlap.tensor.dcp import wrap_method, writing


class SafeFileSystemWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that also writes a checksum of the metadata; entries have their own.

    What it writes is an ordinary DCP checkpoint, which any reader loads. Takes the arguments of
    ``FileSystemWriter``. ``path`` may be a URL, as ``file:///mnt/step-1``.

    Raises:
        ValueError: ``path`` is a URL of other storage.
        CheckpointException: with the :class:`CheckpointError` of each rank, before anything is
            written: the state has a value that :class:`SafeFileSystemReader` would refuse.
    """

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(local_path(path), *args, **kwargs)
        self.fs = self._files = _Files()
        self._entries = _Entries(self.transforms)
        self.transforms = self._entries  # type: ignore[assignment]

    def storage_meta(self) -> StorageMeta:
        return PlannedStorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "SafeFileSystemWriter writes the metadata of all ranks, for which they must "
                "communicate: with use_collectives=False use torch's FileSystemWriter"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # From here on files of an earlier save in this folder are overwritten. If that fails, its
        # metadata must not describe a mixture.
        self._remove_metadata()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        staged = keep_planned(plan, planner)
        if self.serialization_format == SerializationFormat.TORCH_SAVE:  # others write at the end
            self._entries.staged = staged
        self._entries.thread = threading.local()
        self._files.failure = None
        option = get_crc32_options()
        try:
            results = super().write_data(plan, planner)
        finally:
            self._entries.staged, self._entries.thread = {}, None
            set_crc32_options(option)  # a stream does so itself, unless the disk is full, say
        # torch's writer ignores exceptions in its threads.
        if len(results.value()) != len(plan.items):
            if self._files.failure is not None:
                raise self._files.failure
            raise RuntimeError(
                f"of {len(plan.items)} entries {len(results.value())} were written: a thread of "
                "the writer failed, and its error is above; thread_count=1 raises it here"
            )
        if not isinstance(planner, ShardedSavePlanner):
            return results
        written: Future[RankWriteResult] = Future()
        written.set_result(planner.write_result(results.value()))
        return written

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        try:
            with _paused_gc():
                if isinstance(metadata, PlannedMetadata):
                    metadata.folder = Path(self.path).absolute()
                    metadata.values = merge_results(results)
                    stored = metadata.values.storage_data.items()
                    entries: Any = (WriteResult(index, info.length, info) for index, info in stored)
                    super().finish(metadata.values, [entries])
                else:
                    super().finish(metadata, results)
            self._write_checksum()
        except OSError:
            self._remove_metadata()
            raise

    def _write_checksum(self) -> None:
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        checksum = Path(self.path) / CHECKSUM_FILE
        unfinished = checksum.with_suffix(".tmp")
        with self.fs.create_stream(unfinished, "wb") as file:
            file.write(f"{digest}\n".encode())
            file.flush()
            if self.sync_files:
                os.fsync(file.fileno())
        unfinished.replace(checksum)  # half a checksum would make a good checkpoint look damaged

    def _remove_metadata(self) -> None:
        for name in (CHECKSUM_FILE, METADATA_FILE):
            (Path(self.path) / name).unlink(missing_ok=True)


class _Files(LocalFileSystem):
    """The file system of a writer. It removes files that it could not write, which makes room on a
    full disk. ``failure`` is the last such error, also in a thread of torch's writer."""

    def __init__(self) -> None:
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        try:
            with writing(path), super().create_stream(path, mode) as stream:
                yield stream
        except OSError as error:
            with suppress(OSError):
                Path(path).unlink()
            if error.errno is None:
                raise  # not an error of the disk
            self.failure = OSError(
                error.errno,
                f"{error.strerror}; this checkpoint is incomplete and does not load, those in "
                "other folders are as they were",
                error.filename,
            )
            raise self.failure from error


class _Entries:
    """The writer's transforms, with our checksums of tensors in place of torch's slower ones. When
    an entry begins, the one before is written, and its ``staged`` copy is freed, which the writer
    would keep until the end of the file."""

    def __init__(self, transforms: Any) -> None:
        self._transforms = transforms
        self.staged: Mapping[str, StagedTensor] = {}
        self.thread: threading.local | None = None
        """The item that each thread writes, during a save."""

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: Any
    ) -> tuple[Any, list[str]]:
        stream, descriptors = self._transforms.transform_save_stream(write_item, raw_stream)
        before: WriteItem | None = getattr(self.thread, "item", None)
        if before is not None and before.index.fqn in self.staged:
            self.staged[before.index.fqn].free(before.index)
        if self.thread is not None:
            self.thread.item = write_item
        if write_item.type != WriteItemType.BYTE_IO and streams_work():  # those are saved already
            stream = ChecksumStream(stream)
        return stream, descriptors


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Pause the garbage collector, which would scan new objects again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _check_savable(state_dict: Mapping[str, Any], paths: Mapping[str, Any]) -> None:
    """Check the values that are about to be saved, and their paths in the state dict.

    Raises:
        CheckpointError: the reader would refuse something of it.
    """
    try:
        check_paths(paths, state_dict)
    except ValueError as error:
        raise CheckpointError(
            f"SafeFileSystemReader would refuse the keys of this state dict: {error}"
        ) from None
    for fqn, value in state_dict.items():
        if isinstance(value, torch.Tensor) and not can_copy(value.dtype, value.dtype):
            raise CheckpointError(
                f"SafeFileSystemReader would refuse {fqn!r}: torch cannot copy {value.dtype}. "
                "Save a view of it in another dtype"
            )
        if not _is_simple(value):
            _check_value(fqn, value)


def _is_simple(value: Any) -> bool:
    """Return whether the reader surely accepts ``value``."""
    if isinstance(value, DTensor):
        return True
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided
        return is_plain and not (value.is_conj() or value.is_neg() or value.is_quantized)
    if hasattr(value, "__create_write_items__") or hasattr(value, "local_shards"):
        return True  # saved as tensors
    return all(map(_is_number, value if type(value) in (tuple, list) else (value,)))


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return value.bit_length() <= 64
    return type(value) in (bool, float, str, type(None))


def _check_value(fqn: str, value: Any) -> None:
    """Check ``value`` by saving it in memory and reading it."""
    if isinstance(value, torch.Tensor):
        value = value.detach()  # as the writer does
    data = io.BytesIO()
    try:
        torch.save(value, data)
        read_value(io.BufferedReader(cast(io.RawIOBase, data)), 0, data.tell())
    except Exception as error:
        raise CheckpointError(
            f"SafeFileSystemReader would refuse {fqn!r}, of type {type(value).__name__}: {error}. "
            "Save what it is made of, or use torch's FileSystemWriter"
        ) from None


def _check_before_planning(torchs: Callable[..., None]) -> Callable[..., None]:
    def set_up(
        self: DefaultSavePlanner,
        state_dict: dict[str, Any],
        storage_meta: Any = None,
        is_coordinator: bool = False,
    ) -> None:
        torchs(self, state_dict, storage_meta, is_coordinator)
        if isinstance(storage_meta, PlannedStorageMeta):  # SafeFileSystemWriter's
            _check_savable(self.state_dict, self.mappings)

    return set_up


# A writer sees plans, and values only once some ranks have written.
wrap_method(DefaultSavePlanner, "set_up_planner", _check_before_planning)
