"""Whole steps in CUDA graphs: captured and replayed on the modelled device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.layout import Rows, Whole
from fsdp_overlap.modelled import CUDAGraph, ModelledDevice, graph, running
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from support.modelled_twins import Trained
from support.nccl_like import BACKEND
from support.ranks import run_ranks
from support.twins import COPIES, loss_of
from support.zoo import Model, shard_layers

REPLAYS = 20
Batch = tuple[torch.Tensor, torch.Tensor]


class Side:
    """One of two models that are trained alike, with its inputs at addresses that stay."""

    def __init__(
        self,
        microbatches: int,
        prepare: Callable[[nn.Module], object] | None,
        shard: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.twins = Trained(partial(Model, layers=2), partial(shard_layers, **shard), **options)
        if prepare is not None:
            prepare(self.twins.model)
        self.microbatches = microbatches
        self.inputs = list(self.twins.batches(microbatches))

    def fill(self, batches: Sequence[Batch]) -> None:
        for static, batch in zip(self.inputs, batches, strict=True):
            for target, source in zip(static, batch, strict=True):
                target.copy_(source)

    def step(self) -> list[torch.Tensor]:
        """What is captured. Returns losses and the norm of gradients."""
        twins, found = self.twins, []
        twins.optimizer.zero_grad()
        for index, (tokens, targets) in enumerate(self.inputs):
            if self.microbatches > 1:
                twins.model.set_requires_gradient_sync(index == self.microbatches - 1)
            loss = loss_of(twins.model(twins.mine(tokens)), twins.mine(targets))
            loss.backward()
            found.append(loss.detach())
        found.append(clip_grad_norm_(twins.model.parameters(), 0.1))
        twins.optimizer.step()
        return found

    def gradients(self) -> list[Any]:
        return [parameter.grad for parameter in self.twins.model.parameters()]

    def held(self, gradients: Sequence[Any]) -> list[torch.Tensor]:
        """Parameters, ``gradients`` and states of the optimizer that this rank holds."""
        twins = self.twins
        parameters: list[Any] = list(twins.model.parameters())
        states = [
            state
            for parameter in parameters
            for state in twins.optimizer.state[parameter].values()
            if isinstance(state, torch.Tensor)
        ]
        tensors = [*parameters, *gradients, *states]
        return [getattr(each, "_local_tensor", each).detach() for each in tensors]

    def evaluate(self) -> torch.Tensor:
        with torch.no_grad():
            scores: torch.Tensor = self.twins.model(self.twins.mine(self.inputs[0][0]))
        return scores

    def step_twin(self) -> None:
        twins = self.twins
        for tokens, targets in self.inputs:
            twins.twin_backward(twins.twin_loss(tokens, targets))
        nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
        # Of a capturable step numbers differ a little, and torch has none for the host's memory.
        adam = sys.modules[torch.optim.Adam.__module__]
        with patch.object(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"]):
            twins.twin_step()


def replayed(
    microbatches: int = 1,
    prepare: Callable[[nn.Module], object] | None = None,
    shard: dict[str, Any] | None = None,
    has_twin: bool = True,
    **options: Any,
) -> None:
    """Replays steps of one model, and runs the same of another one eagerly."""
    with running(ModelledDevice()) as device:
        eager, captured = (Side(microbatches, prepare, shard or {}, options) for _ in range(2))
        batches = list(eager.twins.batches((REPLAYS + 3) * microbatches))
        steps = [batches[at : at + microbatches] for at in range(0, len(batches), microbatches)]
        for step in steps[:2]:
            for side in (eager, captured):
                side.fill(step)
                side.step()
            eager.step_twin()
        captured.twins.ctx.release_unsharded()
        step_graph = CUDAGraph()
        with graph(step_graph):
            found = captured.step()
        gradients = captured.gradients()  # a replay writes these, also after an eager step
        for index, step in enumerate(steps[2:]):
            for side in (eager, captured):
                side.fill(step)
            expected = eager.step()
            if index % 10 == 9:  # now and then a step that is not replayed
                now, its = captured.step(), captured.gradients()
            else:
                waits = len(device.syncs)
                step_graph.replay()
                now, its = found, gradients
                assert len(device.syncs) == waits
            assert all(map(torch.equal, now, expected)), index
            alike = zip(captured.held(its), eager.held(eager.gradients()), strict=True)
            assert all(torch.equal(one, other) for one, other in alike), index
            if index % 4 == 0:
                assert torch.equal(captured.evaluate(), eager.evaluate()), index
            eager.step_twin()
            if has_twin:
                eager.twins.check_parameters()
        assert not device.findings, "\n".join(map(str, device.findings[:5]))


def keep_after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)


TORCH: dict[str, Any] = {"optimizer": torch.optim.AdamW, "capturable": True, "foreach": True}
OURS: dict[str, Any] = {"optimizer": AdamW}
MUON: dict[str, Any] = {"optimizer": Muon, "ns_dtype": torch.double}
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

PROGRAMS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, OURS),
    "torch's AdamW, in rows, kept after forward": (
        2,
        {**TORCH, "layout": Rows(), "shard": {"reshard_after_forward": False}},
    ),
    "torch's AdamW, prefetch 2": (2, {**TORCH, "prefetch": 2}),
    "prefetch 0, mixed precision": (
        2,
        {**OURS, "prefetch": 0, "shard": {"mp_policy": LOW}, "has_twin": False},
    ),
    "accumulation, kept after backward": (
        2,
        {**OURS, "prepare": keep_after_backward, "microbatches": 2},
    ),
    "Muon, resharded after forward": (2, {**MUON, "shard": {"reshard_after_forward": True}}),
    "Muon, in rows, accumulation": (2, {**MUON, "layout": Rows(), "microbatches": 2}),
    "copies, accumulation": (4, {**OURS, **COPIES, "microbatches": 2}),
    "divided copies, whole matrices": (
        4,
        {**OURS, **COPIES, "divide_copies": True, "layout": Whole()},
    ),
    "parts kept": (4, {**OURS, "shard": {"reshard_after_forward": 2}}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_replayed_steps_equal_eager_ones(name: str) -> None:
    world_size, options = PROGRAMS[name]
    run_ranks(partial(replayed, **options), world_size, backend=BACKEND)
