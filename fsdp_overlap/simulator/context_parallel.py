"""Attention over sequences that several ranks share, as torch's ``context_parallel()`` has it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_overlap.comm.collectives import gather_into, reduce_into


def shared_attention(group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """Return a context in which attention of this rank's tokens sees those of all ranks of
    ``group``: keys and values are gathered, and their gradients reduced."""
    attention = partial(_attention, F.scaled_dot_product_attention, group)
    return patch.object(F, "scaled_dot_product_attention", attention)


def _attention(
    attention: Any,
    group: dist.ProcessGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    key, value = (_Gather.apply(each, group) for each in (key, value))
    return attention(query, key, value, *args, **options)


class _Gather(torch.autograd.Function):
    """The sequence, which is the third dimension, of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        first = part.movedim(2, 0).contiguous()
        whole = first.new_empty(group.size() * len(first), *first.shape[1:])
        gather_into(whole, first, group)
        return whole.movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].movedim(2, 0).contiguous()
        part = whole.new_empty(len(whole) // ctx.group.size(), *whole.shape[1:])
        reduce_into(part, whole, ctx.group, dist.ReduceOp.SUM)
        return part.movedim(0, 2), None
