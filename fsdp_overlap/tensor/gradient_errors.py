"""Errors in backward, where a gradient would have to flow into a sharded tensor.

Sharded parameters take no part in autograd: units compute with the unsharded ones. Results of ops
on them require grad as those of other tensors do, so that code which reads or copies parameters
outside of ``torch.no_grad()`` works. The node behind each result raises when backward comes to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass

_START = torch.empty(0, requires_grad=True)
"""What the nodes are functions of, in place of sharded tensors. No gradient gets here."""


class _NoGradient(torch.autograd.Function):
    """Returns the tensor in ``made``, or ``edited`` itself."""

    @staticmethod
    def forward(
        ctx: Any,
        start: torch.Tensor,
        made: list[torch.Tensor],
        edited: torch.Tensor | None,
        name: str,
        parameter: str,
    ) -> torch.Tensor:
        ctx.op_name, ctx.parameter, ctx.is_edit = name, parameter, edited is not None
        if edited is None:
            return made[0]
        ctx.mark_dirty(edited)
        return edited

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"backward through {ctx.op_name} on {ctx.parameter}: gradients do not flow through "
            "sharded tensors; use the parameter inside its unit's forward, or call the op under "
            "torch.no_grad() or on parameter.detach() if no gradient is wanted"
        )


def raise_in_backward(name: str, result: Any, operands: Iterable[Any]) -> Any:
    """Return ``result``, a new tensor. It requires grad if one of ``operands`` does, and then
    backward raises where it comes to it."""
    source = _source(operands)
    if source is None or not _is_differentiable(result):
        return result
    return _NoGradient.apply(_START, [result], None, name, _described(source))


def edit_raises_in_backward(name: str, edited: torch.Tensor, operands: Iterable[Any]) -> None:
    """Do as :func:`raise_in_backward`, for a tensor that was edited in place."""
    source = _source(operands)
    if source is None or requires_grad(edited) or not _is_differentiable(edited):
        return  # what requires grad already raises, or autograd knows how it came about
    _NoGradient.apply(_START, [], edited, name, _described(source))


def check_edit(name: str, target: torch.Tensor) -> None:
    """Refuse to edit a parameter in place, or a view of it, as autograd does.

    Raises:
        RuntimeError: gradients are recorded and ``target`` is a leaf that requires grad, or a view
            of one.
    """
    if not torch.is_grad_enabled():
        return
    with DisableTorchFunctionSubclass():
        node: Any = target.grad_fn
        is_leaf = target.requires_grad and node is None
    # What shares a parameter's memory was made by a view, or by data and edited since.
    is_view = node is not None and getattr(target, "edits", None) is not None
    if is_leaf or (is_view and not getattr(node, "is_edit", True)):
        raise RuntimeError(
            f"{name} edits {_described(target)}, which requires grad, in place: call it under "
            "torch.no_grad(), or on parameter.data"
        )


def needs_gradient(operands: Iterable[Any]) -> bool:
    """Return whether autograd would record an op on ``operands``."""
    return _source(operands) is not None


def requires_grad(tensor: torch.Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        return tensor.requires_grad


def tensor_operands(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``values``, and those in lists among ``values``."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _source(operands: Iterable[Any]) -> torch.Tensor | None:
    """Return the first of ``operands`` that a gradient would have to flow to."""
    if not torch.is_grad_enabled():
        return None
    with DisableTorchFunctionSubclass():
        return next((each for each in tensor_operands(operands) if each.requires_grad), None)


def _is_differentiable(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    with DisableTorchFunctionSubclass():
        return value.is_floating_point() or value.is_complex()


def _described(tensor: torch.Tensor) -> str:
    with DisableTorchFunctionSubclass():
        shape, node = tuple(tensor.shape), tensor.grad_fn
    known = getattr(node, "parameter", None)
    if known is not None:
        return str(known)
    # As engine/param notes it. Results of ops belong to no unit.
    if (owner := getattr(tensor, "_fsdp_owner", None)) is not None:
        return f"parameter {owner.fqn!r} of {owner.unit}"
    return f"a {type(tensor).__name__} of shape {shape}"
