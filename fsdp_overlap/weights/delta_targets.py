"""Apply weight deltas to the tensors of a receiver, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.weights.delta_format import DeltaMessage, WeightDelta, bits_of

Targets = nn.Module | Mapping[str, torch.Tensor]
"""An unsharded module, whose tensors have the names of its state dict, or tensors by name."""


def apply_deltas(targets: Targets, message: DeltaMessage, version: int) -> int:
    """Write the values of ``message`` into ``targets``, which are of ``version``, 0 for none. The
    message is collected and checked before the first value is written.

    A message is complete if it has the deltas of all ranks that send, in any order::

        DeltaMessage(first.version, first.base, [delta for each in messages for delta in each])

    Returns:
        The version that the targets are of now.

    Raises:
        TypeError: a target is sharded.
        ValueError: the message is against another version; a delta has a name that is not among
            ``targets``, another shape or dtype, or positions outside of its tensor; or a dense one
            does not have all values. Nothing was written.
    """
    tensors = tensors_of(targets)
    deltas = list(message)
    check_base(message, version)
    check_deltas(tensors, deltas, is_dense=message.base == 0)
    for delta in deltas:
        write(tensors, delta)
    return message.version


def tensors_of(targets: Targets) -> dict[str, torch.Tensor]:
    """Return the tensors of ``targets`` by name.

    Raises:
        TypeError: one is sharded.
    """
    found = dict(targets.state_dict() if isinstance(targets, nn.Module) else targets)
    for name, tensor in found.items():
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name!r} is a {type(tensor).__name__}, and deltas are written into full tensors: "
                "use WeightResharder for sharded ones"
            )
    return {name: tensor.detach() for name, tensor in found.items()}


def check_base(message: DeltaMessage, version: int) -> None:
    """Check that ``message`` applies to weights of ``version``.

    Raises:
        ValueError: it does not.
    """
    if message.base not in (0, version):
        raise ValueError(
            f"version {message.version} has what changed since version {message.base}, and these "
            f"weights are of version {version}: apply those between, or a message with all values, "
            "which dense=True sends"
        )


def check_deltas(
    targets: Mapping[str, torch.Tensor], deltas: list[WeightDelta], *, is_dense: bool
) -> None:
    """Check that all ``deltas`` can be written, and if they are dense that they are complete.

    Raises:
        ValueError: they cannot, or are not.
    """
    for delta in deltas:
        target = check_target(targets, delta.name, delta.shape, delta.values.dtype)
        indices, count = delta.indices, delta.values.numel()
        if indices is None:
            is_inside = 0 <= delta.start <= target.numel() - count
        else:
            is_inside = indices.shape == delta.values.shape
            is_inside &= not ((indices < 0) | (indices >= target.numel())).any()
        if not is_inside:
            raise ValueError(
                f"{delta.name!r}: positions of {count} values are outside of its "
                f"{target.numel()} elements"
            )
    if is_dense:
        sent = Counter({delta.name: 0 for delta in deltas})
        for delta in deltas:
            sent[delta.name] += delta.values.numel()
        check_complete(targets, sent)


def check_target(
    targets: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the target of a weight.

    Raises:
        ValueError: there is none, or it has another shape or dtype.
    """
    if (target := targets.get(name)) is None:
        raise ValueError(f"{name!r} is sent, and not among the {len(targets)} targets")
    wanted, sent = (tuple(target.shape), target.dtype), (tuple(shape), dtype)
    if wanted != sent:
        raise ValueError(f"{name!r} is sent as (shape, dtype) {sent}, and its target is {wanted}")
    return target


def check_complete(targets: Mapping[str, torch.Tensor], sent: Mapping[str, int]) -> None:
    """Check that all elements of ``targets`` are sent, of which ``sent`` counts them by name. A
    target may share its memory with another one, as tied weights do.

    Raises:
        ValueError: some are not.
    """
    known = {(targets[name].data_ptr(), targets[name].numel()) for name in sent}
    for name, target in targets.items():
        if target.numel() and (target.data_ptr(), target.numel()) not in known:
            raise ValueError(f"nobody sends {name!r}")
    for name, count in sent.items():
        if count != prod(targets[name].shape):
            raise ValueError(
                f"of {name!r} {count} of {targets[name].numel()} values are sent: the deltas of "
                "some rank are missing, or came twice"
            )


def write(targets: Mapping[str, torch.Tensor], delta: WeightDelta) -> None:
    """Write the values of ``delta``, which was checked."""
    target, values = (
        bits_of(targets[delta.name]),
        bits_of(delta.values).to(targets[delta.name].device),
    )
    if not target.is_contiguous():
        places = delta.positions().long().to(target.device)
        target[torch.unravel_index(places, target.shape)] = values
    elif delta.indices is None:
        target.view(-1)[delta.start : delta.start + values.numel()] = values
    else:
        target.view(-1).index_copy_(0, delta.indices.long().to(target.device), values)
