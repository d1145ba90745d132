"""Layouts, and models to train under them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_overlap.layout import Blocks, Flat, LayoutRule, ParamSpec, Whole
from support.twins import Twins
from support.zoo import VOCABULARY, shard_root_only


def mixed(fqn: str, spec: ParamSpec) -> Flat | Blocks | Whole:
    if "up" in fqn:
        return Blocks(rows=2)
    return Whole() if "down" in fqn else Flat()


LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "blocks": Blocks(rows=3),
    "rows": Blocks(rows=1),
    "whole": Whole(),
    "mixed": mixed,
}


class Giant(nn.Module):
    """One parameter that dwarfs the others, of one and of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.giant = nn.Linear(4, 300)
        self.one = nn.Parameter(torch.ones(1, 1))
        self.nothing = nn.Parameter(torch.zeros(0, 2))
        self.head = nn.Linear(300, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.giant(self.embedding(tokens))) * self.one
        return self.head(x) + self.nothing.sum()


def train(layout: str, name: str) -> None:
    chosen: dict[str, Any] = {"layout": LAYOUTS[layout]}
    if name == "giant":
        Twins(Giant, shard_root_only, **chosen).train(2)
    else:
        Twins.of(name, **chosen).train(2)
