"""Module trees drawn at random, sharded at random, against an unsharded twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, fully_shard
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import VOCABULARY, WIDTH


@dataclass(frozen=True)
class Node:
    """``kind`` says what it computes with its children, ``unit`` whether it is a unit."""

    kind: str
    unit: bool = False
    frozen: bool = False
    hidden: int = 1
    children: tuple[Node, ...] = field(default=())


KINDS = ("chain", "residual", "twice", "parallel", "checkpoint", "reentrant", "skip", "detached")


def leaves() -> st.SearchStrategy[Node]:
    return st.builds(
        Node,
        kind=st.sampled_from(["linear", "norm", "tied", "nothing", "unused"]),
        unit=st.booleans(),
        frozen=st.booleans(),
        hidden=st.integers(1, 9),
    )


def trees() -> st.SearchStrategy[Node]:
    def around(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        return st.builds(
            Node,
            kind=st.sampled_from(KINDS),
            unit=st.booleans(),
            children=st.lists(inner, min_size=1, max_size=3).map(tuple),
        )

    return st.recursive(leaves(), around, max_leaves=8)


class Built(nn.Module):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.inner = nn.ModuleList(Built(child) for child in node.children)
        if node.kind in ("linear", "tied", "unused"):
            self.up = nn.Linear(WIDTH, node.hidden, bias=node.kind != "tied")
            self.down = nn.Linear(node.hidden, WIDTH)
        if node.kind == "tied":
            self.again = nn.Linear(WIDTH, node.hidden, bias=False)
            self.again.weight = self.up.weight
        if node.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        if node.frozen:
            for parameter in self.parameters():
                parameter.requires_grad_(False)

    def chain(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.inner:
            x = module(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.node.kind
        if kind == "linear":
            return self.down(torch.tanh(self.up(x)))
        if kind == "tied":
            return self.down(torch.tanh(self.up(x)) * self.again(x))
        if kind == "norm":
            return self.norm(x)
        if kind == "residual":
            return x + self.chain(x)
        if kind == "twice":
            return self.chain(self.chain(x))
        if kind == "parallel":
            return torch.stack([module(x) for module in self.inner]).sum(0)
        if kind == "checkpoint":
            return checkpoint(self.chain, x, use_reentrant=False)
        if kind == "reentrant":
            return checkpoint(self.chain, x, use_reentrant=True)
        if kind == "skip":
            self.chain(x)
            return x
        if kind == "detached":
            return x + self.chain(x).detach()
        if kind == "unused":
            return x
        return self.chain(x)


class Whole(nn.Module):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.tree = Built(node)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.tree(self.embedding(tokens)))


def units_of(module: Built) -> Iterator[Built]:
    for child in module.inner:
        yield from units_of(child)
    if module.node.unit:
        yield module


def train(node: Node, prefetch: int) -> None:
    def shard(model: Whole, ctx: FsdpContext) -> None:
        for module in units_of(model.tree):
            fully_shard(module, ctx)
        fully_shard(model, ctx)

    Twins(lambda: Whole(node), shard, prefetch=prefetch).train(2)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(trees(), st.integers(1, 3), st.integers(0, 2))
def test_random_models_train_as_unsharded(node: Node, world_size: int, prefetch: int) -> None:
    run_ranks(train, world_size, node, prefetch)
