"""States of matrices in state dicts: sharded tensors, of which one rank holds all elements.

So what gathers, broadcasts and saves sharded tensors does it with the states of matrices, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.optim.owner_groups import OwnerGroup
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, RaggedShard, contiguous_spec

States = Mapping[str, Mapping[str, Any]]
"""The states of a parameter's matrices, by their number."""


class _TensorInfo(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device_type: str


def with_states_of_all_ranks(own: Sequence[States], group: OwnerGroup) -> list[dict[str, Any]]:
    """Return the states of all matrices of some parameters, each of which one rank of ``group`` has
    in ``own``. Tensors are sharded: their owner holds all elements. Collective over ``group``."""
    infos = _mapped(_info_of, list(own))
    what = "LayerWise.state_dict(), which is collective,"
    infos_by_rank = gather_objects(infos, group.group, group.device, what)
    mesh = DeviceMesh.from_group(group.group, group.device.type)
    found: list[dict[str, Any]] = [{} for _ in own]
    for rank, its in enumerate(infos_by_rank):
        for states, held, here in zip(found, its, own, strict=True):
            values = here if rank == group.rank else held
            states |= _mapped(partial(_sharded, rank, mesh), values)
    return [{number: states[number] for number in sorted(states, key=int)} for states in found]


def local_states(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of a matrix with plain tensors, or ``None`` if this rank lacks elements."""
    is_here = True

    def local_of(value: Any) -> Any:
        nonlocal is_here
        if not isinstance(value, RaggedDTensor):
            return value
        local = value.to_local()
        is_here = is_here and local.numel() == value.numel()
        return local.view(value.shape) if is_here else None

    found: dict[str, Any] = _mapped(local_of, dict(state))
    return found if is_here else None


def _info_of(value: Any) -> Any:
    if not _is_sharded(value):
        return value.cpu() if isinstance(value, torch.Tensor) else value
    return _TensorInfo(value.shape, value.dtype, value.device.type)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


def _sharded(owner: int, mesh: DeviceMesh, value: Any) -> Any:
    """Return the sharded tensor that ``owner`` holds: ``value`` is the tensor, or its info on other
    ranks. Return anything else as it is."""
    if isinstance(value, _TensorInfo):
        local = torch.empty(0, dtype=value.dtype, device=value.device_type)
    elif _is_sharded(value):
        local = value.detach().reshape(-1)
    else:
        return value
    placement = RaggedShard(((owner, 0, value.shape.numel()),))
    return RaggedDTensor.wrap(local, contiguous_spec(mesh, (placement,), value.shape, value.dtype))


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value``, nested mappings, lists and tuples, with ``function`` of what they hold."""
    if isinstance(value, Mapping):
        return {key: _mapped(function, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, _TensorInfo):
        return type(value)(_mapped(function, each) for each in value)
    return function(value)
