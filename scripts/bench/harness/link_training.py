"""What the benchmarks over a slow link train: a model of transformer blocks, sharded by ours and by
FSDP2, and the collectives of a step of ours alone.

Options are those of `link.py`, which says what each system is.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

import fsdp_overlap
from fsdp_overlap import PerTensor
from fsdp_overlap.comm.collectives import choose
from fsdp_overlap.comm.comm_streams import PendingCollective
from fsdp_overlap.layout import (
    BlockAtomic,
    Flat,
    Layout,
    ParamGroupPlan,
    ParamSpec,
    TensorAtomic,
    plan_units,
)
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from fsdp_overlap.schedule.backward import MAX_INPUTS
from harness import sharding
from harness.optimizers import ADAMW, LR, torchs

WIDTH = 512
HEADS = 8
SEQUENCE = 64
MAX_NORM = 1.0
LAYOUTS: dict[str, Layout] = {
    "flat": Flat(),
    "per-tensor": PerTensor(),
    "block-atomic": BlockAtomic(rows=128),
    "tensor-atomic": TensorAtomic(),
}


class Sleep(torch.autograd.Function):
    """What a GPU's compute is to the host's cores: time passes, once in forward and twice as much
    in backward, and they are free."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """A transformer block of 12 * width^2 parameters, and two norms."""

    def __init__(self, sleep_ms: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.sleep_ms = sleep_ms
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._run(self.qkv, self.norm1(x), 3).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._run(self.out, attended.transpose(1, 2).flatten(-2), 1)
        return x + self._run(self.down, F.gelu(self._run(self.up, self.norm2(x), 4)), 4)

    def _run(self, layer: nn.Linear, x: torch.Tensor, share: int) -> torch.Tensor:
        """Runs a layer, which has `share` twelfths of the block's parameters and sleeps as long."""
        x = layer(x)
        return Sleep.apply(x, share / 12 * self.sleep_ms / 1e3) if self.sleep_ms else x


def build(blocks: int, sleep_ms: float = 0.0, width: int = WIDTH) -> nn.Sequential:
    """The same model on every rank and for every system."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(sleep_ms, width) for _ in range(blocks)))


def make_batch(rows: int, width: int = WIDTH) -> torch.Tensor:
    """This rank's."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(rows // SEQUENCE, SEQUENCE, width, generator=generator)


def make_step(
    model: nn.Module,
    batch: torch.Tensor,
    update: Callable[[], object] = lambda: None,
    microbatches: int = 1,
    begin: Callable[[bool], object] = lambda is_last: None,
) -> Callable[[], float]:
    """Forwards and backwards, and `update`; `begin` is told before each microbatch whether it is
    the last. Returns the loss of the last."""

    def step() -> float:
        for index in range(microbatches):
            begin(index == microbatches - 1)
            loss = model(batch).square().mean()
            loss.backward()
        update()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step


