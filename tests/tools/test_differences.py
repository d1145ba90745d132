"""Faults planted in a small program are found at their step and name, and named rightly."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap import Flat, patch_fsdp2
from fsdp_overlap.debug import record
from fsdp_overlap.recording.recording import Recording
from fsdp_overlap.tools.comparison.differences import compare
from support.ranks import run_ranks

WIDTH, STEPS = 16, 3
CLEAN = "none"


@dataclass(frozen=True)
class _Found:
    """Where a fault shows first. ``name`` is the beginning of that of a module or parameter."""

    step: int
    kind: str
    name: str
    cause: str
    ranks: tuple[int, ...] = ()
    says: str = ""


FAULTS = {
    "data": _Found(0, "input", "", "other data", (1,)),
    "dropout": _Found(1, "output", "blocks.0.drop", "random numbers", (1,)),
    "bfloat16 unit": _Found(0, "parameter", "blocks.0.", "dtype", (0, 1)),
    "bfloat16 sums": _Found(0, "gradient", "blocks.0.", "dtype", says="sums as in bfloat16"),
    "twice the loss": _Found(0, "local gradient", "head.", "scaled", (1,), "2 times"),
    "slightly more loss": _Found(0, "local gradient", "head.", "scaled", (0, 1), "1.02 times"),
    "no loss": _Found(0, "local gradient", "head.", "scaled", (1,), "zero"),
    "lost backward": _Found(
        1,
        "gradient",
        "blocks.1.down.weight",
        "missing contribution",
        says="lacks that of backward 1",
    ),
    "lost rank": _Found(
        1, "gradient", "blocks.1.up.weight", "missing contribution", says="lacks that of rank 1"
    ),
    "doubled rank": _Found(
        1, "gradient", "blocks.1.up.weight", "doubled contribution", says="rank 1 2 times"
    ),
    "not reduced": _Found(1, "gradient", "blocks.1.up.weight", "replicas differ", (1,)),
    "lost shard": _Found(1, "gradient", "blocks.1.down.weight", "reduction"),
    "twice the gradient": _Found(
        1, "gradient", "blocks.1.down.weight", "scaled", says="2 times as large"
    ),
    "rounded gradient": _Found(1, "gradient", "blocks.1.down.weight", "dtype"),
    "learning rate": _Found(0, "weight", "", "optimizer step", says="1.05 times"),
    "weight decay": _Found(0, "weight", "", "optimizer step", says="weight decay differs"),
    "stale": _Found(2, "parameter", "blocks.1.", "stale weight", (0, 1)),
    "edited weight": _Found(2, "parameter", "blocks.1.down.weight", "wrong weight", (0, 1)),
    "infinite": _Found(1, "gradient", "blocks.1.down.weight", "not finite"),
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.up(self.norm(x)).relu()))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train(fault: str) -> None:
    fully_shard: Any = torch.distributed.fsdp.fully_shard
    rank = dist.get_rank()
    is_odd = rank == 1
    torch.manual_seed(0)
    model: Any = _Net()
    replicated = model.blocks[1].up.weight
    policies = {
        "bfloat16 unit": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, output_dtype=torch.float32
        ),
        "bfloat16 sums": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    }
    for index, block in enumerate(model.blocks):
        policy = None if index else policies.get(fault)
        fully_shard(block, mp_policy=policy or MixedPrecisionPolicy(), ignored_params={replicated})
    fully_shard(model, ignored_params={replicated})
    decay = 0.2 if fault == "weight decay" else 0.01
    rate = 1e-2 * (1.05 if fault == "learning rate" else 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    torch.manual_seed(rank)
    data = torch.Generator().manual_seed(7 if fault == "data" and is_odd else rank)
    times = {"twice the loss": 2.0, "no loss": 0.0} if is_odd else {}
    times["slightly more loss"] = 1.02
    for step in range(STEPS):
        if fault == "dropout" and is_odd and step == 1:
            torch.rand(1)
        for number in range(2):
            x = torch.randn(8, WIDTH, generator=data)
            (model(x).square().mean() * times.get(fault, 1.0)).backward()
            if fault == "lost backward" and step == 1 and number == 0:
                model.blocks[1].down.weight.grad = None
        _reduce(replicated.grad, fault if step == 1 else CLEAN)
        if step == 1:
            _spoil(model.blocks[1].down.weight.grad.to_local(), fault)
        if fault == "stale" and step == 1:
            model.blocks[1].unshard()
        optimizer.step()
        optimizer.zero_grad()
        if fault == "edited weight" and is_odd and step == 1:
            with torch.no_grad():
                model.blocks[1].down.weight.to_local().mul_(1.01)


def _reduce(gradient: torch.Tensor, fault: str) -> None:
    if dist.get_rank() == 1:
        gradient *= {"lost rank": 0.0, "doubled rank": 2.0}.get(fault, 1.0)
    if fault != "not reduced":
        dist.all_reduce(gradient)
        gradient /= 2


def _spoil(gradient: torch.Tensor, fault: str) -> None:
    if fault == "lost shard" and dist.get_rank() == 1:
        gradient.zero_()
    elif fault == "twice the gradient":
        gradient.mul_(2)
    elif fault == "rounded gradient":
        gradient.copy_(gradient.bfloat16())
    elif fault == "infinite":
        gradient[0, 0] = torch.inf


def _record(folder: Path, fault: str, way: str) -> None:
    options: dict[str, Any] = {"layout": Flat()} if way == "flat" else {}
    with nullcontext() if way == "fsdp2" else patch_fsdp2(**options), record(folder):
        _train(fault)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Return what FSDP2 computes without a fault."""
    folder = tmp_path_factory.mktemp("clean")
    run_ranks(_record, 2, folder, CLEAN, "fsdp2")
    return Recording.read(folder)


def _recording(folder: Path, fault: str) -> Recording:
    # FSDP2 alone keeps weights that were gathered before the optimizer's step.
    run_ranks(_record, 2, folder, fault, "fsdp2" if fault == "stale" else "ours")
    return Recording.read(folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(clean: Recording, fault: str, tmp_path: Path) -> None:
    expected = FAULTS[fault]
    comparison = compare(clean, _recording(tmp_path, fault))
    found = comparison.unexplained
    assert found is not None, comparison.text
    said = found.step, found.kind, found.cause, found.ranks
    assert said == (expected.step, expected.kind, expected.cause, expected.ranks), found.text
    assert found.name.startswith(expected.name), found.text
    assert expected.says in found.text


def test_no_fault_is_found_where_none_is(clean: Recording, tmp_path: Path) -> None:
    run_ranks(_record, 2, tmp_path, CLEAN, "flat")
    comparison = compare(clean, Recording.read(tmp_path))
    assert comparison.unexplained is None, comparison.text
    assert comparison.steps == STEPS


def test_a_recording_is_equal_to_itself_where_replicas_differ(tmp_path: Path) -> None:
    recording = _recording(tmp_path, "not reduced")
    assert compare(recording, recording).is_equal
