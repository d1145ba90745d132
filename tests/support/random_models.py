"""Module trees drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from support.experts import EXPERTS, through_experts
from support.zoo import VOCABULARY, WIDTH


@dataclass(frozen=True)
class Node:
    """``kind`` says what it computes with its children, ``unit`` whether it is a unit. ``leaves``:
    something leaves it in an attribute, or in the notes that all modules are given."""

    kind: str
    unit: bool = False
    frozen: bool = False
    hidden: int = 1
    leaves: str = ""
    children: tuple[Node, ...] = field(default=())

    def has(self, *kinds: str) -> bool:
        """Return whether it or a node under it is of one of these kinds."""
        return self.kind in kinds or any(child.has(*kinds) for child in self.children)


Notes = dict[str, Any]
"""A dictionary that modules add to. Its ``scale`` is of another dtype than what is computed."""

KINDS = ("chain", "residual", "twice", "parallel", "checkpoint", "reentrant", "skip", "detached")


LEAVES = ("linear", "norm", "tied", "nothing", "unused")


def leaves(kinds: Sequence[str], multiple: int) -> st.SearchStrategy[Node]:
    return st.builds(
        Node,
        kind=st.sampled_from(kinds),
        unit=st.booleans(),
        frozen=st.booleans(),
        hidden=st.integers(1, 9).map(lambda hidden: hidden * multiple),
        leaves=st.sampled_from(["", "", "attribute", "notes"]),
    )


def trees(kinds: Sequence[str] = LEAVES, multiple: int = 1) -> st.SearchStrategy[Node]:
    """Return with leaves of these kinds. The hidden sizes are multiples of ``multiple``."""

    def around(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        return st.builds(
            Node,
            kind=st.sampled_from(KINDS),
            unit=st.booleans(),
            children=st.lists(inner, min_size=1, max_size=3).map(tuple),
        )

    return st.recursive(leaves(kinds, multiple), around, max_leaves=8)


def around_one(kind: str, multiple: int = 1) -> st.SearchStrategy[Node]:
    """Return trees with a leaf of this kind, or several."""
    one, kinds = leaves((kind,), multiple), (*LEAVES, kind)
    return st.builds(
        lambda tree, leaf: Node("chain", children=(tree, leaf)), trees(kinds, multiple), one
    )


class Experts(nn.Module):
    """A stack of experts, of which a rank may have some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def divide(self, mesh: DeviceMesh) -> None:
        """Among the ranks of ``mesh``."""
        weight = distribute_tensor(self.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        self.weight = nn.Parameter(weight, self.weight.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None
        tokens = x.flatten(0, -2)
        padded = nn.functional.pad(tokens, (0, 0, 0, -len(tokens) % EXPERTS))
        return through_experts(padded, weight, group)[: len(tokens)].view_as(x)


class Left:
    """What leaves a module in an attribute. A copy of the module has none."""

    value: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Left:
        return Left()


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
        if node.kind == "experts":
            self.experts = Experts()
        if node.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        self.left = Left()
        if node.frozen:
            for parameter in self.parameters():
                parameter.requires_grad_(False)

    def chain(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:
        for module in self.inner:
            x = module(x, notes)
        return x

    def forward(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:
        y = self.compute(x, notes)
        self.left.value = None
        if self.node.leaves:
            value = self.compute(y, notes).mean() * notes["scale"].double()
            if self.node.leaves == "attribute":
                self.left.value = value
            else:
                notes.setdefault("left", []).append(value)
        return y

    def compute(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:
        kind = self.node.kind
        if kind == "linear":
            return self.down(torch.tanh(self.up(x)))
        if kind == "tied":
            return self.down(torch.tanh(self.up(x)) * self.again(x))
        if kind == "experts":
            return x + self.experts(x)
        if kind == "norm":
            return self.norm(x)
        if kind == "residual":
            return x + self.chain(x, notes)
        if kind == "twice":
            return self.chain(self.chain(x, notes), notes)
        if kind == "parallel":
            return torch.stack([module(x, notes) for module in self.inner]).sum(0)
        if kind == "checkpoint":
            return checkpoint(self.chain, x, notes, use_reentrant=False)
        if kind == "reentrant":
            return checkpoint(self.chain, x, notes, use_reentrant=True)
        if kind == "skip":
            self.chain(x, notes)
            return x
        if kind == "detached":
            return x + self.chain(x, notes).detach()
        if kind == "unused":
            return x
        return self.chain(x, notes)


class TensorAtomic(nn.Module):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.tree = Built(node)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        notes: Notes = {"scale": torch.full((), 0.5, device=tokens.device)}
        x = self.tree(self.embedding(tokens), notes)
        x = x + sum(notes.get("left", ()))
        for module in self.tree.modules():
            if isinstance(module, Built) and module.left.value is not None:
                x = x + module.left.value
        return self.head(x)


def units_of(module: Built) -> Iterator[Built]:
    for child in module.inner:
        yield from units_of(child)
    if module.node.unit:
        yield module
