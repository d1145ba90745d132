"""Draws docs/memory.svg: what a rank holds of a model, by optimizer, layout and ZeRO stage.

The figures are of formulas. `--check` compares them with what a small model really allocates: the
bytes of its tensors, on two ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Annotated

import matplotlib
import torch
import torch.distributed as dist
import typer
from matplotlib.figure import Figure

from fsdp_overlap import Flat, FsdpContext, MixedPrecisionPolicy, TensorAtomic, fully_shard
from fsdp_overlap.layout import Layout, ParamGroupPlan, ParamSpec, plan_units
from fsdp_overlap.optim import AdamW, Muon
from fsdp_overlap.optim.contiguous import local_of
from fsdp_overlap.tensor.flat_buffer import FlatBuffer
from fsdp_overlap.tools.cli.model import GPT

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from harness import output, processes
from harness.markdown import markdown_table
from harness.real_models import units_of

MODEL, RANKS = "Llama-3 8B", 8
HEAD = "output.weight"
LAYOUTS: dict[str, Layout] = {"AdamW": Flat(), "Muon": TensorAtomic(split=(HEAD,))}
STAGES = (3, 2, 1)
PREFETCH = 1
# Bytes of an element: shards, gradients, states and reduce inputs in float32, compute in bfloat16.
WIDE, NARROW = 4, 2
GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank; of buffers that come and go, the most at once."""

    parameters: int
    gradients: int
    states: int
    full_buffers: int
    reduce_inputs: int


def estimate(plans: Sequence[ParamGroupPlan], rank: int, optimizer: str, stage: int) -> Memory:
    """`plans` are those of equal blocks, one param group each, and of the root, the last."""
    *blocks, root = plans
    shard = sum(plan.shard_numels[rank] for plan in plans)
    moments = 0
    for plan in plans:
        for spec in plan.specs:
            held = sum(
                stop - start for other, start, stop in plan.ranges(spec.fqn) if other == rank
            )
            moments += held * (1 if optimizer == "Muon" and is_matrix(spec) else 2)
    everything = sum(plan.numel for plan in plans)
    block = blocks[0].numel
    # The root is in use around the blocks, of which one computes and `prefetch` are ahead or wait
    # for their delayed release. Of reduce inputs one travels while the next is filled.
    full = root.numel + (1 + PREFETCH) * block if stage == 3 else everything
    reduced = everything if stage == 1 else block + max(block, root.numel)
    return Memory(WIDE * shard, WIDE * shard, WIDE * moments, NARROW * full, WIDE * reduced)


def is_matrix(spec: ParamSpec) -> bool:
    return spec.ndim >= 2 and not spec.is_embedding and spec.fqn != HEAD


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


def measure(optimizer: str, stage: int) -> tuple[Memory, list[ParamGroupPlan]]:
    """What this rank allocates for a small model in two steps of two microbatches."""
    model = GPT(layers=6, width=32, heads=2)
    ctx = FsdpContext(prefetch=PREFETCH, layout=LAYOUTS[optimizer])
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
    found = Memory(shards, gradients, states, most[NARROW], most[WIDE])
    return found, [param_group.plan for param_group in param_groups]


def compared(rank: int, world_size: int) -> dict[str, list[list[int]]]:
    """Formula and measurement of each part, by optimizer, stage and rank, of all ranks."""
    mine = {}
    for optimizer in LAYOUTS:
        for stage in STAGES:
            measured, plans = measure(optimizer, stage)
            formula = estimate(plans, rank, optimizer, stage)
            mine[f"{optimizer}, stage {stage}, rank {rank}"] = [
                list(pair) for pair in zip(astuple(formula), astuple(measured), strict=True)
            ]
    everyone: list[dict[str, list[list[int]]]] = [{}] * world_size
    dist.all_gather_object(everyone, mine)
    return {name: pairs for of_rank in everyone for name, pairs in of_rank.items()}


def run_rank() -> None:
    """Compares on this rank; rank 0 reports what all have found."""
    rank, world_size = processes.join_ranks()
    processes.finish(compared(rank, world_size))


def compare() -> None:
    """Prints formulas beside measurements; fails where they differ."""
    names = [field.name.replace("_", " ") for field in fields(Memory)]
    found = processes.launch_ranks(2, ["--check"], timeout_s=120)
    rows = [[name, *(f"{a:,} / {b:,}" for a, b in pairs)] for name, pairs in found.items()]
    print(markdown_table(["formula / measured, bytes", *names], rows))
    if any(a != b for pairs in found.values() for a, b in pairs):
        output.fail("the formulas are off", code=1)


def draw(out: Path) -> None:
    units = units_of(MODEL)
    bars = {}
    for optimizer, layout in LAYOUTS.items():
        plans = plan_units(units, RANKS, layout)
        for stage in STAGES:
            ranks = [estimate(plans, rank, optimizer, stage) for rank in range(RANKS)]
            most = max(ranks, key=lambda memory: sum(astuple(memory)))
            bars[f"{optimizer}, {type(layout).__name__}(), stage {stage}"] = most
    matplotlib.rcParams.update({"svg.hashsalt": "memory", "svg.fonttype": "none"})
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots()
    colors = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377"]
    left = [0.0] * len(bars)
    for field, color in zip(fields(Memory), colors, strict=True):
        sizes = [getattr(memory, field.name) / GIB for memory in bars.values()]
        label = field.name.replace("_", " ")
        axes.barh(list(bars), sizes, left=left, color=color, label=label)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="GiB", xlim=(0, max(left) * 1.1))
    axes.set_title(f"{MODEL} on {RANKS} ranks, the rank that holds most", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(out, metadata={"Date": None})
    for name, memory in bars.items():
        parts = ", ".join(
            f"{field.name.replace('_', ' ')} {getattr(memory, field.name) / GIB:.2f}"
            for field in fields(Memory)
        )
        print(f"{name}: {sum(astuple(memory)) / GIB:.2f} GiB: {parts}")


def main(
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("docs/memory.svg"),
    check: Annotated[bool, typer.Option("--check", help="Compare with measurements.")] = False,
) -> None:
    if processes.is_rank():
        run_rank()
    elif check:
        compare()
    else:
        draw(out)


if __name__ == "__main__":
    typer.run(main)
