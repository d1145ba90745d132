"""Load files of safetensors into a sharded model: each rank reads what its own shards need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_overlap.checkpoint.files import local_path
from fsdp_overlap.engine.context import model_context_of
from fsdp_overlap.features.meta_init import materialize, register_unsharded_once
from fsdp_overlap.tensor.tiles import copied_dims, is_on_mesh
from fsdp_overlap.weights.chunks import full_chunk, local_chunks
from fsdp_overlap.weights.exchange import exchange_of
from fsdp_overlap.weights.file_reads import Read, read_all
from fsdp_overlap.weights.file_views import FilePiece
from fsdp_overlap.weights.load_plan import Conversion, LoadPlan
from fsdp_overlap.weights.model_weights import Names, units_of, weights_of


class LoadedWeights(NamedTuple):
    """What :func:`load_weights` did. ``missing_keys`` are in no file and stay as they were,
    ``unexpected_keys`` are not in the model on any rank. ``nbytes`` were read by this rank."""

    missing_keys: list[str]
    unexpected_keys: list[str]
    nbytes: int


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    names: Names | Mapping[str, str] | None = None,
    convert: Conversion | None = None,
    strict: bool = True,
    broadcast_replicas: bool = False,
    init_buffers: Callable[[nn.Module], object] | None = None,
    num_threads: int = 8,
    progress: Callable[[int, int], object] | None = None,
) -> LoadedWeights:
    """Load weights from files of safetensors into a sharded model.

    Each rank reads the bytes that its own shards need, several ranges at once, and casts them to
    the dtype at rest. Beside the shards it needs 4 MiB of memory a thread. Units on the meta device
    get memory first. No full tensor is assembled, and ranks exchange no weights.

    Args:
        model: as in :func:`export_weights`.
        path: a file, an index of several, or a folder, as of ``save_pretrained()`` or
            :func:`save_weights`; or its URL, as ``file:///mnt/weights``.
        names: gives the name in the files for a name in the model, or ``None`` for a weight that is
            left as it is; or patterns and what replaces them, as of ``re.sub``, applied in turn.
        convert: makes what the model has of what the files have, before ``names``. It gets the
            files' tensors by name, on the meta device, and returns tensors by name that are made of
            them by views, ``torch.cat`` and ``torch.stack``, such as experts that the model has as
            one tensor. By default, what transformers does for a model of its own.
        strict: whether names that the files or the model lack are an error.
        broadcast_replicas: whether the first replica of a shard alone reads (HSDP), and sends the
            others what it has read. By default all read.
        init_buffers: called with each module that has a buffer on the meta device which is in no
            state dict, once the buffer has memory. By default, what transformers does for a model
            of its own.
        num_threads: how many ranges are read at once.
        progress: called with the bytes of weights that this rank has, and will have.

    Call it on every rank that the model lies over, replicas too, between steps. Optimizer states
    stay as they are. Of a weight that the model ties, and the files have by several names, all must
    be equal.

    Raises:
        CheckpointError: a file is missing or damaged, or was changed while it was read.
        RuntimeError: ``init_buffers`` left a buffer without values, or another rank failed: names
            it.
        TypeError: a weight is of a class that alone knows how it is put together.
        ValueError: names, shapes or dtypes of the files and the model differ, or ranks have other
            files, or a weight is quantized, or a weight or buffer on the meta device would get no
            values. It lists all, and nothing was changed.
    """
    exchange = exchange_of(model, weights_of(model).values(), "load_weights", with_replicas=True)
    plan = LoadPlan(strict, broadcast_replicas)

    def find() -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads}: give 1 or more")
        plan.find(model, local_path(path), names, convert, init_buffers)

    exchange.on_all(find, "read the files")
    missing, unexpected = plan.compare(exchange)
    # Of a model without units on the meta device nobody has said where it should be.
    is_meta = exchange.device.type == "meta"
    device = torch.get_default_device() if is_meta else exchange.device
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    nbytes = 0

    def prepare() -> None:
        for unit in units_of(model):
            if unit.is_meta:
                materialize(unit)
                register_unsharded_once(unit)
        for name, tensor in plan.without_memory.items():
            memory = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, tensor.requires_grad)
            vars(memory).update(vars(tensor))
            try:
                torch.utils.swap_tensors(tensor, memory)  # optimizers may have it
            except RuntimeError as error:
                raise RuntimeError(
                    f"{name} is of no unit, on the meta device, and referred to weakly, as by "
                    "nn.LSTM: call to_empty(device=...) on its module first"
                ) from error
            given.append((tensor, memory))
        plan.initialize_buffers()
        for unit in units_of(model):  # whose shards may be gathered ahead, or copied to the device
            comm_context = model_context_of(unit).comm_context
            comm_context.all_gather_stream.before_compute()
            comm_context.finish_reading()

    def read() -> None:
        nonlocal nbytes
        reads = [
            one
            for name, tensor in weights.items()
            if not (broadcast_replicas and _is_copy(tensor))
            for one in _reads_of(tensor, plan.pieces[name])
        ]
        nbytes = read_all(reads, plan.files, device, num_threads, progress)

    try:
        exchange.on_all(prepare, "get memory")
        # Parameters that got memory are other objects.
        in_model = weights_of(model)
        weights = {name: in_model[name] for name in plan.pieces}
        try:
            exchange.on_all(read, "read the files")
            if broadcast_replicas:
                _broadcast(weights.values())
        finally:
            for tensor in weights.values():
                torch.autograd.graph.increment_version(_local(tensor).detach())
    except BaseException:
        for tensor, memory in given:
            torch.utils.swap_tensors(tensor, memory)
        raise
    return LoadedWeights(missing, unexpected, nbytes)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _reads_of(tensor: torch.Tensor, pieces: Sequence[Sequence[FilePiece]]) -> Iterator[Read]:
    """Yield what reads this rank's chunks of ``tensor``, each of which consists of ``pieces``."""
    for (chunk, values), of_chunk in zip(local_chunks(tensor), pieces, strict=True):
        for piece in of_chunk:
            part = piece.chunk.of(full_chunk(chunk.sizes), values)
            yield Read.of(piece.file_tensor, piece.view, part)


# ---- Replicas of shards, of which the first reads ----


def _copies(tensor: torch.Tensor) -> list[tuple[DeviceMesh, int]]:
    """Return the mesh dimensions along which other ranks have the same part of ``tensor``."""
    if not isinstance(tensor, DTensor) or not is_on_mesh(tensor._local_tensor, tensor._spec):
        return []
    mesh = tensor.device_mesh
    return [(mesh, dim) for dim in copied_dims(tensor._spec) if mesh.size(dim) > 1]


def _is_copy(tensor: torch.Tensor) -> bool:
    """Return whether another rank reads this rank's part of ``tensor``."""
    return any(mesh.get_local_rank(dim) for mesh, dim in _copies(tensor))


def _broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Send what the first replicas have read to the others. Collective over replicas."""
    for tensor in tensors:
        for mesh, dim in _copies(tensor):
            local = _local(tensor).detach()
            sent = local.contiguous()
            # As bytes, because not every backend knows every dtype.
            dist.broadcast(sent.view(-1).view(torch.uint8), group=mesh.get_group(dim), group_src=0)
            if sent is not local:
                local.copy_(sent)
