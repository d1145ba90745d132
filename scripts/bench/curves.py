"""Losses of thousands of steps: ours beside unsharded training, DDP and FSDP2.

The model, the text, the learning rates and their schedule are the main job's (`scripts/train.sh`).
All runs of a seed begin with the same weights and get the same sequences. Where arithmetic allows
it, a variant equals its *twin* to the bit, in the losses of all steps and in the last weights:

- unsharded, one process trains the microbatches of both ranks, in the order in which these add up
  their gradients. A sum of two does not depend on its order, and halves are exact;
- uneven ranks have three microbatches and one, in turns, by `until_all_done()` and `shadow()`;
- Muon's matrices are those of blocks; AdamW steps the others. Neither splits `qkv`. torch's sums
  the norm of a tall matrix in another order, and rounds it to bfloat16, rarely to another value;
- bfloat16 is that of compute, with reductions in float32; 8 bits is the same, with matrices and
  their gradients sent in float8;
- gradients are clipped only where a variant says so: the main job clips, but ranks add up squares
  in another order than one process, so that norms, and then weights, differ in the last bit.

AdamW is torch's, fused, and in ours `fsdp_overlap.optim.AdamW`. Two processes train at a time: the
ranks of a run, or two unsharded runs. A run that is in `--folder` is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_overlap import (
    BlockAtomic,
    Flat,
    FsdpContext,
    MixedPrecisionPolicy,
    QuantizedCommPolicy,
    TensorAtomic,
    fully_shard,
)
from fsdp_overlap.layout import Layout
from fsdp_overlap.optim import AdamW, Muon, clip_grad_norm_
from fsdp_overlap.tools.cli.config import BEST_LR
from fsdp_overlap.tools.cli.data import load_text, sample_batch
from fsdp_overlap.tools.cli.model import GPT
from harness import options, output, processes, sharding
from harness.markdown import markdown_table

RANKS = 2
ADAMW: dict[str, Any] = {"lr": BEST_LR["adamw"], "betas": (0.9, 0.95), "weight_decay": 0.1}
# Ours has eps=0 by default, torch's this one.
MATRICES: dict[str, Any] = {"lr": BEST_LR["muon"], "eps": 1e-7, "adjust_lr_fn": "match_rms_adamw"}
FLOAT8 = QuantizedCommPolicy(torch.float8_e4m3fn, torch.float8_e4m3fn)
FLAT, ROWS, WHOLE = Flat(), BlockAtomic(rows=1), TensorAtomic(split=("output.weight",))
VALIDATED = 32  # sequences
POINTS = 20  # validations of a run, and means of training losses that are kept
KINDS = ("validation", "training")


@dataclass(frozen=True)
class Variant:
    """by: unsharded, DDP, FSDP2 or ours. twin: what it is compared with to the bit, and is_equal:
    whether it must equal it at all steps. microbatches: of each rank, in turns."""

    by: str
    twin: str = ""
    is_equal: bool = True
    optimizer: str = "adamw"
    microbatches: tuple[int, int] = (1, 1)
    layout: Layout = FLAT
    computes_in_bfloat16: bool = False
    wire: QuantizedCommPolicy | None = None
    clips: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether both ranks train it together."""
        return self.by != "unsharded"

    @property
    def base(self) -> str:
        """The unsharded training from whose losses its own are subtracted."""
        if self.clips:
            return CLIPPED
        return MUON if self.optimizer == "muon" else UNSHARDED


UNSHARDED, UNEVEN, MUON = "unsharded", "unsharded, 4 microbatches", "unsharded, torch's Muon"
BFLOAT16, CLIPPED = "FSDP2, bfloat16", "unsharded, clipped"
VARIANTS = {
    UNSHARDED: Variant("unsharded"),
    "DDP": Variant("DDP", UNSHARDED),
    "FSDP2": Variant("FSDP2", UNSHARDED),
    "ours": Variant("ours", UNSHARDED),
    UNEVEN: Variant("unsharded", microbatches=(3, 1)),
    "ours, uneven ranks": Variant("ours", UNEVEN, microbatches=(3, 1)),
    MUON: Variant("unsharded", optimizer="muon"),
    "ours, Muon": Variant("ours", MUON, is_equal=False, optimizer="muon", layout=WHOLE),
    BFLOAT16: Variant("FSDP2", computes_in_bfloat16=True),
    "ours, bfloat16": Variant("ours", BFLOAT16, computes_in_bfloat16=True),
    "ours, 8 bits": Variant("ours", layout=ROWS, computes_in_bfloat16=True, wire=FLOAT8),
    CLIPPED: Variant("unsharded", clips=True),
    "ours, clipped": Variant("ours", CLIPPED, is_equal=False, clips=True),
}


