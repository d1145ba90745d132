"""Modes of training on simulated ranks: ragged shards, copies, kept parts, Muon's exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_overlap import BlockAtomic, Flat, FsdpContext, TensorAtomic
from fsdp_overlap.layout import Layout
from fsdp_overlap.optim import AdamW, Muon, exchange
from harness import simulated_ranks
from support.simulated import WORLD, batch, compare, simulate
from support.twins import NAMES, loss_of
from support.zoo import Model, shard_layers


@dataclass(frozen=True)
class Mode:
    """How a model is sharded and stepped, and what is special about it then."""

    mesh: tuple[int, ...] = (WORLD,)
    layout: Layout = Flat()  # noqa: RUF009, frozen
    shard_optimizer_over_replicas: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: AdamW(
        model.parameters(), lr=0.05
    )
    is_ragged: bool = False
    exchanges: bool = False


# Named here, too: the GPU suite looks for the mark.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def exact_muon(model: nn.Module) -> Muon:
    return Muon(model, lr=0.05, ns_dtype=torch.float64)


MODES = {
    "ragged": Mode(layout=TensorAtomic(), is_ragged=True),
    "ragged, in rows": Mode(layout=BlockAtomic(rows=2), is_ragged=True),
    "copies": Mode(mesh=(2, 2)),
    "divided copies": Mode(mesh=(2, 2), shard_optimizer_over_replicas=True),
    "kept parts": Mode(options={"reshard_after_forward": 2}),
    "Muon, whole": Mode(layout=TensorAtomic(), optimizer=exact_muon, is_ragged=True),
    "Muon, exchanged": Mode(optimizer=exact_muon, exchanges=True),
}


def steps_in(mode: Mode, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses of three steps, and this rank's shards after them, on the host."""
    torch.manual_seed(0)
    model = Model(width=8).double().to(device)
    twin = copy.deepcopy(model)
    mesh = init_device_mesh(device, mode.mesh, mesh_dim_names=NAMES[-len(mode.mesh) :])
    ctx = FsdpContext(
        mesh, layout=mode.layout, shard_optimizer_over_replicas=mode.shard_optimizer_over_replicas
    )
    shard_layers(model, ctx, **mode.options)
    compare(model, twin, device)
    model.zero_grad()
    optimizer = mode.optimizer(model)
    losses = []
    with mock.patch.object(exchange, "all_to_all", wraps=exchange.all_to_all) as exchanged:
        for _ in range(3):
            tokens, targets = batch(device)
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
    assert exchanged.called == mode.exchanges
    plans = [param_group.plan for unit in ctx.units for param_group in unit.param_groups]
    assert any(not plan.is_equal for plan in plans) == mode.is_ragged
    shards = [parameter.detach().to_local().cpu() for parameter in model.parameters()]
    assert ctx.stats.current_full_buffers == ctx.stats.current_reduce_inputs == 0
    return losses, shards


def train_in_mode(device: str, link: simulated_ranks.Link, name: str) -> None:
    """As the unsharded model, and then, where collectives are late, as on a CPU, where each is done
    when it returns."""
    if device == "cuda":
        link.gigabytes_per_s = 1e-3  # milliseconds for each of these small units
    found = steps_in(MODES[name], device)
    assert all(one.isfinite().all() for of_each in found for one in of_each)
    if device == "cpu":
        return
    dist.destroy_process_group()
    simulated_ranks.start("cpu", WORLD)
    expected = steps_in(MODES[name], "cpu")
    for of_device, of_cpu in zip(found, expected, strict=True):
        for ours, theirs in zip(of_device, of_cpu, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODES)
def test_every_mode_trains_as_the_unsharded_model_and_as_on_a_cpu(name: str, device: str) -> None:
    simulate(train_in_mode, device, name)
