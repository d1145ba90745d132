"""Save full weights in safetensors files, of which each rank writes some."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from fsdp_overlap.checkpoint.files import local_path
from fsdp_overlap.comm.comm_streams import has_streams, mark_enqueued, streams_of
from fsdp_overlap.comm.host_copies import D2HCopy, copy_to_host
from fsdp_overlap.comm.threads import thread_pool
from fsdp_overlap.weights.exchange import exchange_of
from fsdp_overlap.weights.export import full_weights
from fsdp_overlap.weights.model_weights import Names, is_first, renamed, weights_of
from fsdp_overlap.weights.safetensors_format import DTYPES, INDEX, header_of
from fsdp_overlap.weights.transfer_plan import Layouts, TensorLayout, TransferRound, full_layout

# Several ranks write if each of them gets a file of at least this size.
_SHARED_BYTES = 256 << 20
UNFINISHED = ".unfinished"
"""Ends the names of files while they are written."""
_SLOT_BYTES = 32 << 20
"""The size of each of two slots of pinned memory that weights pass through."""


@dataclass
class _File:
    """One file: its weights in order, and how many bytes they have."""

    weights: dict[str, TensorLayout] = field(default_factory=dict)
    nbytes: int = 0
    path: Path = Path()

    @property
    def unfinished(self) -> Path:
        """Its path while it is written."""
        return self.path.with_name(self.path.name + UNFINISHED)

    def header(self) -> bytes:
        """Return what comes before the weights."""
        return header_of((name, lay.dtype, lay.shape) for name, lay in self.weights.items())


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    names: Names | None = None,
    file_bytes: int = 5 << 30,
    piece_bytes: int | None = None,
) -> None:
    """Write the full weights of a sharded model as ``transformers`` loads them: files of
    safetensors, and an index if there are several.

    Each rank writes files of its own, one weight while the next is on its way, and has no more than
    these in memory, and on a GPU 64 MiB of pinned memory. The files get their names once all of
    them are on the disk; the index comes last. Of plain tensors and buffers outside units, the
    first rank's are written.

    Args:
        model: as in :func:`export_weights`, as are ``dtype``, ``names`` and ``piece_bytes``.
        folder: where files are written, which all ranks can reach, or its URL, as
            ``file:///mnt/weights``. It is made if need be, and may hold other files, but no
            weights.
        file_bytes: the most that a file should have. One weight may have more.

    Call it on every rank that the model lies over. Where there are replicas of shards (HSDP), the
    ranks of the first copy write, and the others return at once.

    Raises:
        FileExistsError: there are weights in ``folder``; on the first rank.
        RuntimeError: as :func:`export_weights`; or a rank could not write: names it. Nothing that
            was written is left.
        ValueError: as :func:`export_weights`; ``folder`` is a URL of other storage; safetensors
            does not know a dtype; or ranks have different tensors of the same name, as experts.
            ``names`` may depend on the rank.
    """
    folder = local_path(folder)
    own = weights_of(model)
    if not is_first(own.values()):
        return
    exchange = exchange_of(model, own.values(), "save_weights")

    def find() -> Mapping[str, torch.Tensor]:
        if exchange.rank == 0:
            _check_folder(folder)
        weights = renamed(own, names)
        for name, tensor in weights.items():
            if full_layout(tensor.shape, tensor.dtype, dtype).dtype not in DTYPES:
                raise ValueError(f"{name!r} is of {tensor.dtype}, which safetensors does not know")
        return weights

    def make(has: Layouts) -> list[TransferRound]:
        """Plan that each rank gets what it writes, in the order of writing."""
        files = _files(folder, has, dtype, file_bytes, exchange.ranks)
        wants: dict[str, list[tuple[TensorLayout, list[int]]]] = {}
        for number, file in enumerate(files):
            writer = [number % exchange.ranks]
            wants.update({name: [(layout, writer)] for name, layout in file.weights.items()})
        ordered = {name: has[name] for name in _in_transfer_order(files, exchange.ranks)}
        tensors = exchange.plan_transfers(ordered, wants, strict=True, unique_names=True)
        return exchange.rounds(tensors, piece_bytes)

    arguments = f"dtype={dtype}, file_bytes={file_bytes}, piece_bytes={piece_bytes}"
    weights, plan = exchange.planned(find, arguments, make, f", folder={str(folder)!r}")
    exchange.check_replicas(plan.has, weights)
    files = _files(folder, plan.has, dtype, file_bytes, exchange.ranks)
    rank = exchange.rank
    own_files = files[rank :: exchange.ranks]
    wants = {name: layout for file in own_files for name, layout in file.weights.items()}
    arriving = full_weights(exchange, plan.rounds, weights, wants, prefetch=1)
    try:
        exchange.on_all(lambda: _write_files(own_files, arriving, exchange.device), "write")
        exchange.on_all(lambda: [f.unfinished.rename(f.path) for f in own_files], "write")
        exchange.on_all(lambda: _write_index(folder, files) if rank == 0 else None, "write")
    except BaseException:
        for file in own_files:
            file.unfinished.unlink(missing_ok=True)
            file.path.unlink(missing_ok=True)
        raise


def _check_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if existing := sorted(path.name for path in folder.glob("*.safetensors*")):
        raise FileExistsError(
            f"{folder} has weights already, as {existing[0]}: name an empty folder"
        )


def _files(
    folder: Path, has: Layouts, dtype: torch.dtype | None, file_bytes: int, ranks: int
) -> list[_File]:
    """Return the files of all weights, in order, at least one for each rank if they are large."""
    same: dict[TensorLayout, TensorLayout] = {}  # so that equal layouts are one object
    weights: dict[str, TensorLayout] = {}
    for name, [(layout, _), *_] in has.items():
        want = full_layout(layout.shape, layout.dtype, dtype)
        weights[name] = same.setdefault(want, want)
    total = sum(map(_nbytes, weights.values()))
    max_bytes = min(file_bytes, max(_SHARED_BYTES, -(-total // ranks)))
    files = [_File()]
    for name, layout in weights.items():
        if files[-1].weights and files[-1].nbytes + _nbytes(layout) > max_bytes:
            files.append(_File())
        files[-1].weights[name] = layout
        files[-1].nbytes += _nbytes(layout)
    for number, file in enumerate(files, 1):
        several = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file.path = folder / f"model{several}.safetensors"
    return files


def _in_transfer_order(files: list[_File], ranks: int) -> Iterator[str]:
    """Yield the names of weights as they travel: for each rank file by file, for all ranks at the
    same time."""
    for first in range(0, len(files), ranks):
        weights: list[tuple[int, int, str]] = []
        for number, file in enumerate(files[first : first + ranks]):
            starts = accumulate(map(_nbytes, file.weights.values()), initial=0)
            weights += [(at, number, name) for at, name in zip(starts, file.weights, strict=False)]
        yield from (name for _, _, name in sorted(weights))


def _write_files(
    files: list[_File], arriving: Iterator[tuple[str, torch.Tensor]], device: torch.device
) -> None:
    """Write ``files``, whose weights arrive in order. A thread writes one while the next arrives.
    If it fails, all weights are still received, because other ranks wait for what this one sends.
    """
    copies = _HostCopies(device) if files and has_streams(device) else None
    try:
        with thread_pool(1, device) as writer:
            for file in files:
                with file.unfinished.open("wb") as out:
                    writing: Future[object] = writer.submit(out.write, file.header())
                    for name in file.weights:
                        arrived_name, weight = next(arriving)
                        assert arrived_name == name
                        writing.result()
                        ready = mark_enqueued(weight.device)
                        writing = writer.submit(_write, out, weight, ready, copies)
                    writing.result()
                    out.flush()
                    os.fsync(out.fileno())
    finally:
        for _ in arriving:
            pass


class _HostCopies:
    """Copies weights to the host piece by piece, while the piece before is written: on a stream of
    its own, beside compute on all others, into two slots of pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device_module = streams_of(device)
        self._stream = self._device_module.Stream(device)
        self._slots = [
            torch.empty(_SLOT_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]

    def pieces(self, weight: torch.Tensor, ready: Any) -> Iterator[torch.Tensor]:
        """Yield the bytes of ``weight``, which is complete at the event ``ready``. Each piece is
        good until the next one."""
        self._stream.wait_event(ready)
        weight.record_stream(self._stream)  # a copy may be under way when a write fails
        pieces = weight.view(-1).view(torch.uint8).split(_SLOT_BYTES)
        following = self._copy(pieces[0], 0)
        for number in range(len(pieces)):
            copied = following
            if number + 1 < len(pieces):
                following = self._copy(pieces[number + 1], (number + 1) % 2)
            yield copied.wait()

    def _copy(self, piece: torch.Tensor, slot: int) -> D2HCopy:
        with self._device_module.stream(self._stream):
            return copy_to_host(piece, self._slots[slot][: piece.numel()])


def _write(out: BinaryIO, weight: torch.Tensor, ready: Any, copies: _HostCopies | None) -> None:
    """Write ``weight``, which is complete at the event ``ready`` on a device with streams."""
    for values in [weight] if copies is None else copies.pieces(weight, ready):
        if values.nbytes:
            out.write(bytes_of(values.contiguous()))


def bytes_of(values: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the memory of ``values``, which are contiguous and on the host."""
    return (ctypes.c_char * values.nbytes).from_address(values.data_ptr())


def _write_index(folder: Path, files: list[_File]) -> None:
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": {name: file.path.name for file in files for name in file.weights},
    }
    path = folder / INDEX
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        unfinished.write_text(json.dumps(index, indent=2) + "\n")
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _nbytes(layout: TensorLayout) -> int:
    return prod(layout.shape) * layout.dtype.itemsize