class Ours:
    """What our collectives do for FSDP2: each is waited for where FSDP2 waits for its own, before
    the call returns, so that they hide as little."""

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OurAllGather(Ours, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        plan = plan_of(output_tensor.numel(), output_tensor.dtype, group.size())
        gather = choose(group, "cpu", plan).all_gather
        finish(gather(output_tensor.view(-1), input_tensor.view(-1), group))


class OurReduceScatter(Ours, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        divisor = {dist.ReduceOp.AVG: None, dist.ReduceOp.SUM: 1.0}[op]
        plan = plan_of(input_tensor.numel(), input_tensor.dtype, group.size())
        reduce = choose(group, "cpu", plan).reduce_scatter
        own = finish(reduce(input_tensor.view(-1), group, divisor))
        output_tensor.copy_(own.view_as(output_tensor))


@cache
def plan_of(numel: int, dtype: torch.dtype, world_size: int) -> ParamGroupPlan:
    """Of one tensor, cut evenly."""
    [plan] = plan_units([[ParamSpec("", (numel,), dtype)]], world_size, Flat())
    return plan


def finish(issued: PendingCollective) -> torch.Tensor:
    for work in issued.works:
        work.wait()
    return issued.finish()


def make_update(
    parameters: Sequence[torch.Tensor], clip: Callable[..., Any], optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """What follows backward: clipping by the norm of all gradients, and a step."""

    def update() -> None:
        clip(parameters, MAX_NORM)
        optimizer.step()

    return update


def update_ours(model: nn.Module, prefetch_next_forward: bool = True) -> Callable[[], None]:
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, **ADAMW, prefetch_next_forward=prefetch_next_forward)
    return make_update(parameters, clip_grad_norm_, optimizer)


def update_torchs(model: nn.Module) -> Callable[[], None]:
    parameters = list(model.parameters())
    clip = partial(nn.utils.clip_grad_norm_, foreach=True)
    return make_update(parameters, clip, torch.optim.AdamW(parameters, **ADAMW, fused=True))


def update_alone(model: nn.Module) -> Callable[[], None]:
    """What falls to one rank of an update of `model`, as little as can be: a tensor for each of its
    children."""
    share = nn.ParameterList(
        torch.zeros(sum(each.numel() for each in child.parameters()) // dist.get_world_size())
        for child in model.children()
    )
    for parameter in share:
        parameter.grad = torch.zeros_like(parameter)
    return update_torchs(share)


def shard_fsdp2(args: argparse.Namespace, with_our_collectives: bool = False) -> nn.Sequential:
    """A model sharded as users of FSDP2 do."""
    model = sharding.shard_fsdp2(build(args.blocks, args.sleep))
    if with_our_collectives:
        for block in model:
            block.set_custom_all_gather(OurAllGather())
            block.set_custom_reduce_scatter(OurReduceScatter())
    return model


def shard_ours(
    args: argparse.Namespace, layout: str, prefetch: int
) -> tuple[nn.Sequential, fsdp_overlap.FsdpContext]:
    """A model sharded by ours, and its context."""
    model = build(args.blocks, args.sleep)
    mesh = sharding.cpu_mesh()
    ctx = fsdp_overlap.FsdpContext(mesh, prefetch=prefetch, layout=LAYOUTS[layout])
    ctx.plan_layout([*model, model])
    return sharding.shard_ours(model, ctx), ctx


def train_ours(
    args: argparse.Namespace, overlap: bool
) -> tuple[Callable[[], float], fsdp_overlap.FsdpContext]:
    prefetch = 0 if args.stage == 3 and not overlap else args.prefetch
    is_muon = args.optimizer == "muon"
    model, ctx = shard_ours(args, "tensor-atomic" if is_muon else args.layout, prefetch)
    model.set_zero_stage(args.stage)
    optimizer: torch.optim.Optimizer
    optimizer = Muon(model, LR, adamw=ADAMW) if is_muon else AdamW(model.parameters(), **ADAMW)

    def update() -> None:
        optimizer.step()
        (ctx.start_param_sync if overlap else ctx.finish_param_sync)()

    begin = model.set_is_last_backward
    return make_step(model, make_batch(args.rows), update, args.microbatches, begin), ctx


def train_fsdp2(args: argparse.Namespace) -> Callable[[], float]:
    model = shard_fsdp2(args)
    assert isinstance(model, fsdp2.FSDPModule)
    if args.stage < 3:
        model.set_reshard_after_forward(False)

    def begin(is_last: bool) -> None:
        if args.stage < 3:
            model.set_reshard_after_backward(is_last)
        if args.stage == 1:
            model.set_requires_gradient_sync(is_last)

    if args.optimizer == "muon":
        update = torchs(model)
    else:
        update = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True).step
    return make_step(model, make_batch(args.rows), update, args.microbatches, begin)


def make_communication(
    model: nn.Sequential,
    prefetch: int,
    gather_group: dist.ProcessGroup,
    reduce_group: dist.ProcessGroup,
) -> Callable[[], float]:
    """The collectives of one step of ours, with nothing to wait for but each other."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    specs = [ParamSpec(n, tuple(p.shape), p.dtype) for n, p in model[0].named_parameters()]
    [plan] = plan_units([specs], world_size, Flat())
    collectives = choose(gather_group, "cpu", plan)
    # Buffers are made beforehand and gathers share one: what it holds does not matter here.
    full, gradients = torch.zeros(plan.numel), torch.zeros(plan.numel)
    shard = torch.zeros(plan.shard_numels[rank])

    def communicate() -> float:
        uses = 2 * len(model) - (1 if prefetch else 0)
        gathers = [collectives.all_gather(full, shard, gather_group) for _ in range(uses)]
        reductions: deque[PendingCollective] = deque()
        for _ in model:
            if len(reductions) == MAX_INPUTS:
                finish(reductions.popleft())
            reductions.append(collectives.reduce_scatter(gradients, reduce_group))
        for one in (*gathers, *reductions):
            finish(one)
        return 0.0

    return communicate
