"""Mixtures of experts that are spread over ranks, and get tokens without reading any value."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    """The experts of this rank, with gated layers like those of Llama. All get as many rows."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the experts' outputs of ``rows`` ``[experts, rows, width]``, of the same
        shape."""
        gate, up = torch.bmm(rows, self.gate_up).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down)


class Mixture(nn.Module):
    """Sends each token to ``chosen`` of all experts, of which each rank of ``group`` has a part.

    The router's scores are computed as in a model with values. Which experts get a token is made
    up: all get equally many. One all-to-all brings rows to their experts, and one brings them back.
    """

    def __init__(
        self,
        experts: int,
        chosen: int,
        width: int,
        inner: int,
        shared: nn.Module | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.ranks = 1 if group is None else group.size()
        self.group = group
        self.total, self.chosen = experts, chosen
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts // self.ranks, width, inner)
        self.shared = shared

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)
        count = len(tokens) * self.chosen
        if count % self.total:
            raise ValueError(
                f"{len(tokens)} tokens for {self.chosen} experts each cannot be balanced over "
                f"{self.total} experts: {count} is no multiple of {self.total}"
            )
        scores = self.gate(tokens).float().sigmoid().topk(self.chosen, -1).values
        weights = (scores / scores.sum(-1, keepdim=True)).to(tokens.dtype)
        # The token of each row. Experts take rows in their order, equally many.
        sources = torch.arange(count, device=hidden.device) % len(tokens)
        rows = self._exchange(tokens.index_select(0, sources))
        # Each rank has sent some rows for each expert here.
        of_ranks = (self.ranks, self.total // self.ranks, -1, tokens.shape[-1])
        rows = rows.view(of_ranks).transpose(0, 1).flatten(1, 2)
        rows = self.experts(rows).view(of_ranks[1], self.ranks, -1, of_ranks[3])
        rows = self._exchange(rows.transpose(0, 1).reshape(count, -1))
        rows = rows * weights.t().reshape(count, 1)
        output = torch.zeros_like(tokens).index_add(0, sources, rows).view_as(hidden)
        return output if self.shared is None else output + self.shared(hidden)

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.group is None else _Exchange.apply(rows, self.group)


class _Exchange(torch.autograd.Function):
    """An all-to-all of equally many rows from each rank to each."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.forward(ctx, gradients[0].contiguous(), ctx.group), None


def spread_experts(model: nn.Module, group: dist.ProcessGroup | None) -> list[Experts]:
    """Put a :class:`Mixture` in the place of each mixture of a model of transformers, and return
    the experts of all of them. Mixtures are modules with a ``gate`` and with ``experts`` that are
    stacked. Call it with the device on which the model lies as the default.

    Raises:
        ValueError: the ranks of ``group`` cannot have equally many experts.
    """
    chosen: int = getattr(getattr(model, "config", None), "num_experts_per_tok", 1)
    found = []
    for module in list(model.modules()):
        for name, inside in list(module.named_children()):
            stacked = getattr(getattr(inside, "experts", None), "down_proj", None)
            if isinstance(stacked, nn.Parameter) and hasattr(inside, "gate"):
                total, width, inner = stacked.shape
                ranks = 1 if group is None else group.size()
                if total % ranks:
                    raise ValueError(
                        f"{total} experts cannot be spread over {ranks} ranks: {total} is no "
                        f"multiple of {ranks}"
                    )
                shared = getattr(inside, "shared_experts", None)
                mixture = Mixture(total, chosen, width, inner, shared, group)
                setattr(module, name, mixture)
                found.append(mixture.experts)
    return found
