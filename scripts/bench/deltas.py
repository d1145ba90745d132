"""What a step changed in bfloat16 weights, sent to inference: how long training stops for it.

Two ranks, over a slow link. Between samples 1% or 5% of all values are edited, as reinforcement
learning's rates do.

- *ours*: each rank finds what changed in its shards since it last sent them, `WeightDeltas`. Then
  training may go on: positions and values are copies. *in files*: also written, `write_deltas()`.
- *export*: all ranks get all weights in bfloat16, one after the other, by `export_weights()`.
- *FSDP2, state dict*: torch's full state dict of the same model sharded by FSDP2, in float32.

Bytes are those of one version, of all ranks.

The share of values that differ after a step is of AdamW at several learning rates, each from the
same model after `--steps` steps at 1e-4, with the loss of random targets.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp_overlap
from fsdp_overlap.optim import AdamW
from fsdp_overlap.weights import WeightDeltas, export_weights, write_deltas
from harness import options, runner, sharding, turns
from harness.runner import Results

EXPORT, STATE = "export_weights()", "FSDP2, state dict"
SHARES = (0.05, 0.01)
RATES = (1e-6, 1e-5, 1e-4)
STOPS, SENT = "training stops", "bytes"
CHANGED, SENT_AFTER, ALL = "values changed by a step", "bytes after a step", "all"
TARGET = 0.1


def ours(share: float, where: str = "") -> str:
    return f"ours, {share:.0%} changed{where}"


def build(width: int, blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(width, 3 * width, bias=False),
                nn.Linear(3 * width, width, bias=False),
                nn.Linear(width, 3 * width, bias=False),
                nn.Linear(3 * width, width, bias=False),
            )
            for _ in range(blocks)
        )
    )


def edit(model: nn.Module, share: float) -> None:
    """Change each value with a probability of `share`, by 1%, which bfloat16 shows."""
    for parameter in model.parameters():
        local = parameter.detach().to_local().view(-1)
        chosen = torch.randint(max(1, local.numel()), (round(local.numel() * share),))
        local[chosen] = local[chosen] * 1.01


def systems(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], float]]:
    """Samples, of milliseconds."""
    mesh = sharding.cpu_mesh()
    mine = sharding.shard_ours(build(args.width, args.blocks), fsdp_overlap.FsdpContext(mesh))
    others = sharding.shard_fsdp2(build(args.width, args.blocks), mesh)
    deltas, written = WeightDeltas(mine), WeightDeltas(mine)
    list(deltas.changes())
    write_deltas(written, folder)

    def compare() -> None:
        list(deltas.changes())

    def write() -> None:
        write_deltas(written, folder)

    def export() -> None:
        for _ in export_weights(mine, dtype=torch.bfloat16):
            pass

    def state() -> None:
        get_model_state_dict(others, options=StateDictOptions(full_state_dict=True))

    def after_edit(run: Callable[[], None], share: float) -> float:
        # Nothing that was edited for another system is left.
        list(deltas.changes())
        write_deltas(written, folder)
        edit(mine, share)
        dist.barrier()
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    found: dict[str, Callable[[], float]] = {EXPORT: turns.timed(export), STATE: turns.timed(state)}
    for share in SHARES:
        found[ours(share)] = partial(after_edit, compare, share)
        found[ours(share, ", in files")] = partial(after_edit, write, share)
    return found


def sent_bytes(args: argparse.Namespace) -> dict[str, int]:
    """The bytes of all ranks for a version."""
    model = sharding.shard_ours(build(args.width, args.blocks))
    deltas = WeightDeltas(model)
    found = {EXPORT: sum(delta.nbytes for delta in deltas.changes())}
    for share in SHARES:
        edit(model, share)
        found[ours(share)] = sum(delta.nbytes for delta in deltas.changes())
    total = torch.tensor(list(found.values()))
    dist.all_reduce(total)
    return dict(zip(found, total.tolist(), strict=True))


def of_steps(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """For each rate and step, the share of values that differ after it, and of bytes of all weights
    that are sent, in percent."""
    width = args.width // 4
    model = sharding.shard_ours(build(width, 2))
    optimizer = AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    samples = [torch.randn(2, 64, width, generator=generator) for _ in range(2 * args.steps)]

    def train(batch: torch.Tensor) -> None:
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in samples[: args.steps]:
        train(batch)
    numel = sum(parameter.numel() for parameter in model.parameters())
    start = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    found: dict[str, dict[str, list[float]]] = {CHANGED: {}, SENT_AFTER: {}}
    for rate in RATES:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        for group in optimizer.param_groups:
            group["lr"] = rate
        deltas = WeightDeltas(model)
        list(deltas.changes())
        name = f"AdamW at {rate:.0e}"
        for batch in samples[args.steps :]:
            before = [parameter.to_local().bfloat16() for parameter in model.parameters()]
            train(batch)
            both = zip(before, model.parameters(), strict=True)
            differ = sum(int((old != new.to_local().bfloat16()).sum()) for old, new in both)
            sent = sum(delta.nbytes for delta in deltas.changes())
            total = torch.tensor([differ, sent])
            dist.all_reduce(total)
            for what, share in zip((CHANGED, SENT_AFTER), total / numel * 100, strict=True):
                found[what].setdefault(name, []).append(float(share))
        found[SENT_AFTER][name] = [share / 2 for share in found[SENT_AFTER][name]]
    return found


OPTIONS = options.parser(__doc__, rate="2gbit", ranks=2, blocks=8, width=1024, rounds=7, steps=10)


def sample(args: argparse.Namespace) -> dict[str, Any]:
    shared = [tempfile.mkdtemp(prefix="fsdp_overlap_deltas_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, 0)
    assert shared[0] is not None
    try:
        samples = turns.slowest(systems(args, Path(shared[0])), args.rounds)
    finally:
        dist.barrier()
        shutil.rmtree(shared[0], ignore_errors=True)
    return {"samples": samples, "bytes": sent_bytes(args), "steps": of_steps(args)}


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    numel = 12 * args.width**2 * args.blocks
    results = Results(f"{numel / 1e6:.0f} million parameters, {numel * 2 / 1e6:.0f} MB in bfloat16")
    pairs = [(ours(share), other, TARGET) for share in SHARES for other in (EXPORT, STATE)]
    files = [(ours(share, ", in files"), EXPORT) for share in SHARES]
    results.add(STOPS, "ms", found["samples"], *pairs, *files)
    nbytes = {name: [value / 1e6] for name, value in found["bytes"].items()}
    results.add(SENT, "MB", nbytes, *((ours(share), EXPORT) for share in SHARES))
    for what, samples in found["steps"].items():
        pairs_of_steps = [(name, ALL) for name in samples]
        results.add(what, "%", samples | {ALL: [100.0] * args.steps}, *pairs_of_steps)
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
