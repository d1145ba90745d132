"""A step of Muon: ours, FSDP2's, a layer-wise optimizer's, and unsharded.

Each system has a copy of one model: `--blocks` blocks of 12 * width^2 parameters in four matrices,
and two norms. The matrices are stepped by Muon, the norms by AdamW, with the same settings:

- unsharded: `torch.optim.Muon` and `torch.optim.AdamW`, on every rank all of it, at the same time.
  So does DDP step;
- layer-wise: the same two, on whole matrices that are dealt to ranks, which send each other what
  they stepped. Its step ends with all parameters on all ranks; for that ours gathers in the next
  forward, under compute;
- FSDP2: the same two on what `torch.distributed.fsdp.fully_shard` shards;
- ours: `fsdp_overlap.optim.Muon` under `TensorAtomic()`, under `Flat()`, and unsharded, which
  shows what of a difference is due to its products alone;

A second model has as many parameters in stacks of experts, which torch's Muon does not step: ours,
with experts divided among two ranks and sharded over the rest, and ours unsharded. Products are in
bfloat16, the default of both.

A sample is one `step()`; gradients are there before. Collectives are those that torch's
`CommDebugMode` counts in one step. Every system must have stepped as the unsharded one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_overlap import Flat, FsdpContext, RaggedDTensor, TensorAtomic, distribute_tensor
from fsdp_overlap.layout import Layout
from fsdp_overlap.optim import Muon
from harness import link_training, options, output, runner, sharding, turns
from harness.layer_wise import layer_wise
from harness.optimizers import ADAMW, LR, torchs
from harness.runner import Results

UNSHARDED, LAYER_WISE, FSDP2 = "unsharded, torch's", "layer-wise, torch's", "FSDP2, torch's"
WHOLE, FLAT, ALONE = "ours, TensorAtomic()", "ours, Flat()", "ours, unsharded"
EXPERTS, EXPERTS_ALONE = "ours, experts", "ours, experts unsharded"
STEP, COLLECTIVES = "step", "collectives a step"
# WHOLE's time over that of these, by the number of ranks.
TARGETS = {2: {UNSHARDED: 0.55, FSDP2: 0.5}, 4: {UNSHARDED: 0.3}}
EXPERTS_IN_A_BLOCK = 12
CLOSE = 2e-2  # of the learning rate, to products in bfloat16


class Experts(nn.Module):
    """As many parameters as a block has in its matrices, in one stack."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS_IN_A_BLOCK, width, width) / width)


@dataclass(frozen=True)
class System:
    """``prepare`` shards a model, or not, and ``optimize`` makes a step of its optimizer. Its model
    must step as that of ``reference`` does."""

    prepare: Callable[[nn.Sequential], None]
    optimize: Callable[[nn.Module], Callable[[], None]]
    reference: str = UNSHARDED
    block: type[nn.Module] = link_training.Block


def ours(model: nn.Module) -> Callable[[], None]:
    return Muon(model, LR, adamw=ADAMW).step


def shard(model: nn.Sequential, layout: Layout, mesh: DeviceMesh | None = None) -> None:
    ctx = FsdpContext(mesh, layout=layout)
    ctx.plan_layout([*model, model])
    sharding.shard_ours(model, ctx)


def divide_experts(model: nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "ep"))
    for module in model.modules():
        if isinstance(module, Experts):
            weight = torch_distribute(module.weight.detach(), mesh["ep"], [Shard(0)])
            module.weight = nn.Parameter(weight)
    shard(model, TensorAtomic(), mesh["shard"])


def systems() -> dict[str, System]:
    return {
        UNSHARDED: System(lambda model: None, torchs),
        LAYER_WISE: System(lambda model: None, layer_wise),
        FSDP2: System(sharding.shard_fsdp2, torchs),
        WHOLE: System(lambda model: shard(model, TensorAtomic()), ours),
        FLAT: System(lambda model: shard(model, Flat()), ours),
        ALONE: System(lambda model: None, ours),
        EXPERTS_ALONE: System(lambda model: None, ours, EXPERTS_ALONE, Experts),
        EXPERTS: System(divide_experts, ours, EXPERTS_ALONE, Experts),
    }


def build(args: argparse.Namespace, block: type[nn.Module] = link_training.Block) -> nn.Sequential:
    """The same model on every rank and for every system."""
    torch.manual_seed(0)
    return nn.Sequential(*(block(width=args.width) for _ in range(args.blocks)))


def give_gradients(model: nn.Module) -> None:
    """The same gradients on every rank and for every system: those of an unsharded model."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            cut = distribute_tensor if isinstance(parameter, RaggedDTensor) else torch_distribute
            whole = cut(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole


def sample(args: argparse.Namespace) -> dict[str, Any]:
    if dist.get_world_size() % 2:
        output.fail("use an even number of --ranks, of which two divide experts")
    models, steps, collectives = {}, {}, {}
    for name, system in systems().items():
        model = models[name] = build(args, system.block)
        system.prepare(model)
        steps[name] = system.optimize(model)
        collectives[name] = collectives_in(steps[name], model)
        check(name, model, models[system.reference])
    return {STEP: turns.slowest_steps(steps, args), COLLECTIVES: collectives}


def collectives_in(step: Callable[[], None], model: nn.Module) -> list[float]:
    """How many collectives a step of a model's optimizer issues."""
    give_gradients(model)
    with CommDebugMode() as issued:
        step()
    return [float(issued.get_total_counts())]


def check(name: str, model: nn.Module, reference: nn.Module) -> None:
    """Fails unless both have the same parameters, after one step of each."""
    for (fqn, mine), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        # A step is of the size of the learning rate.
        error = (whole - its).abs().max().item()
        if not error <= CLOSE * LR:
            output.fail(f"{name}: {fqn} is off by {error} after a step", code=1)


OPTIONS = options.parser(__doc__, ranks=2, blocks=8, width=512, rounds=5, timeout=1800.0)


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    targets = TARGETS.get(args.ranks, {})
    results = Results("products in bfloat16")
    results.add(
        STEP,
        "ms",
        found[STEP],
        *((WHOLE, other, targets.get(other)) for other in (UNSHARDED, LAYER_WISE, FSDP2)),
        (FLAT, FSDP2),
        (EXPERTS, EXPERTS_ALONE),
    )
    results.add(COLLECTIVES, "", found[COLLECTIVES], at_most={WHOLE: 0, EXPERTS: 0})
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
