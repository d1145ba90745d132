"""The formulas of `scripts/draw/memory.py` say what ranks allocate, to the byte."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, fully_shard
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.optim import AdamW, Muon
from fsdp_overlap.optim.contiguous import local_of
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tools.cli.model import GPT
from support.pages import ROOT
from support.ranks import run_ranks


@contextmanager
def counted(most: dict[int, int]) -> Iterator[None]:
    """Keeps in `most` the most bytes that flat buffers held at once, by bytes of an element: full
    buffers are the narrow ones, reduce inputs the wide ones."""
    alive: dict[FlatBuffer, int] = {}
    allocate, free = FlatBuffer.allocate, FlatBuffer.free

    def allocate_counted(self: FlatBuffer) -> None:
        allocate(self)
        size = self.flat.element_size()
        alive[self] = self.nbytes
        held = sum(n for buffer, n in alive.items() if buffer.flat.element_size() == size)
        most[size] = max(most.get(size, 0), held)

    def free_counted(self: FlatBuffer) -> None:
        alive.pop(self, None)
        free(self)

    FlatBuffer.allocate, FlatBuffer.free = allocate_counted, free_counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        FlatBuffer.allocate, FlatBuffer.free = allocate, free  # type: ignore[method-assign]


def measure(script: dict[str, Any], optimizer: str, stage: int) -> tuple[Any, list[ParamGroupPlan]]:
    """What this rank allocates for a small model in two steps of two microbatches."""
    model = GPT(layers=6, width=32, heads=2)
    ctx = FsdpContext(prefetch=script["PREFETCH"], layout=script["LAYOUTS"][optimizer])
    ctx.plan_layout([*model.blocks, model])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, ctx, mp_policy=policy)
    model.set_zero_stage(stage)
    made = Muon(model) if optimizer == "Muon" else AdamW(model.parameters())
    most: dict[int, int] = {}
    with counted(most):
        for _ in range(2):
            for is_last in (False, True):
                model.set_is_last_backward(is_last)
                model(torch.zeros(1, 8, dtype=torch.int64)).float().mean().backward()
            gradients = sum(local_of(p.grad).nbytes for p in model.parameters())
            made.step()
            made.zero_grad()
            ctx.start_param_sync()
    states = sum(
        local_of(value).nbytes
        for state in made.state.values()
        for name, value in state.items()
        if name != "step"
    )
    param_groups = [param_group for unit in ctx.units for param_group in unit.param_groups]
    shards = sum(param_group.shard.nbytes for param_group in param_groups)
    found = script["Memory"](
        shards, gradients, states, most[script["NARROW"]], most[script["WIDE"]]
    )
    return found, [param_group.plan for param_group in param_groups]


def formulas_and_measurements() -> dict[str, list[list[int]]]:
    """Formula and measurement of each part, by optimizer, stage and rank, of all ranks."""
    script = runpy.run_path(str(ROOT / "scripts" / "draw" / "memory.py"))
    rank, mine = dist.get_rank(), {}
    for optimizer in script["LAYOUTS"]:
        for stage in script["STAGES"]:
            measured, plans = measure(script, optimizer, stage)
            formula = script["estimate"](plans, rank, optimizer, stage)
            mine[f"{optimizer}, stage {stage}, rank {rank}"] = [
                list(pair) for pair in zip(astuple(formula), astuple(measured), strict=True)
            ]
    everyone: list[dict[str, list[list[int]]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: pairs for of_rank in everyone for name, pairs in of_rank.items()}


@pytest.mark.slow
def test_the_formulas_of_memory_are_what_ranks_allocate() -> None:
    found = run_ranks(formulas_and_measurements, 2)[0]
    assert len(found) == 2 * 2 * 3  # ranks, optimizers and stages
    for name, pairs in found.items():
        assert all(formula == measured for formula, measured in pairs), (name, pairs)
