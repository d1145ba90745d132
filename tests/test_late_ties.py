"""Weights that are tied after ``fully_shard()``, within one unit, are one weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import Flat, FsdpContext, Rows, fully_shard
from fsdp_overlap.layout import LayoutRule
from support.ranks import run_ranks
from support.twins import loss_of
from support.zoo import VOCABULARY, Model


def build() -> Any:
    torch.manual_seed(3)
    model = Model(layers=2)
    model.head = nn.Linear(model.head.in_features, VOCABULARY, bias=False)
    return model.double()


def tie(model: Any) -> Any:
    model.embedding.weight = model.head.weight
    return model


def shard(model: Any, ctx: FsdpContext) -> None:
    for each in ([model.embedding, model.head], *model.layers, model):
        fully_shard(each, ctx)


def train(model: nn.Module, of_all_ranks: bool = False) -> list[torch.Tensor]:
    """Losses of three steps, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for _ in range(3):
        tokens, targets = torch.randint(VOCABULARY, (2, ranks, 4), generator=generator)
        mine = slice(None) if of_all_ranks else slice(rank, rank + 1)
        loss = loss_of(model(tokens[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean / ranks)
    wholes = (getattr(p, "full_tensor", p.detach)() for p in model.parameters())
    return [*found, *(whole.detach() for whole in wholes)]


def tied_late(layout: LayoutRule, start: str) -> None:
    ctx = FsdpContext(layout=layout)
    with torch.device("cpu" if start == "with memory" else "meta"):
        model = build()
    shard(model, ctx)
    if start == "emptied, then tied":
        model.to_empty(device="cpu")
    tie(model)
    if start == "tied, then emptied":
        model.to_empty(device="cpu")
    if start != "with memory":
        model.load_state_dict(tie(build()).state_dict())
    found, expected = train(model), train(tie(build()), of_all_ranks=True)
    assert model.embedding.weight is model.head.weight
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layout", [Flat(), Rows()])
@pytest.mark.parametrize("start", ["with memory", "emptied, then tied", "tied, then emptied"])
def test_weights_that_are_tied_late_train_as_one(layout: LayoutRule, start: str) -> None:
    run_ranks(tied_late, 2, layout, start)


def tied_across_units() -> None:
    model = build()
    ctx = FsdpContext()
    for module in (model.embedding, model.head, *model.layers, model):
        fully_shard(module, ctx)
    tie(model)
    with pytest.raises(RuntimeError, match=r"tie parameters before, or within one unit"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def test_weights_of_two_units_are_not_tied_late() -> None:
    run_ranks(tied_across_units, 2)
