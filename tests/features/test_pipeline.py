"""``torch.distributed.pipelining`` over stages that are sharded: two stages, or four, by two
data-parallel ranks."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, get_schedule_class

import fsdp_overlap
from fsdp_overlap import patch_fsdp2
from support.ranks import run_ranks
from support.twins import same

WIDTH = 8
MICROBATCHES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stage(nn.Module):
    """Two blocks within a root that has parameters of its own. With ``skips`` the second block runs
    and no gradient reaches it."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        y = self.blocks[1](x)
        return (x if self.skips else y) * self.scale


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Pipeline:
    """This rank's stages of a pipeline, sharded by ``fully_shard``, and the whole model beside
    them."""

    def __init__(
        self,
        fully_shard: Any,
        kind: str,
        reshard: bool | None,
        chunks: int,
        skips: bool = False,
        **options: Any,
    ) -> None:
        self.skips = skips
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        rank = self.mesh["pp"].get_local_rank()
        self.replica = self.mesh["dp"].get_local_rank()
        self.count = 2 * chunks
        is_v = kind in ("ZBVZeroBubble", "DualPipeV")
        self.own = [rank, 3 - rank] if is_v else list(range(rank, self.count, 2))
        self.whole = nn.Sequential(*(Stage() for _ in range(self.count))).double()
        self.modules = [copy.deepcopy(self.whole[index]) for index in self.own]
        arguments: dict[str, Any] = {"mesh": self.mesh["dp"], "reshard_after_forward": reshard}
        for module in self.modules:
            for block in module.blocks:
                fully_shard(block, **arguments)
            fully_shard(module, **arguments)
        device, group = torch.device("cpu"), self.mesh["pp"].get_group()
        stages = [
            PipelineStage(module, index, self.count, device, group=group)
            for module, index in zip(self.modules, self.own, strict=True)
        ]
        schedule = get_schedule_class(kind)
        local: Any = stages if chunks > 1 else stages[0]
        self.schedule: Any = schedule(local, MICROBATCHES, loss_fn=mean_square, **options)
        if skips and self.replica == 1 and self.count - 1 in self.own:
            self.modules[self.own.index(self.count - 1)].skips = True
        models = [self.whole, *self.modules]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Trains the pipeline and the whole model, and compares losses, gradients and weights."""
        inputs, targets = torch.randn(2, 2, 2 * MICROBATCHES, WIDTH, dtype=torch.double)
        expected = []
        for replica in range(2):
            self.whole[-1].skips = self.skips and replica == 1
            for x, target in zip(
                inputs[replica].chunk(MICROBATCHES),
                targets[replica].chunk(MICROBATCHES),
                strict=True,
            ):
                expected.append(mean_square(self.whole(x), target))
        torch.stack(expected).mean().backward()
        self.run(inputs[self.replica], targets[self.replica])
        first = MICROBATCHES * self.replica
        for loss, its in zip(self.losses, expected[first:], strict=False):
            same(loss, its, "loss")
        self.compare()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def run(self, x: torch.Tensor, target: torch.Tensor, **options: bool) -> None:
        self.losses.clear()
        arguments = (x,) if 0 in self.own else ()
        if self.count - 1 in self.own:
            self.schedule.step(*arguments, target=target, losses=self.losses, **options)
        else:
            self.schedule.step(*arguments, **options)

    def compare(self) -> None:
        for module, index in zip(self.modules, self.own, strict=True):
            for (name, mine), its in zip(
                module.named_parameters(), self.whole[index].parameters(), strict=True
            ):
                same(mine.full_tensor(), its, name)
                assert (mine.grad is None) == (its.grad is None), name
                if its.grad is not None:
                    same(mine.grad.full_tensor(), its.grad, name)


def train(kind: str, reshard: bool | None, chunks: int, how: str = "") -> None:
    replaced = how == "replacing"
    options: dict[str, Any] = {"defer_reduce_grad_wait": True} if how == "deferred" else {}
    with patch_fsdp2() if replaced else nullcontext():
        fully_shard = fsdp2.fully_shard if replaced else fsdp_overlap.fully_shard
        pipeline = Pipeline(fully_shard, kind, reshard, chunks, how == "skips", **options)
        for _ in range(3):
            pipeline.step()
            for module in pipeline.modules:
                assert isinstance(module, fsdp_overlap.FSDPModule)
                stats = module._fsdp_unit.context.stats
                assert (stats.reduce_scatters, stats.order_checks) == (3, 1)
                assert stats.current_full_buffers == 0
                stats.reset()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "chunks", "reshard"),
    [
        ("GPipe", 1, None),
        ("1F1B", 1, None),
        ("1F1B", 1, True),
        ("1F1B", 1, False),
        ("LoopedBFS", 2, True),
        ("Interleaved1F1B", 2, None),
        ("Interleaved1F1B", 2, True),
        ("Interleaved1F1B", 2, False),
    ],
)
def test_a_pipeline_trains_as_the_whole_model_does(
    kind: str, chunks: int, reshard: bool | None
) -> None:
    run_ranks(train, 4, kind, reshard, chunks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_so_does_one_that_computes_gradients_of_weights_apart(kind: str) -> None:
    if kind != "InterleavedZeroBubble" and torch.__version__.startswith("2.11"):
        pytest.skip("in torch 2.11 ranks send to themselves here, which gloo cannot")
    run_ranks(train, 4, kind, False, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "chunks", "reshard"), [("1F1B", 1, True), ("InterleavedZeroBubble", 2, False)]
)
@pytest.mark.parametrize("how", ["skips", "replacing"])
def test_stages_skip_units_on_some_ranks_and_are_sharded_by_replaced_names(
    kind: str, chunks: int, reshard: bool, how: str
) -> None:
    run_ranks(train, 4, kind, reshard, chunks, how)


DEFERS = "defer_reduce_grad_wait" in signature(ScheduleInterleaved1F1B).parameters


@pytest.mark.skipif(not DEFERS, reason="torch 2.15 has it")
def test_reductions_of_one_stage_run_under_the_compute_of_another() -> None:
    run_ranks(train, 4, "Interleaved1F1B", None, 2, "deferred")


DEFERS_ALL = "finalize_gradients" in signature(ScheduleInterleaved1F1B.step).parameters


def step_twice(fully_shard: Any, kind: str, reshard: bool | None, chunks: int) -> None:
    """Runs a schedule twice before gradients are reduced."""
    pipeline = Pipeline(fully_shard, kind, reshard, chunks)
    for _ in range(2):
        expected = []
        for is_last in (False, True):
            inputs, targets = torch.randn(2, 2, 2 * MICROBATCHES, WIDTH, dtype=torch.double)
            for x, target in zip(
                inputs.flatten(0, 1).chunk(2 * MICROBATCHES),
                targets.flatten(0, 1).chunk(2 * MICROBATCHES),
                strict=True,
            ):
                expected.append(mean_square(pipeline.whole(x), target))
            replica = pipeline.replica
            pipeline.run(inputs[replica], targets[replica], finalize_gradients=is_last)
        # The mean over ranks and over the microbatches of one run, as torch documents it.
        (torch.stack(expected).sum() / (2 * MICROBATCHES)).backward()
        pipeline.compare()
        for optimizer in pipeline.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if fully_shard is fsdp_overlap.fully_shard:
        for module in pipeline.modules:
            stats = module._fsdp_unit.context.stats
            assert stats.reduce_scatters == 2 * 3
            assert stats.current_full_buffers == 0


@pytest.mark.skipif(not DEFERS_ALL, reason="torch 2.15 has it")
@pytest.mark.parametrize(
    ("kind", "chunks", "reshard"),
    [("1F1B", 1, True), ("Interleaved1F1B", 2, None), ("InterleavedZeroBubble", 2, False)],
)
def test_gradients_of_several_runs_are_reduced_once(
    kind: str, chunks: int, reshard: bool | None
) -> None:
    for fully_shard in (fsdp_overlap.fully_shard, fsdp2.fully_shard):
        run_ranks(step_twice, 4, fully_shard, kind, reshard, chunks)


def compute_apart(fully_shard: Any, reshard: bool | None) -> list[str]:
    """What zero-bubble schedules do, on one rank. Returns the parameters that got no gradient, or
    another than by ``backward()``."""
    model = Stage().double()
    twin = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    stage.has_backward = True
    if hasattr(stage, "start_gradient_reduction"):  # torch 2.15
        model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for module in model.modules():
        if isinstance(module, fsdp2.FSDPModule):
            module.unshard(async_op=True).wait()
    x = torch.randn(2, WIDTH, dtype=torch.double, requires_grad=True)
    gradient = torch.randn(2, WIDTH, dtype=torch.double)
    inputs = stage_backward_input([model(x)], [gradient], [x], model.parameters())
    stage_backward_weight(model.parameters(), inputs[1])
    stage.perform_reduce_grad(1)
    twin(x).backward(gradient)
    return [
        name
        for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True)
        if its.grad is not None
        and (mine.grad is None or not torch.allclose(mine.grad.full_tensor(), its.grad))
    ]


def apart() -> None:
    assert compute_apart(fsdp_overlap.fully_shard, False) == []
    assert compute_apart(fsdp2.fully_shard, False) == []
    for reshard in (None, True):
        with pytest.raises(RuntimeError, match="reshard_after_forward=False"):
            compute_apart(fsdp_overlap.fully_shard, reshard)
        assert "blocks.0.up.weight" in compute_apart(fsdp2.fully_shard, reshard)


def test_gradients_of_weights_apart_need_what_forward_gathered_and_fsdp2_loses_them() -> None:
    run_ranks(apart, 1)
