"""Support for sharded tensors in ``torch.distributed.checkpoint`` (DCP).

DCP assumes that a rank holds exactly one chunk of a DTensor. Of a sharded tensor it may hold
several, or none. Importing this module wraps five methods of DCP: what would be written or read
wrongly is now right, or an error before anything is written or read.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import count
from math import prod
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.ragged_dtensor import has_range
from fsdp_overlap.torch_internals import DistWrapper


def wrap_method(owner: type[Any], name: str, make: Callable[[Any], Any]) -> None:
    torchs = getattr(owner, name)
    setattr(owner, name, wraps(torchs)(make(torchs)))


# ---- errors of writing name the file ----


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what the disk says as an error about ``path``.

    Errors of writing do not name the file, and libraries raise others on top of them: the zip
    writer of ``torch.save`` says "unexpected pos" where a disk is full.

    Raises:
        OSError: with ``path`` as its ``filename``.
    """
    try:
        yield
    except Exception as error:
        cause = _disk_error(error)
        if cause is None or cause.filename is not None:
            raise
        raise OSError(cause.errno, cause.strerror, os.fspath(path)) from error


def _disk_error(error: BaseException | None) -> OSError | None:
    """Return the error of the operating system that led to ``error``."""
    while error is not None and not (isinstance(error, OSError) and error.errno is not None):
        error = error.__cause__ or error.__context__
    return error


# ---- what ranks send each other needs numpy ----


def _refusing_without_numpy(torchs: Callable[..., None]) -> Callable[..., None]:
    """Wrap what a save or load makes first. Where torch finds no numpy, one rank fails at the first
    object that another sends, and the others wait for it until a timeout."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        torchs(self, *args, **kwargs)
        if not self.use_dist:
            return
        try:
            torch.empty(0).numpy()
        except RuntimeError as error:
            raise RuntimeError(
                "torch.distributed.checkpoint needs numpy for what ranks send each other: pip "
                "install numpy"
            ) from error

    return init


# ---- files of safetensors ----


def _writing_one_chunk_per_name(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that writes files, each with the items that are planned for it.

    In a file of safetensors a name stands for one tensor, and torch's writer keeps the last chunk
    of a name. So further chunks go into files of their own. So do values that are not tensors,
    which torch's writer puts in front of the header.
    """

    def write(self: FileSystemWriter, planner: Any, file_queue: Any) -> Any:
        if self.serialization_format != SerializationFormat.SAFETENSORS:
            with writing(self.path):
                return torchs(self, planner, file_queue)
        files: Any = SimpleQueue()
        while not file_queue.empty():
            path, name, items = file_queue.get_nowait()
            stem, dot, suffix = name.rpartition(".")
            parts = _parts(items)
            for part in count():
                if part:
                    name = f"{stem}-part-{part}{dot}{suffix}"
                    path = self.fs.concat_path(self.path, name)
                if part < len(parts):
                    files.put((path, name, parts[part]))
                elif self.fs.exists(path):
                    self.fs.rm_file(path)  # of a save before, in the same folder
                else:
                    break
        with writing(self.path):
            return torchs(self, planner, files)

    return write


