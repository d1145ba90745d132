"""What a rank keeps in memory at each ZeRO stage: between steps, released, and while it saves.

Gloo ranks train the main job's model by the main job's own code, at stages 3, 2 and 1, with two
microbatches a step, which leave gradients behind at stage 1. Samples are resident memory of the
rank that holds most, above what it held before the model was made:

- *kept*: between steps, once the all-gathers that follow the optimizer's step are over;
- *released*: after what the main job does before a checkpoint;
- *while saving*: the peak of a checkpoint;
- *next step*: between steps again.

The exit code is 1 unless these are what the bytes of the tensors say, to within `--tolerance`: a
shard of the parameters and two of AdamW's moments at rest, the full parameters besides where they
are kept, and nothing besides for a checkpoint. Freed blocks of 64 KiB and more go back to the
system at once, which malloc otherwise does not promise.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_overlap.tools.cli.checkpoints import Checkpoints
from fsdp_overlap.tools.cli.config import TrainConfig
from fsdp_overlap.tools.cli.data import Text
from fsdp_overlap.tools.cli.trainer import Trainer
from harness import options, peaks, processes, runner
from harness.measurement import Claim
from harness.runner import Results

STAGES = (3, 2, 1)
KEPT, RELEASED, SAVING, NEXT = "kept", "released", "while saving", "next step"
# Computed from the sizes of tensors.
SHARDS, FULL = "shards and moments", "full parameters"
MIB = 1 << 20


def run_config(out: Path, stage: int, layers: int, width: int) -> TrainConfig:
    return TrainConfig(
        out=out,
        batch_size=2,
        microbatches=2,
        seq_len=16,
        layers=layers,
        width=width,
        heads=width // 64,
        zero_stage=stage,
    )


def at_rest() -> int:
    """Resident bytes of this rank, while every rank is at rest."""
    gc.collect()
    dist.barrier()
    return peaks.resident("VmRSS")


def weigh(config: TrainConfig, text: Text) -> dict[str, float]:
    """MiB on this rank."""
    before = at_rest()
    trainer = Trainer(config, text, torch.device("cpu"))
    for _ in range(2):
        trainer.advance()
    trainer.context.finish_param_sync()
    found = {KEPT: at_rest() - before}
    trainer.release_unsharded()
    found[RELEASED] = at_rest() - before
    with peaks.PeakMemory() as peak:
        Checkpoints(config.out, keep=1).save(trainer.steps_done, trainer)
    found[SAVING] = found[RELEASED] + peak.nbytes
    trainer.advance()
    trainer.context.finish_param_sync()
    found[NEXT] = at_rest() - before
    param_groups = [
        param_group for unit in trainer.context.units for param_group in unit.param_groups
    ]
    found[SHARDS] = 3 * sum(param_group.shard.nbytes for param_group in param_groups)
    found[FULL] = sum(param_group.full.nbytes for param_group in param_groups)
    return {name: nbytes / MIB for name, nbytes in found.items()}


OPTIONS = options.parser(__doc__, ranks=2, timeout=300.0)
OPTIONS.add_argument("--layers", type=int, default=8)
OPTIONS.add_argument("--width", type=int, default=512, help="a multiple of 64")
OPTIONS.add_argument("--tolerance", type=float, default=4.0, help="in MiB")
options.add_folder(OPTIONS, "four checkpoints")


def sample(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """MiB of the rank that holds most, by stage."""
    noise = torch.randint(256, (1000,), dtype=torch.uint8)
    text = Text(noise, noise, "noise")
    folder = Path(args.folder)
    # Twice in vain, for all that is loaded, connected and allocated at first use, also beside the
    # process groups of the first, which are destroyed when the second makes its own.
    for number in range(2):
        weigh(run_config(folder / f"first-{number}", 2, args.layers, args.width), text)
    heaviest = {}
    for stage in STAGES:
        config = run_config(folder / f"stage-{stage}", stage, args.layers, args.width)
        mine = {name: [mib] for name, mib in weigh(config, text).items()}
        heaviest[str(stage)] = {
            name: mib for name, [mib] in processes.of_slowest_rank(mine).items()
        }
    return heaviest


def claims_of(found: Mapping[int, Mapping[str, float]], tolerance: float) -> list[Claim]:
    """`found`: what `weigh` found, by stage. `tolerance`: in MiB."""
    claims = []
    for stage, mib in found.items():
        kept = {SHARDS: mib[SHARDS], FULL: mib[FULL] if stage < 3 else 0.0}
        rest = {**kept, FULL: 0.0}
        for name, parts in ((KEPT, kept), (RELEASED, rest), (SAVING, rest), (NEXT, kept)):
            expected = sum(parts.values())
            words = " and ".join(part for part, size in parts.items() if size)
            claims.append(
                Claim(
                    f"stage {stage}, {name}: {words}, {expected:.1f} MiB",
                    abs(mib[name] - expected) <= tolerance,
                    f"{mib[name]:.1f} MiB",
                )
            )
    return claims


def report(args: argparse.Namespace, heaviest: Mapping[str, Mapping[str, float]]) -> Results:
    found = {int(stage): mib for stage, mib in heaviest.items()}
    results = Results(
        f"{args.layers} blocks of width {args.width}, float32, AdamW; resident memory above that "
        f"before the model was made, to within {args.tolerance:g} MiB"
    )
    for name in (KEPT, RELEASED, SAVING, NEXT):
        of_stages = {f"ours, stage {stage}": [mib[name]] for stage, mib in found.items()}
        results.add(name, "MiB", of_stages)
    results.claims += claims_of(found, args.tolerance)
    return results


if __name__ == "__main__":
    launch = partial(runner.launch_in_folder, env=peaks.RETURNED)
    runner.main(OPTIONS, sample, report, launch)
