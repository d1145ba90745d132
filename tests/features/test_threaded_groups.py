"""Ranks that are threads of one process, as torch's MultiThreadedTestCase has them, train as
without sharding. So users can test their models as FSDP2's own tests do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, PerTensor, TensorAtomic, fully_shard
from fsdp_overlap.layout import Flat
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_

# torch 2.11 forgets a part of its world of threads when it ends them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

RANKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def twins(
    mesh: tuple[int, ...] = (RANKS,), ctx: dict[str, Any] | None = None, **options: Any
) -> Any:
    model = Model().double()
    for parameter in model.parameters():  # threads draw from one generator
        dist.broadcast(parameter.data, 0)
    twin = copy.deepcopy(model)
    names = ("replicate", "shard")[-len(mesh) :]
    context = FsdpContext(init_device_mesh("cpu", mesh, mesh_dim_names=names), **(ctx or {}))
    for module in (*model.blocks, model):
        fully_shard(module, context, **options)
    return model, twin


def train(model: Any, twin: Any, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
    ours, theirs = optimizer(model.parameters(), lr=0.01), optimizer(twin.parameters(), lr=0.01)
    for step in range(3):
        batch = torch.randn(RANKS, 3, 6, generator=torch.Generator().manual_seed(step)).double()
        loss = model(batch[dist.get_rank()]).pow(2).mean()
        loss.backward()
        expected = twin(batch).pow(2).mean()
        expected.backward()
        norms = [clip_grad_norm_(model.parameters(), 0.1)]
        norms.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
        torch.testing.assert_close(*norms)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), its)


class TestThreads(MultiThreadedTestCase):  # type: ignore[misc]
    @property
    def world_size(self) -> int:
        return RANKS

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_ranges(self) -> None:
        train(*twins())

    def test_the_mesh_of_those_who_give_none(self) -> None:
        for _ in range(2):
            model = nn.Linear(6, 5).double()
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
            twin = copy.deepcopy(model)
            train(fully_shard(model), twin)

    def test_every_layout(self) -> None:
        for layout in (Flat(), TensorAtomic(), PerTensor()):
            train(*twins(ctx={"layout": layout}))

    def test_copies(self) -> None:
        for shard_optimizer_over_replicas in (False, True):
            train(
                *twins(
                    mesh=(2, 2),
                    ctx={"shard_optimizer_over_replicas": shard_optimizer_over_replicas},
                )
            )

    def test_kept_parts(self) -> None:
        train(*twins(reshard_after_forward=2))

    def test_own_optimizers(self) -> None:
        train(*twins(), AdamW)

    def test_muon(self) -> None:
        model, _ = twins(ctx={"layout": Flat()})
        optimizer = Muon([block.up.weight for block in model.blocks], lr=0.01)
        before = model.blocks[0].up.weight.full_tensor().clone()
        model(torch.ones(2, 6).double()).sum().backward()
        optimizer.step()
        assert not torch.equal(model.blocks[0].up.weight.full_tensor(), before)

    def test_mixed_precision(self) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model, _ = twins(mp_policy=policy)
        model(torch.ones(2, 6)).sum().backward()
        assert all(each.grad is not None for each in model.parameters())

    def test_state_dicts_and_copies(self) -> None:
        model, twin = twins()
        copied = copy.deepcopy(model)
        for name, value in copied.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), twin.state_dict()[name])
        train(copied, twin)

    def test_reset(self) -> None:
        model, twin = twins()
        model(torch.ones(2, 6).double())
        model.reset_iter_state()
        train(model, twin)
