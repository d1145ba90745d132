"""Parameters that are complex, and gradients that are sparse, train as unsharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_

from fsdp_overlap import BlockAtomic, FsdpContext, fully_shard, optim
from support.ranks import run_ranks

WIDTH = 5

ROWS = 12


class Spectral(nn.Module):
    """Scales frequencies, as layers of neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.fft(x) @ self.weight * self.phase
        return self.out(torch.fft.ifft(frequencies).real)


class Table(nn.Module):
    """The gradient of a large table does not wait until its unit is complete."""

    def __init__(self, sparse: bool, rows: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, WIDTH, sparse=sparse)
        self.bags = nn.EmbeddingBag(rows, WIDTH, sparse=sparse, mode="sum")
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(tokens).sum(1) + self.bags(tokens))


class Pair:
    """A sharded model, its unsharded twin, and an optimizer of each."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        make: Callable[..., torch.optim.Optimizer],
        build_twin: Callable[[], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        self.model = build()
        torch.manual_seed(3)
        self.twin = (build_twin or build)()
        fully_shard(self.model, FsdpContext(layout=options.pop("layout", BlockAtomic(rows=2))))
        self.optimizers = [make(m.parameters(), **options) for m in (self.model, self.twin)]

    def train(self, rows: torch.Tensor, steps: int = 3, clip: float | None = None) -> None:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        mine = rows.chunk(world)[rank]
        norms: list[torch.Tensor] = []
        for step in range(steps):
            for model, x in ((self.model, mine), (self.twin, rows)):
                for _ in range(1 + step % 2):  # also accumulated
                    model(x).square().mean().backward()
                if clip is not None:
                    is_ours = step == 1 and model is self.model
                    clip_grad_norm_ = optim.clip_grad_norm_ if is_ours else torchs_clip_grad_norm_
                    norms.append(clip_grad_norm_(model.parameters(), clip))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(norms[::2], norms[1::2])
        for (name, mine), its in zip(
            self.model.named_parameters(), self.twin.parameters(), strict=True
        ):
            torch.testing.assert_close(mine.full_tensor(), its, msg=lambda m, n=name: f"{n}: {m}")


def complex_parameters() -> None:
    x = torch.randn(ROWS, WIDTH)
    for make, options in (
        (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
        (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ):
        for foreach in (False, True):
            Pair(Spectral, make, **options, foreach=foreach).train(x, clip=0.5)
    for make in (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta):
        Pair(Spectral, make, lr=0.05, foreach=False).train(x, steps=2)
    for make in (torch.optim.Adamax, torch.optim.NAdam, torch.optim.ASGD):
        Pair(Spectral, make, lr=0.05, foreach=True).train(x, steps=2)


def test_complex_parameters_train_under_torchs_optimizers() -> None:
    run_ranks(complex_parameters, 3)


def views_of_complex() -> None:
    pair = Pair(Spectral, torch.optim.SGD, lr=0.1)
    weight, whole = pair.model.weight, pair.twin.weight
    before = weight.edits.values
    with torch.no_grad():
        real = torch.view_as_real(weight)
        assert torch.equal(real.full_tensor(), torch.view_as_real(whole))
        assert torch.equal(torch.view_as_complex(real).full_tensor(), whole)
        torch.view_as_real(whole).mul_(2)
        real.mul_(2)
    assert weight.edits.values > before
    pair.train(torch.randn(ROWS, WIDTH), steps=1)
    with pytest.raises(RuntimeError, match="gradients do not flow"):
        torch.view_as_real(weight).sum().backward()
    flat = Pair(Spectral, torch.optim.SGD, lr=0.1, layout=lambda fqn, spec: BlockAtomic(rows=1))
    with torch.no_grad(), pytest.raises((RuntimeError, TypeError)):  # by torch's version
        torch.view_as_complex(flat.model.weight)  # which is complex already


def test_views_of_complex_parameters_share_their_memory() -> None:
    run_ranks(views_of_complex, 2)


def sparse_gradients() -> None:
    tokens = torch.randint(WIDTH, (ROWS, 3))
    for make in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW, optim.AdamW):
        takes_sparse = make in (torch.optim.SGD, torch.optim.Adagrad)
        for rows in (WIDTH, 70000):
            twin = partial(Table, takes_sparse, rows)
            Pair(partial(Table, True, rows), make, twin, lr=0.05).train(tokens)


def test_sparse_gradients_are_made_dense() -> None:
    run_ranks(sparse_gradients, 2)
