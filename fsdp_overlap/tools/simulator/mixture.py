"""Mixtures of experts that are spread over ranks, and get tokens without reading any value."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

COMM_BACKENDS = ("standard", "deepep")


def spread_experts(
    model: nn.Module, group: dist.ProcessGroup | None, comm_backend: str = "standard"
) -> list[nn.Module]:
    """Leave of the experts in each mixture of a model of transformers those that this rank of
    ``group`` has, and give all experts equally many tokens. Routers, shared experts and all else in
    a mixture stay as they are. Return the modules that have the experts' stacked weights.

    ``comm_backend``: with ``"standard"`` a token travels once for each expert that it goes to, with
    ``"deepep"`` once for each rank.

    Raises:
        ValueError: the ranks of ``group`` cannot have equally many experts.
    """
    ranks = 1 if group is None else group.size()
    found = []
    for module in model.modules():
        down = getattr(module, "down_proj", None)
        # transformers' decorator of stacked experts says how their weights lie.
        if isinstance(down, nn.Parameter) and hasattr(module, "is_transposed"):
            found.append(module)
            total = len(down)
            if total % ranks:
                raise ValueError(
                    f"{total} experts cannot be spread over {ranks} ranks: {total} is no multiple "
                    f"of {ranks}"
                )
            for name, stacked in list(module.named_parameters(recurse=False)):
                own = nn.Parameter(stacked.new_empty(total // ranks, *stacked.shape[1:]))
                setattr(module, name, own)
            module.forward = partial(_run_experts, module, total, group, comm_backend)
    return found


def _run_experts(
    experts: Any,
    total: int,
    group: dist.ProcessGroup | None,
    comm_backend: str,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted outputs of ``chosen`` experts ``[tokens, experts a token]`` for the
    tokens ``hidden`` ``[tokens, width]``. Which they are is not read: all get equally many."""
    tokens, per_token = chosen.shape
    count, ranks = tokens * per_token, 1 if group is None else group.size()
    if count % total:
        raise ValueError(
            f"{tokens} tokens for {per_token} experts each cannot be balanced over {total} "
            f"experts: {count} is no multiple of {total}"
        )
    weights = weights.to(hidden.dtype).t().reshape(count, 1)
    sent = count
    if comm_backend == "deepep":
        # Of ranks as if each expert of a token were on any, with the same chance.
        distinct = ranks * (1 - (1 - 1 / ranks) ** per_token)
        sent = round(tokens * distinct / ranks) * ranks
    # The token of each row that travels. Experts take rows in their order, equally many.
    sources = torch.arange(sent, device=hidden.device) % tokens
    rows = _exchange(hidden.index_select(0, sources), group)
    if sent == count:
        rows = _in_experts(experts, rows, total, ranks)
        rows = _exchange(rows, group) * weights
    else:
        places = torch.arange(count, device=hidden.device) % sent
        outputs = _in_experts(experts, rows.index_select(0, places), total, ranks) * weights
        rows = _exchange(torch.zeros_like(rows).index_add(0, places, outputs), group)
    return torch.zeros_like(hidden).index_add(0, sources, rows)


def _in_experts(experts: Any, rows: torch.Tensor, total: int, ranks: int) -> torch.Tensor:
    """Return the outputs of this rank's experts for ``rows`` ``[rows, width]``, of which each rank
    has sent some for each expert here."""
    of_ranks = (ranks, total // ranks, -1, rows.shape[-1])
    rows = rows.view(of_ranks).transpose(0, 1).flatten(1, 2)
    inner = _linear(experts, rows, "gate_up_proj" if experts.has_gate else "up_proj")
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    rows = _linear(experts, inner, "down_proj")
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    rows = rows.view(of_ranks[1], ranks, -1, of_ranks[3])
    return rows.transpose(0, 1).flatten(0, 2)


def _linear(experts: Any, rows: torch.Tensor, name: str) -> torch.Tensor:
    weight = getattr(experts, name)
    outputs = torch.bmm(rows, weight if experts.is_transposed else weight.mT)
    return outputs + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else outputs


def _exchange(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return rows if group is None else _Exchange.apply(rows, group)


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
