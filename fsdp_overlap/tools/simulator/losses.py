"""Losses of a language model, by what their kernels read and write."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_overlap.tools.emulator import active

LOSSES = ("standard", "eager", "fused", "chunked")


def loss_of(kind: str, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of ``logits`` ``[batch, sequence, vocabulary]``, which are the loss itself
    after :func:`chunk_loss`."""
    if kind == "chunked":
        return logits.mean()
    if kind == "fused":
        return _in_place(logits)
    if kind == "eager":
        return _fuse(_standard(_fuse(logits, False), targets), True)
    return _standard(logits, targets)


def _standard(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class _Fuse(torch.autograd.Function):
    """Passes a tensor on. What follows is fused, or is not; in backward, the other way around."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, fuses: bool) -> torch.Tensor:
        ctx.clock = active().timing
        ctx.fuses = ctx.clock.fuses = fuses
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.fuses = not ctx.fuses
        return gradients[0], None


def _fuse(tensor: torch.Tensor, fuses: bool) -> torch.Tensor:
    passed: torch.Tensor = _Fuse.apply(tensor, fuses)
    return passed


def chunk_loss(model: Any) -> None:
    """Have the head of ``model``, of transformers, compute logits, their gradients and its own a
    few tokens at a time, and return the loss.

    Raises:
        ValueError: the model does not say which module its head is.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"loss='chunked': {type(model).__name__} has no head that is an nn.Linear, which "
            "get_output_embeddings() returns"
        )
    cast(Any, head).forward = partial(_chunked_loss, head)


def _chunked_loss(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _ChunkedLoss.apply(hidden.flatten(0, -2), head.weight)
    return loss.view(1, 1, 1)


class _InPlace(torch.autograd.Function):
    """A kernel that puts the gradients of logits in their place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits.detach().mul_(1))
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        saved: torch.Tensor
        (saved,) = ctx.saved_tensors
        return saved


def _in_place(logits: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _InPlace.apply(logits)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """As many chunks as logits are larger than the hidden states, as Liger-Kernel has them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        chunks = -(-weight.shape[0] // weight.shape[1])
        of_weight = torch.zeros_like(weight)
        of_hidden = []
        for rows in hidden.chunk(chunks):
            logits = (rows @ weight.t()).mul_(1)  # by the gradients, in their place
            of_hidden.append(logits @ weight)
            of_weight.addmm_(logits.t(), rows)
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden, of_weight
