"""Load files of safetensors into a sharded model: each rank reads what its own shards need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_overlap.checkpoint.files import local_path
from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.comm.process_groups import device_for_objects
from fsdp_overlap.engine.context import model_context_of
from fsdp_overlap.features.meta_init import materialize, register_unsharded_once
from fsdp_overlap.tensor.tiles import copied_dims, is_on_mesh
from fsdp_overlap.weights.chunks import local_chunks
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
        names: gives the name in the files for a name in the model, or ``None`` for a weight to
            leave out; or patterns and what replaces them, as of ``re.sub``, applied in turn.
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

    Call it on every rank that the model lies over, between steps. Optimizer states stay as they
    are.

    Raises:
        CheckpointError: a file is missing or damaged, or was changed while it was read.
        RuntimeError: another rank failed; names it.
        TypeError: a weight is of a class that alone knows how it is put together.
        ValueError: names, shapes or dtypes of the files and the model differ, or a buffer on the
            meta device would get no values. It lists all, and nothing was changed.
    """
    exchange = exchange_of(model, weights_of(model).values(), "load_weights")
    plan = LoadPlan(strict)
    exchange.on_all(
        lambda: plan.find(model, local_path(path), names, convert, init_buffers), "could not read"
    )
    missing, unexpected = plan.compare(exchange)
    # Of a model without units on the meta device nobody has said where it should be.
    is_meta = exchange.device.type == "meta"
    device = torch.get_default_device() if is_meta else exchange.device
    _give_memory(model, device)
    for module in plan.modules_to_init:
        assert plan.init_buffers is not None
        plan.init_buffers(module)
    for unit in units_of(model):  # whose shards may be gathered ahead, or copied to the device
        comm_context = model_context_of(unit).comm_context
        comm_context.all_gather_stream.before_compute()
        comm_context.finish_reading()
    # Parameters that got memory are other objects.
    in_model = weights_of(model)
    weights = {name: in_model[name] for name in plan.pieces}
    nbytes = 0

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
        if broadcast_replicas:
            _on_replicas(weights.values(), lambda: exchange.on_all(read, "could not read"))
            _broadcast(weights.values())
        else:
            exchange.on_all(read, "could not read")
    finally:
        for tensor in weights.values():
            torch.autograd.graph.increment_version(_local(tensor).detach())
    return LoadedWeights(missing, unexpected, nbytes)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _reads_of(tensor: torch.Tensor, pieces: Iterable[FilePiece]) -> Iterator[Read]:
    """Yield what reads this rank's part of ``tensor``, which consists of ``pieces``."""
    chunks = local_chunks(tensor)
    for piece in pieces:
        for chunk, values in chunks:
            if (both := chunk & piece.chunk) is not None:
                view = both.of(piece.chunk, piece.view)
                yield Read.of(piece.file_tensor, view, both.of(chunk, values))


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Give memory to what is on the meta device: units', other parameters, and buffers."""
    for unit in units_of(model):
        if unit.is_meta:
            materialize(unit)
            register_unsharded_once(unit)
    given: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta or tensor.is_nested:
                    continue
                if id(tensor) not in given:
                    memory = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        memory = nn.Parameter(memory, tensor.requires_grad)
                    given[id(tensor)] = memory
                table[name] = given[id(tensor)]  # type: ignore[assignment]


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


def _on_replicas(tensors: Iterable[torch.Tensor], run: Callable[[], object]) -> None:
    """Call ``run`` on each rank. Collective over replicas.

    Raises:
        RuntimeError: it raised on a rank with a replica; names it.
    """
    failure: Exception | None = None
    try:
        run()
    except Exception as error:
        failure = error
    for mesh, dim in dict.fromkeys(each for tensor in tensors for each in _copies(tensor)):
        group = mesh.get_group(dim)
        said = gather_objects(
            failure and repr(failure), group, device_for_objects(group), "load_weights"
        )
        for rank, of_rank in enumerate(said):
            if of_rank is not None and failure is None:
                who = f"load_weights: rank {dist.get_global_rank(group, rank)}"
                failure = RuntimeError(f"{who} raised {of_rank}")
    if failure is not None:
        raise failure


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