class Run:
    """The training of a variant with a seed, on this rank."""

    def __init__(self, args: argparse.Namespace, name: str, seed: int) -> None:
        self.args, self.title, self.variant = args, f"{name}, seed {seed}", VARIANTS[name]
        self.is_shown = not self.variant.is_sharded or dist.get_rank() == 0
        torch.manual_seed(seed)
        self.ctx: FsdpContext | None = None
        self.model = self._prepare(GPT(layers=args.layers, width=args.width, heads=args.heads))
        self.optimizers = self._make_optimizers()
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
            for optimizer in self.optimizers
        ]
        self.draws = torch.Generator().manual_seed(seed)
        self.text = load_text(None, args.seq_len)

    def train(self) -> dict[str, Any]:
        """Return the losses of all steps and validations, in nats per byte, and a digest of the
        weights. Collective, if it is sharded."""
        began = time.perf_counter()
        losses, validations = [], []
        every = interval_of(self.args.steps)
        for step in range(self.args.steps):
            losses.append(self._step(step))
            if self.ctx is not None:
                self.ctx.start_param_sync()
            if (step + 1) % every == 0:
                validations.append(self._validate())
                if self.is_shown:
                    seconds = (time.perf_counter() - began) / (step + 1)
                    line = f"{self.title}: step {step + 1}, {seconds:.3f} s a step"
                    print(line, file=sys.stderr, flush=True)
        return {
            "losses": self._over_ranks(losses),
            "validations": self._over_ranks(validations),
            "weights": self._digest(),
        }

    def _step(self, number: int) -> float:
        """Train a step. Return this rank's part of the mean loss, in double precision."""
        ranks = self._microbatches(number)
        total = sum(map(len, ranks))
        batches: Iterable[tuple[Tensor, Tensor] | None]
        if not self.variant.is_sharded:
            batches = [batch for both in zip_longest(*ranks) for batch in both if batch is not None]
        elif self.ctx is not None and len(set(map(len, ranks))) > 1:
            batches = self.ctx.until_all_done(ranks[dist.get_rank()])
        else:
            batches = ranks[dist.get_rank()]
        weight = (RANKS if self.variant.is_sharded else 1) / total  # ranks average gradients
        loss_sum = 0.0
        for batch in batches:
            if batch is None:
                assert self.ctx is not None
                self.ctx.shadow()
            else:
                loss = self._loss(*batch)
                (weight * loss).backward()
                loss_sum += loss.item()
        if self.variant.clips:
            clip = clip_grad_norm_ if self.ctx is not None else nn.utils.clip_grad_norm_
            clip(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.model.zero_grad()
        return loss_sum / total

    @torch.no_grad()
    def _validate(self) -> float:
        """Return this rank's part of the mean loss, over the same sequences each time."""
        # Of the size of a microbatch: products of another size may differ in the last bit.
        size = RANKS * self.args.batch_size // sum(self.variant.microbatches)
        draws = torch.Generator().manual_seed(0)
        drawn = sample_batch(self.text.validation, VALIDATED, self.args.seq_len, draws)
        batches = list(zip(*(part.split(size) for part in drawn), strict=True))
        mine = batches[dist.get_rank() :: RANKS] if self.variant.is_sharded else batches
        return sum(self._loss(*batch).item() for batch in mine) / len(batches)

    def _prepare(self, model: GPT) -> nn.Module:
        units = [*model.blocks, model]
        dtypes: dict[str, Any] = {}
        if self.variant.computes_in_bfloat16:
            dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        if self.variant.by == "DDP":
            return DistributedDataParallel(model)
        if self.variant.by == "FSDP2":
            mesh, policy = sharding.cpu_mesh(), fsdp2.MixedPrecisionPolicy(**dtypes)
            for unit in units:
                fsdp2.fully_shard(unit, mesh=mesh, mp_policy=policy)
        if self.variant.by == "ours":
            wire = self.variant.wire
            self.ctx = FsdpContext(sharding.cpu_mesh(), layout=self.variant.layout)
            if wire is None:
                self.ctx.plan_layout(units)
            for unit in units:
                policy = MixedPrecisionPolicy(**dtypes)
                fully_shard(unit, self.ctx, mp_policy=policy, comm_policy=wire)
        return model

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        uses_muon = self.variant.optimizer == "muon"
        if self.ctx is not None and uses_muon:
            return [Muon(self.model, adamw=ADAMW, **MATRICES)]
        if self.ctx is not None:
            return [AdamW(self.model.parameters(), **ADAMW)]
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            is_matrix = uses_muon and "blocks" in name and parameter.ndim == 2
            (matrices if is_matrix else others).append(parameter)
        adamw = torch.optim.AdamW(others, **ADAMW, fused=True)
        return [torch.optim.Muon(matrices, **MATRICES), adamw] if uses_muon else [adamw]

    def _microbatches(self, step: int) -> list[list[tuple[Tensor, Tensor]]]:
        """Draw the sequences of a step. Return the inputs and targets of each rank's
        microbatches."""
        counts, args = self.variant.microbatches, self.args
        drawn = sample_batch(self.text.train, RANKS * args.batch_size, args.seq_len, self.draws)
        batches = zip(*(part.chunk(sum(counts)) for part in drawn), strict=True)
        return [[next(batches) for _ in range(n)] for n in (counts, counts[::-1])[step % 2]]

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten())

    def _lr_factor(self, step: int) -> float:
        """Return linear warmup over a tenth of the run, then a cosine down to a tenth."""
        warmup = max(1, self.args.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.args.steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    def _over_ranks(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        if self.variant.is_sharded:
            dist.all_reduce(total)
        return total.tolist()

    def _digest(self) -> str:
        if isinstance(self.model, fsdp2.FSDPModule):
            self.model.reshard()  # the root stays gathered after a forward
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(whole.detach().numpy().tobytes())
        return digest.hexdigest()


def interval_of(steps: int) -> int:
    """Return the steps between validations, over which kept training losses are averaged."""
    return max(1, steps // POINTS)


# ---- runs ----


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    names = ("steps", "batch_size", "seq_len", "layers", "width", "heads")
    return {"torch": torch.__version__} | {name: getattr(args, name) for name in names}


def file_of(args: argparse.Namespace, name: str, seed: int) -> Path:
    folder: Path = args.folder
    return folder / f"{name.replace(', ', '_').replace(' ', '_')}-{seed}.json"


def read_run(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any] | None:
    """Return what was written of a run with these settings."""
    file = file_of(args, name, seed)
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    return found if found.pop("settings") == settings_of(args) else None


def train_on_rank(args: argparse.Namespace) -> None:
    """Train one run on all ranks, or another run on each, and write its file."""
    processes.join_ranks(timeout_s=args.timeout)
    name, seed = args.train[dist.get_rank() % len(args.train)]
    run = Run(args, name, seed)
    found = run.train()
    if run.is_shown:
        file = file_of(args, name, seed)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(found | {"settings": settings_of(args)}))
        unfinished.replace(file)
    processes.finish(None)


def train_all(args: argparse.Namespace) -> None:
    """Train the runs that are not in the folder, those of the first seed first."""
    args.folder.mkdir(parents=True, exist_ok=True)
    left = [
        (name, seed)
        for seed in args.seeds
        for name in args.variants
        if read_run(args, name, seed) is None
    ]
    while left:
        together, ranks = left[:1], RANKS
        if not VARIANTS[left[0][0]].is_sharded:
            together = [key for key in left if not VARIANTS[key[0]].is_sharded][:RANKS]
            ranks = len(together)
        left = [key for key in left if key not in together]
        processes.launch_ranks(
            ranks, [*sys.argv[1:], "--train", json.dumps(together)], args.timeout
        )
        print(f"{len(left)} runs left", file=sys.stderr, flush=True)


# ---- what was found ----


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Return all runs that are in the folder, with training losses averaged between validations,
    and for how many steps their losses equal their twin's."""
    every, runs = interval_of(args.steps), []
    for name, variant in VARIANTS.items():
        for seed in args.seeds:
            if (found := read_run(args, name, seed)) is None:
                continue
            losses = found["losses"]
            means = [mean(losses[i : i + every]) for i in range(0, len(losses), every)]
            run = {
                "variant": name,
                "seed": seed,
                "training": means,
                "validation": found["validations"],
            }
            if (twin := read_run(args, variant.twin, seed)) is not None:
                pairs = zip(losses, twin["losses"], strict=True)
                run["equal_steps"] = sum(
                    1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)
                )
                run["is_equal"] = found == twin
            runs.append(run)
    return {"settings": settings_of(args), "runs": runs}


def runs_of(found: dict[str, Any], name: str) -> dict[int, dict[str, Any]]:
    """Return the runs of a variant by seed."""
    return {run["seed"]: run for run in found["runs"] if run["variant"] == name}


def in_words(values: Sequence[float], style: str = ".4f") -> str:
    """Return the mean, and the least and the largest if they differ."""
    if len(set(values)) == 1:
        return f"{values[0]:{style}}" if values[0] else "0"
    return f"{mean(values):{style}} ({min(values):{style}} to {max(values):{style}})"


def above_base(found: dict[str, Any], name: str, kind: str) -> list[list[float]]:
    """Return by how much losses are above those of the unsharded training, of each seed."""
    runs, bases = runs_of(found, name), runs_of(found, VARIANTS[name].base)
    return [
        [mine - its for mine, its in zip(runs[seed][kind], bases[seed][kind], strict=True)]
        for seed in sorted(runs.keys() & bases.keys())
    ]


def equality_of(found: dict[str, Any], name: str) -> str:
    """Return for how many steps runs equal those of the twin, in words."""
    runs = [run for run in runs_of(found, name).values() if "is_equal" in run]
    if not any(run["equal_steps"] for run in runs):
        return ""
    if all(run["is_equal"] for run in runs):
        return f"{VARIANTS[name].twin}, always"
    steps = [run["equal_steps"] for run in runs]
    span = " to ".join(str(each) for each in dict.fromkeys((min(steps), max(steps))))
    return f"{VARIANTS[name].twin}, for {span} steps"


def table_of(found: dict[str, Any]) -> str:
    """Return the last losses of all variants."""
    header = ["", "seeds", *KINDS, *(f"{kind}, above unsharded" for kind in KINDS)]
    rows = []
    for name, variant in VARIANTS.items():
        if not (runs := runs_of(found, name)):
            continue
        row = [name, str(len(runs))]
        row += [in_words([run[kind][-1] for run in runs.values()]) for kind in KINDS]
        for kind in KINDS:
            above = [] if name == variant.base else above_base(found, name, kind)
            row.append(in_words([seed[-1] for seed in above], "+.4f") if above else "")
        rows.append([*row, equality_of(found, name)])
    return markdown_table([*header, "equal to the bit to"], rows)


def check(found: dict[str, Any]) -> None:
    """Fail unless all variants that must equal their twins do."""
    for run in found["runs"]:
        variant = VARIANTS[run["variant"]]
        if variant.is_equal and not run.get("is_equal", True):
            place = f"{run['variant']}, seed {run['seed']}"
            output.fail(f"{place}: not equal to {variant.twin} to the bit", code=1)


OPTIONS = options.parser(__doc__, timeout=7200.0)
OPTIONS.add_argument("--steps", type=int, default=2000, help="of each run")
OPTIONS.add_argument(
    "--variants",
    choices=VARIANTS,
    nargs="+",
    default=list(VARIANTS),
    metavar="VARIANT",
    help=f"each in quotes: {'; '.join(VARIANTS)}",
)
OPTIONS.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
OPTIONS.add_argument(
    "--batch-size", type=int, default=4, help="sequences of a rank, an even number"
)
OPTIONS.add_argument("--seq-len", type=int, default=128, help="bytes of a sequence")
OPTIONS.add_argument("--layers", type=int, default=6)
OPTIONS.add_argument("--width", type=int, default=192)
OPTIONS.add_argument("--heads", type=int, default=6)
OPTIONS.add_argument("--folder", type=Path, default=Path("runs/curves"), help="of a file each run")
OPTIONS.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)  # what ranks train


def main() -> None:
    args = OPTIONS.parse_args()
    if args.batch_size % 2:
        output.fail(f"--batch-size {args.batch_size}: uneven ranks need an even number")
    if processes.is_rank():
        return train_on_rank(args)
    train_all(args)
    found = collect(args)
    print(table_of(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    check(found)


if __name__ == "__main__":
    main()
