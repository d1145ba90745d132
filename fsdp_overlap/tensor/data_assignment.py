"""``tensor.data = value``, where units gather the memory that their parameters have."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch


def note_alias(alias: Any, tensor: Any) -> None:
    """Notes that ``alias`` shares the memory of ``tensor``, if that is the memory of a
    parameter."""
    if tensor.edits is None:
        return
    if tensor.aliases is None:
        tensor.aliases = WeakSet()
    tensor.aliases.add(alias)
    alias.aliases = tensor.aliases


@torch.no_grad()
def assign_data(tensor: Any, value: Any) -> None:
    """Runs ``tensor.data = value``. Collective where ``tensor.copy_(value)`` is.

    A parameter keeps its memory, which its unit gathers, and takes the values. Whatever shared that
    memory keeps the old values, in memory of its own, as without sharding. But later edits of
    ``value`` are no edits of the parameter. Any other tensor takes the memory of ``value``.

    Raises:
        RuntimeError: ``value`` has another shape, dtype or device, or lies otherwise over the ranks
            than a ``tensor`` that is no parameter. Nothing was changed.
    """
    if value is tensor or _has_memory_of(value, tensor):
        return  # as after ``tensor.data += 1``
    wanted, given = ((tuple(x.shape), x.dtype, x.device.type) for x in (tensor, value))
    if wanted != given:
        raise RuntimeError(
            f"the data of a {type(tensor).__name__} of (shape, dtype, device) {wanted} cannot be "
            f"replaced by a tensor of {given}: move or cast a module before fully_shard()"
        )
    if tensor.edits is not None and hasattr(tensor, "_fsdp_owner"):  # see engine/param
        for alias in set(tensor.aliases or ()) - {tensor}:
            alias._local_tensor = alias._local_tensor.clone()
            alias.edits = alias.aliases = None
        tensor.aliases = None
        torch.Tensor.copy_(tensor, value)
        return
    spec = getattr(value, "_spec", None)
    if spec is None or spec.mesh != tensor._spec.mesh or spec.placements != tensor._spec.placements:
        raise RuntimeError(
            f"the data of {tensor!r} can only be replaced by a tensor that lies as it does over "
            f"the ranks, not by {value!r}: use copy_()"
        )
    if not tensor._local_tensor.is_set_to(value._local_tensor):
        tensor._local_tensor = value._local_tensor.detach()
        tensor.edits = getattr(value, "edits", None)
        tensor.aliases = None
        if tensor.edits is not None:
            note_alias(tensor, value)


def _has_memory_of(value: Any, tensor: Any) -> bool:
    """Whether both share all of the memory of a parameter. The answer is the same on every rank."""
    aliases = getattr(value, "aliases", None)
    return aliases is not None and aliases is tensor.aliases and value._spec is tensor._spec
