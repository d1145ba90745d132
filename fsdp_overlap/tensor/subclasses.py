"""Tensors of classes of their own: what they consist of, and the methods of FSDP2's extensions."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_subclass(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is of a class of its own."""
    return type(tensor) not in (torch.Tensor, nn.Parameter)


def missing_methods(tensor: torch.Tensor) -> list[str]:
    """Return which of the two methods ``tensor`` does not have."""
    return [name for name in (PRE, POST) if not hasattr(tensor, name)]


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that ``tensor`` consists of. None if its class does not tell."""
    if not is_subclass(tensor):
        return [tensor]
    if isinstance(tensor, DTensor):  # its flattening names its mesh, too
        return inner_tensors(tensor._local_tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names = flatten()[0] if flatten is not None else ()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]
