"""A model on recording lanes, and the position of an entry in their log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_overlap import FsdpContext
from fsdp_overlap.comm.recording import Entry, RecordingLane
from support.twins import LENGTH, loss_of
from support.zoo import ROWS, VOCABULARY, Model, shard_layers

GATHER, REDUCE = "all_gather", "reduce_scatter"


class Recorded:
    """A model whose lanes write down what they do."""

    def __init__(self, prefetch: int = 1, build: Callable[[], nn.Module] = Model) -> None:
        self.log: list[Entry] = []
        self.ctx = FsdpContext(prefetch=prefetch)
        self.ctx.lane_factory = lambda name, device: RecordingLane(name, self.log)
        self.model = build()
        shard_layers(self.model, self.ctx)
        self.tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY

    def forward(self) -> torch.Tensor:
        return loss_of(self.model(self.tokens), self.tokens)

    def step(self) -> None:
        self.forward().backward()
        self.model.zero_grad()

    def recorded(self, run: Callable[[], Any]) -> list[Entry]:
        self.log.clear()
        run()
        return list(self.log)

    def passes(self) -> tuple[list[Entry], list[Entry]]:
        """The logs of forward and backward once the order is learned."""
        self.step()
        losses: list[torch.Tensor] = []
        forward = self.recorded(lambda: losses.append(self.forward()))
        return forward, self.recorded(losses[0].backward)


def position(log: list[Entry], action: str, label: str, lane: str = GATHER) -> int:
    found = [
        index
        for index, entry in enumerate(log)
        if (entry.lane, entry.action, entry.label) == (lane, action, label)
    ]
    assert len(found) == 1, f"{action} of {label!r} on {lane}: {len(found)} times in {log}"
    return found[0]


def layer(index: int) -> str:
    return f"layers.{index}"
