"""A model of which two modules are one unit: the first and the last, or the last two."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard
from support.zoo import WIDTH, Model


class Normed(Model):
    """A model with a norm before its head. With ``chunks`` the caller runs the head."""

    chunks = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        x = self.norm(x)
        return x if self.chunks else self.head(x)


def shard_ends(model: Normed, ctx: FsdpContext, **options: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, ctx, **options)
    fully_shard([model.embedding, model.head], ctx, **options)
    fully_shard(model, ctx, **options)


def shard_last_two(model: Normed, ctx: FsdpContext, **options: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, ctx, **options)
    fully_shard([model.norm, model.head], ctx, **options)
    fully_shard(model, ctx, **options)
