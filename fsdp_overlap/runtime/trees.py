"""Tensors inside the arguments and outputs of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fsdp_overlap.torch_internals import SUPPORTED_NODES, tree_map_only

# Types that cannot hold a tensor. An object of any other type might.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """Every tensor in nested lists, tuples, mappings, dataclasses and registered pytree nodes."""
    # A single tensor is by far the most common, and saves a generator in each forward.
    return (value,) if isinstance(value, torch.Tensor) else tuple(_walk(value))


def _walk(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _walk(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name, None))
    elif type(value) in SUPPORTED_NODES:
        for item in SUPPORTED_NODES[type(value)].flatten_fn(value)[0]:
            yield from _walk(item)


def may_hide_tensors(value: Any) -> bool:
    """Whether ``value`` is an object that :func:`tensors_in` cannot look into."""
    return not (
        isinstance(value, (torch.Tensor, list, tuple, set, Mapping, *_PLAIN))
        or dataclasses.is_dataclass(value)
        or type(value) in SUPPORTED_NODES
    )


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor in it replaced by ``change(tensor)``. A value without tensors is
    returned as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if not tensors_in(value):
        return value
    if isinstance(value, tuple):
        items = [map_tensors(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (list, set)):
        return type(value)(map_tensors(change, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{name: map_tensors(change, getattr(value, name)) for name in fields}
        )
    return tree_map_only(torch.Tensor, change, value)
