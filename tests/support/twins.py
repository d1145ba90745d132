"""A sharded model and its unsharded twin, side by side on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_overlap import FsdpContext, MeshGroups
from fsdp_overlap.comm import comm_streams
from fsdp_overlap.layout import Flat, LayoutRule
from fsdp_overlap.optim import LayerWise, Muon
from support.held import held_of
from support.zoo import ROWS, VOCABULARY, ZOO, Shard

LENGTH = 5
NAMES = ("replicate", "shard")
# Options of twins on four ranks: two copies.
COPIES: dict[str, Any] = {"mesh": (2, 2)}


def layer_wise(
    model: nn.Module, lr: float, factory: Any = torch.optim.Muon, **options: Any
) -> LayerWise:
    return LayerWise(model, partial(factory, lr=lr), **options)


class Twins:
    """``model`` is sharded and sees its rank's rows, ``twin`` is not and sees those of all ranks.

    In double precision, so that what differs by more than rounding is wrong.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shard: Shard,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        prefetch: int = 1,
        device: str = "cpu",
        layout: LayoutRule = Flat(),  # noqa: B008, frozen
        mesh: tuple[int, ...] | None = None,
        shard_optimizer_over_replicas: bool = False,
        groups: MeshGroups | None = None,
        ctx: FsdpContext | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(7)
        self.device = device
        self.model = build().double().to(device)
        self.twin = copy.deepcopy(self.model)
        self.ctx = ctx or FsdpContext(
            None if mesh is None else init_device_mesh(device, mesh, mesh_dim_names=NAMES),
            prefetch=prefetch,
            layout=layout,
            shard_optimizer_over_replicas=shard_optimizer_over_replicas,
            groups=groups,
        )
        shard(self.model, self.ctx)
        self.optimizer, self.twin_optimizer = (
            # These are for a whole model.
            optimizer(
                model if optimizer in (Muon, layer_wise) else model.parameters(), lr=0.05, **options
            )
            for model in (self.model, self.twin)
        )
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @classmethod
    def of(cls, name: str, **options: Any) -> Twins:
        return cls(*ZOO[name], **options)

    def batches(self, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Token and targets of all ranks, ``[world * ROWS, LENGTH]`` each."""
        generator = torch.Generator().manual_seed(3)
        shape = (self.world * ROWS, LENGTH)
        for _ in range(count):
            tokens, targets = torch.randint(VOCABULARY, (2, *shape), generator=generator)
            yield tokens.to(self.device), targets.to(self.device)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.rank * ROWS : (self.rank + 1) * ROWS]

    def losses(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of this rank's rows and the mean over ranks of the twin's losses."""
        loss = loss_of(self.model(self.mine(tokens)), self.mine(targets))
        return loss, self.twin_loss(tokens, targets)

    def twin_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the twin sees each rank's rows apart, so that branches on data fall as they do
        there."""
        iteration = getattr(self.twin, "iteration", 0)
        twin_losses = []
        for rows, wanted in zip(tokens.split(ROWS), targets.split(ROWS), strict=True):
            if hasattr(self.twin, "iteration"):
                self.twin.iteration = iteration
            twin_losses.append(loss_of(self.twin(rows), wanted))
        return torch.stack(twin_losses).mean()

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        loss, twin_loss = self.losses(tokens, targets)
        loss.backward()
        self.twin_backward(twin_loss)
        self.check_loss(loss, twin_loss)

    def twin_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def check_loss(self, loss: torch.Tensor, twin_loss: torch.Tensor) -> None:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        expected = twin_loss.detach().to(mean.device)
        torch.testing.assert_close(mean / dist.get_world_size(), expected)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.twin_step()

    def twin_step(self) -> None:
        self.twin_optimizer.step()
        self.twin_optimizer.zero_grad()

    def check_gradients(self, whole: bool = False) -> None:
        """Each rank compares what it holds of them, or puts them together and compares all."""
        for (name, parameter), twin in self.pairs():
            assert (parameter.grad is None) == (twin.grad is None), f"{name}: {parameter.grad}"
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                self.compare(parameter.grad, twin.grad, f"gradient of {name}", whole)

    def check_parameters(self, whole: bool = False) -> None:
        for (name, parameter), twin in self.pairs():
            assert isinstance(parameter, nn.Parameter), name
            assert isinstance(parameter, DTensor), name
            self.compare(parameter.detach(), twin.detach(), name, whole)

    def compare(self, sharded: DTensor, twin: Any, what: str, whole: bool) -> None:
        if whole:
            same(sharded.full_tensor(), twin, what)
        else:
            same(sharded.to_local().flatten(), held_of(twin, sharded), what)

    def check_rest(self) -> None:
        """Nothing is left unsharded or in flight."""
        assert self.ctx.stats.current_full_buffers == 0, self.ctx.stats
        assert self.ctx.stats.current_reduce_inputs == 0, self.ctx.stats
        for unit in self.ctx.units:
            for param_group in unit.param_groups:
                assert param_group.full.flat.untyped_storage().nbytes() == 0
            for gradients in unit.gradients:
                assert gradients.reduce_scatter_input.flat.untyped_storage().nbytes() == 0

    def pairs(self) -> Iterator[tuple[tuple[str, nn.Parameter], nn.Parameter]]:
        return zip(self.model.named_parameters(), self.twin.parameters(), strict=True)

    def train(self, iterations: int) -> None:
        """Train both and compare everything at every step.

        Whole tensors only in the last: to put them together takes longer than all the rest.
        """
        for step, (tokens, targets) in enumerate(self.batches(iterations), 1):
            self.backward(tokens, targets)
            self.check_gradients(whole=step == iterations)
            self.check_rest()
            self.step()
            self.check_parameters(whole=step == iterations)


@contextmanager
def impatient() -> Iterator[None]:
    """Ranks ask each other sooner than users would like, so that tests are quick."""
    patience = comm_streams.FIRST_POLL
    comm_streams.FIRST_POLL = timedelta(seconds=0.1)
    try:
        yield
    finally:
        comm_streams.FIRST_POLL = patience


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def same(actual: torch.Tensor, expected: torch.Tensor | None, what: str) -> None:
    if expected is not None:
        expected = expected.to(actual.device)  # which may be offloaded
    torch.testing.assert_close(
        actual, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}"
    )
