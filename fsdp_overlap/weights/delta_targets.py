"""Apply weight deltas to the tensors of a receiver, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.weights.delta_format import DeltaMessage, WeightDelta, bits_of
from fsdp_overlap.weights.model_weights import named_weights

Targets = nn.Module | Mapping[str, torch.Tensor]
"""An unsharded module, whose tensors have the names of its state dict, or tensors by name."""


def apply_deltas(targets: Targets, message: DeltaMessage, version: int) -> int:
    """Write the values of ``message`` into ``targets``, which are of ``version``, 0 for none. The
    message is collected and checked before the first value is written.

    A message must have the deltas of all ranks that send: :meth:`DeltaMessage.merged`.

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
        TypeError: one is sharded, or has no memory of its own.
    """
    found = dict(named_weights(targets) if isinstance(targets, nn.Module) else targets)
    for name, tensor in found.items():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.is_meta or any(size > 1 and not stride for size, stride in steps):
            what = "on the meta device" if tensor.is_meta else "expanded"
            raise TypeError(f"{name!r} is {what}, and has no memory for what is written")
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
        for name in sent:
            _check_covered(name, targets[name].numel(), deltas)


def _check_covered(name: str, numel: int, deltas: list[WeightDelta]) -> None:
    covered = torch.zeros(numel, dtype=torch.bool)
    for delta in deltas:
        if delta.name == name and delta.indices is None:
            covered[delta.start : delta.start + delta.values.numel()] = True
        elif delta.name == name and delta.indices is not None:
            covered[delta.indices.cpu().long()] = True
    if not covered.all():
        raise ValueError(
            f"of {name!r} some values are not sent, and others twice: the deltas of some rank are "
            "missing, and those of another came twice"
        )


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
    known: dict[object, str] = {}
    for name in sent:
        first = known.setdefault(_place(targets[name]), name)
        if first != name and targets[name].numel():
            raise ValueError(
                f"{first!r} and {name!r} are sent apart, and their targets are tied: untie them"
            )
    for name, target in targets.items():
        if target.numel() and _place(target) not in known:
            raise ValueError(f"nobody sends {name!r}")
    for name, count in sent.items():
        if count != prod(targets[name].shape):
            raise ValueError(
                f"of {name!r} {count} of {targets[name].numel()} values are sent: the deltas of "
                "some rank are missing, or came twice"
            )


def _place(tensor: torch.Tensor) -> object:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


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
