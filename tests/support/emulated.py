"""Programs of training on the emulated device, as one rank of several that exist in name only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap import FsdpContext
from fsdp_overlap.optim import AdamW
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tools.emulator import EmulatedDevice, Operation, running
from fsdp_overlap.tools.emulator.queues import Queue
from support.twins import loss_of
from support.zoo import VOCABULARY, ZOO

NAMES = ("replicate", "shard")
HERE = "emulated:0"


class Program:
    """A model of the zoo on the emulated device, or another one, its context and its optimizer."""

    def __init__(
        self,
        name: str = "layers",
        dims: tuple[int, ...] = (4,),
        optimizer: Callable[..., torch.optim.Optimizer] | None = AdamW,
        reduce_dtype: torch.dtype | None = None,
        build: Callable[[], nn.Module] | None = None,
        shard_options: dict[str, Any] | None = None,
        optimizer_options: dict[str, Any] | None = None,
        device: str = "emulated",
        **context_options: Any,
    ) -> None:
        torch.manual_seed(7)
        self.device = device
        mesh = init_device_mesh(device, dims, mesh_dim_names=NAMES[-len(dims) :])
        zoo_build, shard = ZOO[name]
        self.model: Any = (build or zoo_build)().to(device)
        self.ctx = FsdpContext(mesh, **context_options)
        options = shard_options or {}
        if reduce_dtype is not None:
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        shard(self.model, self.ctx, **options)
        self.optimizer: Any = None
        if optimizer is not None:
            # These are for a whole model.
            takes_model = optimizer.__name__ in ("Muon", "layer_wise")
            what = self.model if takes_model else self.model.parameters()
            self.optimizer = optimizer(what, lr=0.01, **(optimizer_options or {}))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = torch.randint(VOCABULARY, (2, 3, 5), device=self.device)
        return tokens, targets

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        tokens, targets = batch or self.batch()
        return loss_of(self.model(tokens), targets)

    def backward(self, batch: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        self.forward(batch).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.backward()
            self.step()
        finish_pending_steps()


def run(program: Callable[[], object], **options: Any) -> EmulatedDevice:
    """Return what the model found in ``program``."""
    with running(EmulatedDevice(**options)) as device:
        program()
    return device


def trained(steps: int = 3, **options: Any) -> Callable[[], None]:
    """Return a program that trains so many steps."""
    return partial(_train, steps, options)


def _train(steps: int, options: dict[str, Any]) -> None:
    Program(**options).train(steps)


def kinds(device: EmulatedDevice) -> list[str]:
    return [finding.kind for finding in device.findings]


class Seconds:
    """Operations last as listed by name. The host takes ``on_host`` for each."""

    def __init__(self, seconds: dict[str, float], on_host: float = 0.0) -> None:
        self._seconds = seconds
        self._on_host = on_host

    def on_host(self, operation: Operation) -> float:
        return self._on_host

    def end(self, operation: Operation, stream: Queue, enqueued: float, ready: float) -> float:
        return ready + self._seconds.get(operation.name, 0.0)
