"""Layouts, a model that is hard to divide, and shards that are forced to be equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import PerTensor
from fsdp_overlap.comm import collectives
from fsdp_overlap.engine import param_group
from fsdp_overlap.layout import (
    BlockAtomic,
    Flat,
    LayoutRule,
    ParamGroupPlan,
    ParamSpec,
    TensorAtomic,
    pack,
)
from support.twins import Twins
from support.zoo import VOCABULARY, shard_root_only


def mixed(fqn: str, spec: ParamSpec) -> Flat | BlockAtomic | TensorAtomic:
    if "up" in fqn:
        return BlockAtomic(rows=2)
    return TensorAtomic() if "down" in fqn else Flat()


def in_rows(fqn: str, spec: ParamSpec) -> Flat | PerTensor:
    return PerTensor() if spec.shape else Flat()  # a scalar has none


LAYOUTS: dict[str, LayoutRule] = {
    "flat": Flat(),
    "blocks": BlockAtomic(rows=3),
    "rows": in_rows,
    "single rows": BlockAtomic(rows=1),
    "whole": TensorAtomic(),
    "padded": TensorAtomic(max_padding=inf),
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


@contextmanager
def forced_shards(padding: float, tensor_collectives: bool) -> Iterator[None]:
    """Make shards equal where this much padding does it. Below 0 they are never equal.

    ``tensor_collectives`` are those that NCCL gets. Gloo has them too.
    """

    def choose(group: dist.ProcessGroup, device: str, plan: ParamGroupPlan) -> Any:
        assert plan.is_equal
        return collectives.TensorCollectives(plan)

    with ExitStack() as stack:
        stack.enter_context(patch.object(pack, "DEFAULT_PADDING", padding))
        if tensor_collectives:
            stack.enter_context(patch.object(param_group, "choose", choose))
        yield