def _parts(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide ``items`` into lists with one chunk per name, then one of values without a chunk."""
    seen: Counter[str] = Counter()
    parts: defaultdict[int, list[WriteItem]] = defaultdict(list)
    values = []
    for item in items:
        if item.tensor_data is None:
            values.append(item)
        else:
            parts[seen[item.index.fqn]].append(item)
            seen[item.index.fqn] += 1
    return [parts[0], *(parts[i] for i in range(1, len(parts))), *([values] if values else [])]


def _refusing_what_is_lost(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that runs on the first rank, or on each without collectives, before any rank
    writes."""

    def prepare(self: HuggingFaceStorageWriter, plans: list[SavePlan]) -> Any:
        items = [item for plan in plans for item in plan.items]
        for item in items:
            if reason := _why_lost(self, item):
                raise ValueError(
                    f"HuggingFaceStorageWriter cannot save {item.index.fqn!r}: {reason}"
                )
        if not self.save_distributed and sum(bool(plan.items) for plan in plans) > 1:
            raise ValueError(
                "HuggingFaceStorageWriter(save_distributed=False) has all ranks write the same "
                f"file, and {len(plans)} ranks have something to write: pass save_distributed=True"
            )
        return torchs(self, plans)

    return prepare


def _why_lost(writer: HuggingFaceStorageWriter, item: WriteItem) -> str | None:
    """Return why ``item`` would not be in the files, or ``None``."""
    data = item.tensor_data
    if data is None:
        return "files of safetensors hold tensors alone; save other values elsewhere"
    if writer.enable_consolidation and not data.size:
        return "consolidation writes zeros for a tensor of no dimensions; give it the shape (1,)"
    if data.chunk.sizes != data.size:
        if not writer.save_distributed:
            return "it is sharded, which needs save_distributed=True"
        if not writer.use_collectives:
            return "it is sharded, and with use_collectives=False ranks write the same files"
    return None


# ---- saves ----


def _refusing_states_in_ranges(torchs: Callable[..., None]) -> Callable[..., None]:
    """Wrap the method that a save planner is handed the state dict by. torch would write a rank's
    range as if it were the whole tensor."""

    def set_up(self: DefaultSavePlanner, *given: Any, **options: Any) -> None:
        torchs(self, *given, **options)
        for fqn, value in self.state_dict.items():
            if type(value) is DTensor and has_range(value):
                raise ValueError(
                    f"cannot save {fqn!r}: its optimizer made it by DTensor.from_local(), of this "
                    "rank's range of a parameter, and torch would save that as the whole. Shard "
                    "with layout=PerTensor() to save the states of this optimizer"
                )

    return set_up


# ---- loads ----


def _planning_to_read_all(torchs: Callable[..., LoadPlan]) -> Callable[..., LoadPlan]:
    """Wrap the method that plans what a rank reads, so that all that it holds is read.

    Of a tensor of which a rank holds nothing, it writes nothing: without collectives its metadata
    does not have the name. The name is missing only if it is so for the ranks that hold something.
    """

    def plan_to_read(self: DefaultLoadPlanner) -> LoadPlan:
        if self.metadata is None:
            return torchs(self)
        _add_names_held_elsewhere(self.state_dict, self.metadata)
        plan = torchs(self)
        elements: Counter[str] = Counter()
        for item in plan.items:
            elements[item.dest_index.fqn] += prod(item.lengths)
        for fqn, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(fqn)
            if not (isinstance(stored, TensorStorageMetadata) and _is_held(tensor)):
                continue
            held = tensor._local_tensor.numel()
            if elements[fqn] != held:
                raise ValueError(
                    f"this rank holds {held:,} elements of {fqn!r}, and the checkpoint has "
                    f"{elements[fqn]:,} for them. If it was saved with use_collectives=False, each "
                    "rank loads what it saved itself: load with the same ranks, mesh and layout. "
                    "Else files are missing, or some are left from another checkpoint"
                )
        return plan

    return plan_to_read


def _add_names_held_elsewhere(state_dict: dict[str, Any], metadata: Metadata) -> None:
    for fqn, tensor in state_dict.items():
        if _is_held(tensor) and tensor.numel() and not tensor._local_tensor.numel():
            nothing = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [])
            metadata.state_dict_metadata.setdefault(fqn, nothing)


def _is_held(value: object) -> bool:
    """Return whether ``value`` lies over ranks of which this is one."""
    return isinstance(value, DTensor) and value.device_mesh.get_coordinate() is not None


wrap_method(DistWrapper, "__init__", _refusing_without_numpy)
wrap_method(FileSystemWriter, "_write_data", _writing_one_chunk_per_name)
wrap_method(HuggingFaceStorageWriter, "prepare_global_plan", _refusing_what_is_lost)
wrap_method(DefaultSavePlanner, "set_up_planner", _refusing_states_in_ranges)
wrap_method(DefaultLoadPlanner, "create_local_plan", _planning_to_read_all)
