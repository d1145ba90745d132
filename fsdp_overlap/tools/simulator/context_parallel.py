"""Attention over sequences that several ranks share, as torch's ``context_parallel()`` has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F


@contextmanager
def shared_attention(group: dist.ProcessGroup) -> Iterator[None]:
    """Within, let attention of this rank's tokens see those of all ranks of ``group``: keys and
    values are gathered, and their gradients reduced.

    Raises:
        ValueError: no attention was called as ``F.scaled_dot_product_attention``, or one with a
            mask.
    """
    of_rank, called = F.scaled_dot_product_attention, False

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any
    ) -> Any:
        nonlocal called
        called = True
        if attn_mask is not None:
            raise ValueError(
                f"context_parallel={group.size()}: the model masks its attention, as for a sliding "
                "window, and ranks share sequences of causal attention alone; leave it at 1, or "
                "use a sequence that is shorter than the window"
            )
        key, value = (_Gather.apply(each, group) for each in (key, value))
        return of_rank(query, key, value, None, *args, **options)

    with patch.object(F, "scaled_dot_product_attention", attend):
        yield
    if not called:
        raise ValueError(
            f"context_parallel={group.size()}: the model does not call "
            "F.scaled_dot_product_attention, by which ranks share sequences; leave it at 1"
        )


class _Gather(torch.autograd.Function):
    """The sequence, which is the third dimension, of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        first = part.movedim(2, 0).contiguous()
        whole = first.new_empty(group.size() * len(first), *first.shape[1:])
        dist.all_gather_into_tensor(whole, first, group)
        return whole.movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].movedim(2, 0).contiguous()
        part = whole.new_empty(len(whole) // ctx.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=ctx.group)
        return part.movedim(0, 2), None
