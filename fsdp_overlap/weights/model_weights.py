"""The weights of a model by name, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.engine.unit import Unit, unit_of
from fsdp_overlap.features.rows.row_tensor import RowTensor
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from fsdp_overlap.tensor.subclasses import is_subclass
from fsdp_overlap.tensor.tiles import cut_dims
from fsdp_overlap.weights.chunks import check_placements

Names = Callable[[str], str | None]
"""Returns the name of a weight elsewhere, or ``None`` to leave it out."""


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers in the order of modules, each once, by its first
    name. Those of units are the sharded parameters, whatever is registered now: unlike
    ``state_dict()``, it gathers and frees nothing."""
    weights: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for name, tensor in named_weights(model):
        if id(tensor) not in known:
            known.add(id(tensor))
            weights[name] = tensor
    return weights


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what :func:`weights_of` returns, and tied ones by each of their names."""
    sharded: dict[int, torch.Tensor] = {}
    for unit in units_of(model):
        for group in unit.param_groups:
            sharded.update(zip(map(id, group.parameters), group.sharded_parameters, strict=True))
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for name, registered in own.items():
            if registered is None or name in module._non_persistent_buffers_set:
                continue
            yield name_of(prefix, name), sharded.get(id(registered), registered)


def name_of(prefix: str, name: str) -> str:
    """Return the name of a tensor of the module at ``prefix``, without those of wrappers."""
    path = f"{prefix}.{name}" if prefix else name
    for wrapper in _WRAPPERS:
        path = path.replace(wrapper, "")
    return path


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and checkpoint wrappers add to names."""


def renamed(
    weights: Mapping[str, torch.Tensor], names: Names | None = None
) -> dict[str, torch.Tensor]:
    """Return ``weights`` by the names that ``names`` gives, without those that it leaves out.

    Raises:
        RuntimeError: one is on the meta device.
        TypeError: one is of a class that alone knows how it is gathered.
        ValueError: two get the same name.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        new_name = name if names is None else names(name)
        if new_name in result:
            raise ValueError(
                f"names= gives two weights the name {new_name!r}, the second is {name!r}"
            )
        if new_name is not None:
            result[new_name] = tensor
    for name, tensor in result.items():
        refuse_subclass(name, tensor, "take its full_tensor()")
        if tensor.device.type == "meta":
            raise RuntimeError(
                f"{name!r} is on the meta device: call to_empty(device=...) on the model, then "
                "initialize it or load a checkpoint"
            )
    return result


def refuse_subclass(name: str, tensor: torch.Tensor, instead: str) -> None:
    """Raise TypeError if the class of ``tensor``'s shard alone knows what its elements are."""
    if isinstance(tensor, DTensor) and is_subclass(tensor._local_tensor):
        raise TypeError(
            f"{name!r} is a {type(tensor._local_tensor).__name__}, whose class alone knows how it "
            f"is put together: leave it out by names=, and {instead}"
        )


def check_class(name: str, tensor: torch.Tensor, instead: str) -> None:
    """Check that the elements of ``tensor`` on this rank are where their place says.

    Raises:
        TypeError: its class alone knows what they are, or they are not shards or replicas.
    """
    refuse_subclass(name, tensor, instead)
    if not isinstance(tensor, DTensor):
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(
                f"{name!r} is a {type(tensor).__name__}, whose class alone knows how it is put "
                f"together: leave it out by names=, and {instead}"
            )
    elif not isinstance(tensor, RaggedDTensor):
        check_placements(tensor)


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units in ``model``."""
    units = map(unit_of, model.modules())
    return list(dict.fromkeys(unit for unit in units if unit is not None))


def connected_ranks(
    tensors: Iterable[torch.Tensor], with_replicas: bool = False
) -> tuple[int, ...]:
    """Return the ranks that together hold ``tensors``, this one among them: those along the mesh
    dimensions that shard some tensor, but not those that hold replicas only, unless asked for."""
    parents: dict[int, int] = {}

    def root(rank: int) -> int:
        while parents.setdefault(rank, rank) != rank:
            rank = parents[rank]
        return rank

    cuts: dict[tuple[object, tuple[int, ...]], DTensor] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            every = tuple(range(tensor.device_mesh.ndim))
            cut = every if with_replicas else cut_dims(tensor._spec)
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
    """Return whether this rank is connected with the first rank of the meshes of ``tensors``.
    Others hold replicas."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    return min((int(mesh.mesh.min()) for mesh in meshes), default=0) in connected_ranks(tensors)


def version_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return a version that changes with each edit of ``tensor``, or of another parameter of its
    param group. ``None`` if edits may not be counted, as those by a fused optimizer."""
    if isinstance(tensor, (RaggedDTensor, RowTensor)) and tensor.edits is not None:
        return tensor.edits.values, tensor._local_tensor._version
    return None
