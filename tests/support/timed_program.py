"""A small program of equal layers, and costs that one can calculate with by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.optim import AdamW
from fsdp_overlap.tools.emulator import Operation
from fsdp_overlap.tools.simulator.costs import full_of
from fsdp_overlap.tools.simulator.simulate import Prediction, Step, simulate

UNITS, WIDTH = 6, 64
LAYER_BYTES = 4 * WIDTH * WIDTH


@dataclass
class Seconds:
    """A product takes `compute` seconds, all else that computes takes none."""

    compute_: float
    gather: float = 0.0
    reduce: float = 0.0
    host: float = 0.0
    slowdown: float = 0.0
    slowest_: float = 1.0
    compiles: bool = False
    expandable_segments: bool = False

    def on_host(self, operation: Operation) -> float:
        return self.host

    def compute(self, operation: Operation) -> float:
        return self.compute_ if operation.name == "mm" else 0.0

    def is_fused(self, operation: Operation) -> bool:
        return False

    def collective(self, operation: Operation, ranks: Sequence[int]) -> float:
        assert len(ranks) == 8
        nbytes = sum(tensor.nbytes for tensor in full_of(operation))
        if nbytes < LAYER_BYTES:
            return 0.0  # checks
        assert nbytes == LAYER_BYTES
        return {"all_gather": self.gather, "reduce_scatter": self.reduce}[operation.name]

    def link(self, ranks: Sequence[int]) -> str:
        return "all"

    def slowest(self, ranks: int) -> float:
        assert ranks == 8
        return self.slowest_


def program(microbatches: int = 1) -> Step:
    """Return a step of blocks of one layer each. The last microbatch is reduced."""
    mesh = init_device_mesh("emulated", (8,))
    with torch.device("emulated"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)))
        batch = torch.empty(16, WIDTH)
    ctx = FsdpContext(mesh)
    for layer in model:
        fully_shard(layer, ctx)
    sharded = fully_shard(model, ctx)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        for number in range(microbatches):
            sharded.set_requires_gradient_sync(number == microbatches - 1)
            sharded(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def predict(
    compute: float,
    gather: float,
    reduce: float,
    host: float = 0.0,
    slowest: float = 1.0,
    microbatches: int = 1,
) -> Prediction:
    costs = Seconds(compute, gather, reduce, host, slowest_=slowest)
    return simulate(partial(program, microbatches), 8, costs)
