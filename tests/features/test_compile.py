"""``torch.compile`` of units and of whole models: graphs end at the borders of units."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap import Flat, FsdpContext, PerTensor
from support.ranks import run_ranks
from support.twins import Twins, loss_of
from support.zoo import (
    Checkpointed,
    CheckpointedGroups,
    CheckpointedInside,
    CheckpointedReentrant,
    Model,
    Shard,
    shard_layers,
)

OPS_OF_A_BLOCK = 5


class Graphs:
    """A backend that counts: the ops of each graph that was compiled, in order."""

    def __init__(self) -> None:
        from torch._dynamo.backends.debugging import aot_eager

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.sizes: list[int] = []
        self._compile = aot_eager

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        ops = ("call_function", "call_method", "call_module")
        self.sizes.append(sum(node.op in ops for node in graph.graph.nodes))
        return self._compile(graph, inputs)


def compiled(how: str, **options: Any) -> Shard:
    """Layers compiled ``before`` they are sharded or ``after``, ``in place`` or by a module that
    takes theirs; or the ``whole`` model."""

    def compile_layers(model: Any) -> None:
        for index, layer in enumerate(model.layers):
            if "in place" in how:
                layer.compile(**options)
            else:
                model.layers[index] = torch.compile(layer, **options)

    def shard(model: Any, ctx: FsdpContext) -> None:
        if "before" in how:
            compile_layers(model)
        shard_layers(model, ctx)
        if "after" in how:
            compile_layers(model)
        if "whole" in how:
            model.compile(**options)

    return shard


HOW = ["before, in place", "before", "after, in place", "after", "whole"]


def train_and_evaluate(twins: Twins) -> None:
    twins.train(2)
    with torch.no_grad():
        twins.check_loss(*twins.losses(*next(twins.batches(1))))


def train_compiled(how: str, model: type[Model], fullgraph: bool) -> None:
    graphs = Graphs()
    twins = Twins(model, compiled(how, backend=graphs, fullgraph=fullgraph))
    train_and_evaluate(twins)
    with torch._dynamo.config.patch(error_on_recompile=True):
        before = list(graphs.sizes)
        train_and_evaluate(twins)
        assert graphs.sizes == before
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert all("fsdp_overlap gathers" in reason for reason in breaks), breaks
    if model is Model:
        # All layers share a graph with gradients and one without, and each is the whole layer.
        assert graphs.sizes == [OPS_OF_A_BLOCK] * 2
    elif how != "whole":
        assert graphs.sizes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", HOW)
def test_a_compiled_layer_is_one_graph_and_is_compiled_once(how: str) -> None:
    run_ranks(train_compiled, 2, how, Model, how != "whole")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ["before, in place", "whole"])
@pytest.mark.parametrize(
    "model", [Checkpointed, CheckpointedReentrant, CheckpointedGroups, CheckpointedInside]
)
def test_compiled_layers_under_activation_checkpointing(how: str, model: type[Model]) -> None:
    run_ranks(train_compiled, 2, how, model, False)


def large_compiled_layers() -> None:
    graphs = Graphs()
    twins = Twins(lambda: Model(layers=2, width=256), compiled("before, in place", backend=graphs))
    train_and_evaluate(twins)
    assert any(unit.gradients[0].is_large.count(True) for unit in twins.ctx.units)


def test_large_gradients_leave_early_from_compiled_layers() -> None:
    run_ranks(large_compiled_layers, 2)


def compiled_step() -> None:
    graphs = Graphs()
    twins = Twins.of("layers")

    @torch.compile(backend=graphs)
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        loss_of(twins.model(tokens), targets).backward()

    for tokens, targets in twins.batches(3):
        _, twin_loss = twins.losses(tokens, targets)
        twin_loss.backward()
        step(twins.mine(tokens), twins.mine(targets))
        twins.check_gradients()
        twins.check_rest()
        twins.step()
        twins.check_parameters()
    assert OPS_OF_A_BLOCK in graphs.sizes


def test_backward_may_be_called_in_a_compiled_function() -> None:
    run_ranks(compiled_step, 2)


@pytest.mark.slow
def test_an_eager_model_does_not_import_the_compiler() -> None:
    program = """
import sys, torch, torch.distributed as dist
from fsdp_overlap import FsdpContext, fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(2, 2), FsdpContext())
model(torch.ones(1, 2)).sum().backward()
assert model.weight.grad is not None
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def copied_and_loaded() -> None:
    """A layer compiled before it is sharded has another module around it."""
    graphs = Graphs()
    twins = Twins(Model, compiled("before", backend=graphs))
    twins.train(1)
    state = twins.model.state_dict()
    assert "layers.0._orig_mod.up.weight" in state  # as under FSDP2
    duplicate = copy.deepcopy(twins.model)
    with torch.no_grad():
        for parameter in twins.model.parameters():
            parameter.zero_()
    twins.model.load_state_dict(duplicate.state_dict())
    tokens = torch.arange(10).view(2, 5)
    expected = twins.twin(tokens)
    for model in (twins.model, duplicate):
        torch.testing.assert_close(model(tokens), expected)


def test_a_compiled_model_can_be_copied_and_loaded() -> None:
    run_ranks(copied_and_loaded, 2)


def train_by_inductor() -> None:
    twins = Twins(Model, compiled("before, in place", fullgraph=True), device="cuda")
    twins.train(2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        twins.train(2)


@pytest.mark.gpu
def test_layers_compiled_by_inductor_on_a_gpu() -> None:
    run_ranks(train_by_inductor, 1, backend="nccl", timeout=170)


def compiled_around(layout: Any) -> None:
    """What trainers compile beside the model: steps, norms, averages."""
    for name, options in {"AdamW": {}, "SGD": {"momentum": 0.9}, "Adam": {"foreach": True}}.items():
        torch._dynamo.reset()
        model, twin = Model(layers=2), Model(layers=2)
        twin.load_state_dict(model.state_dict())
        shard_layers(model, FsdpContext(layout=layout))
        steps = []
        for each in (model, twin):
            optimizer = getattr(torch.optim, name)(each.parameters(), lr=0.1, **options)
            steps.append(optimizer.step)
        steps[0] = torch.compile(steps[0], backend="eager")
        for _ in range(3):
            for each, step in zip((model, twin), steps, strict=True):
                each.zero_grad()
                each(torch.arange(10).view(2, 5)).square().mean().backward()
                step()
        assert_alike(model.parameters(), twin.parameters())

    def average(model: Any) -> list[Any]:
        return [p.detach().clone().mul_(0.9).add_(p.grad, alpha=0.1) for p in model.parameters()]

    def norm(model: Any) -> list[Any]:
        return [torch.stack([p.grad.norm() for p in model.parameters()]).norm()]

    def clip(model: Any) -> list[Any]:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return [p.grad for p in model.parameters()]

    for run in (average, norm, clip):
        with torch.no_grad():
            assert_alike(torch.compile(run, backend="eager")(model), run(twin))
    with pytest.raises(RuntimeError, match="compile them without fullgraph=True"):
        torch.compile(lambda p: p.detach() * 2, backend="eager", fullgraph=True)(model.head.weight)


def assert_alike(found: Any, wanted: Any) -> None:
    for mine, its in zip(found, wanted, strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(whole.detach(), its.detach())


@pytest.mark.parametrize("layout", [PerTensor(), Flat()])
def test_functions_of_sharded_parameters_may_be_compiled(layout: Any) -> None:
    run_ranks(compiled_around, 2, layout)
