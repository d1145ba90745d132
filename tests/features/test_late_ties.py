"""Weights that are tied after ``fully_shard()``, within one unit, are one weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import Flat, FsdpContext, PerTensor, fully_shard
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


@pytest.mark.parametrize("layout", [Flat(), PerTensor()])
@pytest.mark.parametrize("start", ["with memory", "emptied, then tied", "tied, then emptied"])
def test_weights_that_are_tied_late_train_as_one(layout: LayoutRule, start: str) -> None:
    run_ranks(tied_late, 2, layout, start)


def tied_across_units() -> None:
    model = build()
    ctx = FsdpContext()
    for module in (model.embedding, [model.head, model.layers[0]], model.layers[1], model):
        fully_shard(module, ctx)
    tie(model)
    with pytest.raises(RuntimeError, match=r"tie\s+those of one unit"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def test_a_weight_is_not_tied_late_to_one_of_a_unit_of_several() -> None:
    run_ranks(tied_across_units, 2)


def tied_and_more() -> None:
    model = build()
    shard(model, FsdpContext())
    tie(model)
    model.layers[0].norm.weight = nn.Parameter(torch.full((6,), 5.0, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"'weight' of unit 'layers.0' was replaced"):
        model(torch.zeros(1, 2, dtype=torch.int64))
    model = build()
    ctx = FsdpContext()
    fully_shard([model.embedding, model.head, model.layers[0].norm], ctx)
    fully_shard(model, ctx)
    tie(model)
    model.layers[0].norm.weight = nn.Parameter(torch.full((6,), 5.0, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="was replaced after"):
        model(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"tied after fully_shard.*tie them before"):
        copy.deepcopy(model)


def test_a_tie_does_not_hide_what_else_was_replaced() -> None:
    run_ranks(tied_and_more, 2)


def loaded_without_the_tied_name() -> None:
    """As safetensors has it: the name of a weight that is tied is not there."""
    with torch.device("meta"):
        model = build()
    shard(model, FsdpContext())
    tie(model)
    plain = tie(build())
    state = {name: value for name, value in plain.state_dict().items() if "head" not in name}
    model.load_state_dict(state, assign=True, strict=False)
    assert model.embedding.weight is model.head.weight
    tokens = torch.arange(4)[None]
    torch.testing.assert_close(model(tokens), plain(tokens))


def test_a_model_on_meta_loads_a_state_without_the_name_that_is_tied() -> None:
    run_ranks(loaded_without_the_tied_name, 2)
