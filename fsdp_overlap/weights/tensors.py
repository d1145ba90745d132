"""The weights of a model by name, and the ranks that they lie over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.engine.unit import Unit, unit_of
from fsdp_overlap.tensor.extension import is_subclass
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from fsdp_overlap.tensor.row_tensor import RowTensor

Names = Callable[[str], str | None]
"""Gives the name by which others know a weight. ``None`` leaves it out."""


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers in the order of modules, each once, by its first
    name. Of units the sharded parameters, whatever is registered now: nothing is gathered or freed,
    unlike by ``state_dict()``."""
    param_groups = [param_group for unit in units_of(model) for param_group in unit.param_groups]
    sharded = {
        id(whole): each
        for param_group in param_groups
        for whole, each in zip(param_group.parameters, param_group.sharded_parameters, strict=True)
    }
    found: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for name, registered in own.items():
            if registered is None or name in module._non_persistent_buffers_set:
                continue
            tensor = sharded.get(id(registered), registered)
            if id(tensor) not in known:
                known.add(id(tensor))
                found[_without_wrappers(f"{prefix}.{name}" if prefix else name)] = tensor
    return found


def _without_wrappers(name: str) -> str:
    """Return ``name`` as it is without what torch.compile and checkpoint wrappers put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def renamed(weights: Mapping[str, torch.Tensor], names: Names | None) -> dict[str, torch.Tensor]:
    """Return ``weights`` by the names that ``names`` gives, without those that it leaves out.

    Raises:
        ValueError: two get the same name.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        given = name if names is None else names(name)
        if given in found:
            raise ValueError(f"names= gives two weights the name {given!r}, the second is {name!r}")
        if given is not None:
            found[given] = tensor
    return found


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units in ``model``."""
    found = (unit_of(module) for module in model.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def connected(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return the ranks that together have all of ``tensors``, of which this rank has parts: those
    along the dimensions of meshes that cut, over all tensors. Not those that hold copies alone."""
    parents: dict[int, int] = {}

    def root(rank: int) -> int:
        while parents.setdefault(rank, rank) != rank:
            rank = parents[rank]
        return rank

    cuts: dict[tuple[object, tuple[int, ...]], DTensor] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            cut = tuple(d for d, each in enumerate(tensor.placements) if not each.is_replicate())
            cuts.setdefault((tensor.device_mesh, cut), tensor)
    for (_, cut), tensor in cuts.items():
        mesh = tensor.device_mesh.mesh
        copied = [dim for dim in range(mesh.ndim) if dim not in cut]
        rows = mesh.permute(*copied, *cut).reshape(-1, *[mesh.size(dim) for dim in cut])
        for first, *others in (row.flatten().tolist() for row in rows):
            for other in others:
                parents[root(other)] = root(first)
    me = dist.get_rank() if dist.is_initialized() else 0
    return tuple(sorted({rank for rank in [me, *parents] if root(rank) == root(me)}))


def is_first(tensors: Collection[torch.Tensor]) -> bool:
    """Return whether this rank is among those that :func:`connected` gives for the first rank that
    has parts of ``tensors``. Others hold copies of theirs."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    return min((int(mesh.mesh.min()) for mesh in meshes), default=0) in connected(tensors)


def version_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return a number that is another one after an edit of ``tensor``, or of a sharded parameter
    that lies with it. ``None`` if edits of such a tensor may go unnoticed, as those of a fused
    optimizer do."""
    if isinstance(tensor, (RaggedDTensor, RowTensor)) and tensor.edits is not None:
        return tensor.edits.values, tensor._local_tensor._version
    return None


def checked(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return ``weights``, if all of them have values.

    Raises:
        RuntimeError: one is on the meta device.
        TypeError: the class of one alone knows how it is gathered.
    """
    for name, tensor in weights.items():
        if isinstance(tensor, DTensor) and is_subclass(tensor._local_tensor):
            raise TypeError(
                f"{name!r} is a {type(tensor._local_tensor).__name__}, whose class alone knows how "
                "it is put together: leave it out by names=, and take its full_tensor()"
            )
        if tensor.device.type == "meta":
            raise RuntimeError(
                f"{name!r} is on the meta device: call to_empty(device=...) on the model, then "
                "initialize it or load a checkpoint"
            )
    return weights
