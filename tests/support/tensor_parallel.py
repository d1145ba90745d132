"""A transformer as users of tensor parallelism write it, and how they parallelize it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# Not even over two ranks: so are the embedding and the head.
WORDS = 11
DIM, HEADS = 8, 4
ROWS, LENGTH = 2, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM) for _ in range(3))
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # This rank's heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, 2 * DIM)
        self.w2 = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.gelu(self.w1(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """Tokens ``[rows, LENGTH]`` to scores ``[rows, LENGTH, WORDS]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS)
        self.temperature = nn.Parameter(torch.ones(WORDS))  # which nobody parallelizes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.temperature


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Tensor and sequence parallelism over ``mesh``."""
    gathered: Any = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "norm1": SequenceParallel(),
                "attention": gathered,
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "feed_forward": gathered,
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    return model


def batches(count: int, copies: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of all data-parallel ranks, ``[copies * ROWS, LENGTH]`` each."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, copies * ROWS, LENGTH)
    return [
        tuple(torch.randint(WORDS, shape, generator=generator))  # type: ignore[misc]
        for _ in range(count)
    ]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
