"""Training a Llama-like model on GPUs: ours beside FSDP2, DDP and an unsharded model.

    python scripts/bench/llama.py                              one GPU, as rank 0 of 8
    torchrun --nproc-per-node 8 scripts/bench/llama.py         8 GPUs, with NCCL

On one GPU the kernels of compute are real, and the link is simulated (`simulated_ranks.py` says
what that is and is not). It is as fast as makes the transfers of FSDP2's step last `--ratio` of the
compute of an unsharded step; `--waiting-blocks` says how many blocks of a collective's kernel stay
on the GPU until it ends. With torchrun, ranks and collectives are real, and both options are left
out.

A step is forward, backward, the optimizer and `zero_grad`, on one sequence a rank, in bfloat16 with
parameters, reductions and optimizer states in float32. The unsharded model and DDP compute under
`torch.autocast`.

    tokens/s       of one GPU
    step           milliseconds, from an idle GPU to an idle GPU
    exposed        milliseconds of a step in which a collective runs and no kernel computes
    optimizer      milliseconds of its step alone
    peak           GiB that tensors take at most, of all that a system has
    host           microseconds of the host for each unit's forward and backward, above an unsharded
                   model's, on 16 tokens; where parameters are offloaded it waits for copies too

Systems are built one after the other, `--rounds` times, in alternating order.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fsdp_overlap
import fsdp_overlap.optim
from fsdp_overlap.layout import Flat, Layout, TensorAtomic
from fsdp_overlap.tools.profiling import read_report
from harness import output, simulated_ranks
from harness.measurement import Measurement
from harness.runner import Results
from harness.simulated_link import Link
from harness.simulated_training import MIXED, SCALES, Block, Scale

FEW_TOKENS = 16
LR = 1e-4
UNSHARDED, DDP, FSDP2, OURS = "unsharded", "DDP", "FSDP2", "ours"


@dataclass(frozen=True)
class Model:
    scale: Scale
    vocabulary: int


MODELS = {
    "1b": Model(replace(SCALES["cuda"], blocks=16, width=2048, hidden=8192), 32768),
    "3b": Model(replace(SCALES["cuda"], blocks=28, width=3072, heads=24, hidden=8192), 32768),
    "tiny": Model(SCALES["cpu"], 128),
}


class Llama(nn.Module):
    """Tokens [1, tokens] to the mean loss of the next ones. Blocks have no positions."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        scale = model.scale
        self.embedding = nn.Embedding(model.vocabulary, scale.width)
        self.blocks = nn.ModuleList(Block(scale) for _ in range(scale.blocks))
        self.norm = nn.RMSNorm(scale.width)
        self.output = nn.Linear(scale.width, model.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Setting(NamedTuple):
    """What all systems have in common."""

    model: Model
    device: torch.device
    mesh: DeviceMesh


class Trained(NamedTuple):
    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizers: list[torch.optim.Optimizer]


Build = Callable[[nn.Module, Setting], Trained]
Samples = dict[str, dict[str, list[float]]]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, fused=True)]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon steps."""
    return [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]


def autocast(model: Callable[..., Any], setting: Setting) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(setting.device.type, torch.bfloat16):
            return model(tokens)

    return forward


def unsharded(model: nn.Module, setting: Setting) -> Trained:
    return Trained(autocast(model, setting), adamw(model))


def unsharded_muon(model: nn.Module, setting: Setting) -> Trained:
    stepped = matrices(model)
    others = [p for p in model.parameters() if not any(p is each for each in stepped)]
    optimizers = [torch.optim.Muon(stepped, lr=LR), torch.optim.AdamW(others, lr=LR, fused=True)]
    return Trained(autocast(model, setting), optimizers)


def ddp(model: nn.Module, setting: Setting) -> Trained:
    wrapped = DistributedDataParallel(model, device_mesh=setting.mesh)
    return Trained(autocast(wrapped, setting), adamw(model))


def torchs(model: Any, setting: Setting, **options: Any) -> Trained:
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module, mesh=setting.mesh, mp_policy=MIXED, **options)
    return Trained(model, adamw(model))


def ours(
    model: Any,
    setting: Setting,
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw,
    layout: Layout = Flat(),  # noqa: B008, frozen
    **options: Any,
) -> Trained:
    ctx = fsdp_overlap.FsdpContext(setting.mesh, layout=layout)
    for module in (*model.blocks, model):
        fsdp_overlap.fully_shard(module, ctx, mp_policy=MIXED, **options)
    return Trained(model, optimizers(model))


SYSTEMS: dict[str, Build] = {
    UNSHARDED: unsharded,
    DDP: ddp,
    FSDP2: torchs,
    OURS: ours,
    "ours, its own AdamW": partial(
        ours, optimizers=lambda m: [fsdp_overlap.optim.AdamW(m.parameters(), lr=LR)]
    ),
    "unsharded, torch's Muon": unsharded_muon,
    "ours, Muon": partial(
        ours, optimizers=lambda m: [fsdp_overlap.optim.Muon(m, lr=LR)], layout=TensorAtomic()
    ),
    "FSDP2, offloaded": partial(torchs, offload_policy=fsdp2.CPUOffloadPolicy()),
    "ours, offloaded": partial(ours, offload_policy=fsdp_overlap.CPUOffloadPolicy()),
}
ON_CUDA = ("FSDP2, offloaded", "ours, offloaded")  # a CPU's parameters are there already


# ---------------------------------------------------------------- samples


def synchronize(setting: Setting) -> None:
    if setting.device.type == "cuda":
        torch.cuda.synchronize()


def timed(setting: Setting, run: Callable[[], object], waits: bool = True) -> float:
    """Seconds, from an idle device to an idle device, or to the end of the host's work."""
    synchronize(setting)
    start = time.perf_counter()
    run()
    if waits:
        synchronize(setting)
    end = time.perf_counter()
    synchronize(setting)
    return end - start


@contextmanager
def built(build: Build, setting: Setting) -> Iterator[tuple[Trained, float]]:
    """A system, and the bytes that were taken before."""
    before = 0.0
    if setting.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with setting.device:
        model = Llama(setting.model)
    yield build(model, setting), before
    del model
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()


def sample(
    name: str, setting: Setting, steps: int, link: Link | None
) -> tuple[dict[str, float], float]:
    """What was measured of a system, and the bytes that a step of it sends."""
    found: dict[str, float] = {}
    scale = setting.model.scale

    def batch(count: int) -> torch.Tensor:
        return torch.randint(setting.model.vocabulary, (1, count), device=setting.device)

    with built(SYSTEMS[name], setting) as (trained, before):
        many, few = batch(scale.tokens), batch(FEW_TOKENS)

        def compute(tokens: torch.Tensor) -> None:
            trained.forward(tokens).backward()

        def optimize() -> None:
            for optimizer in trained.optimizers:
                optimizer.step()

        def drop() -> None:
            for optimizer in trained.optimizers:
                optimizer.zero_grad()

        def step() -> None:
            compute(many)
            optimize()
            drop()

        for _ in range(scale.warmup):
            step()
        if link is not None:
            link.sent.clear()
        step()
        sent = float(sum(t.nbytes for t in link.sent)) if link is not None else 0.0
        if setting.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() - before
            found["peak"] = peak / 2**30
        times = [timed(setting, step) for _ in range(steps)]
        found["step"] = statistics.median(times) * 1e3
        found["tokens"] = scale.tokens / statistics.median(times)
        computing = [timed(setting, lambda: compute(many)) for _ in times]
        found["compute"] = statistics.median(computing) * 1e3
        found["exposed"] = exposed(setting, step)
        drop()
        optimizing = []
        for _ in range(3):
            compute(few)
            optimizing.append(timed(setting, optimize))
            drop()
        found["optimizer"] = statistics.median(optimizing) * 1e3
        with no_limit(link):
            host = [timed(setting, lambda: compute(few), waits=False) for _ in range(7)]
        found["host"] = statistics.median(host) * 1e6 / (scale.blocks + 1)
    return found, sent


@contextmanager
def no_limit(link: Link | None) -> Iterator[None]:
    if link is None:
        yield
        return
    speed, link.gigabytes_per_s = link.gigabytes_per_s, None
    yield
    link.gigabytes_per_s = speed


def exposed(setting: Setting, step: Callable[[], object]) -> float:
    """Milliseconds, as the overlap report of one step says."""
    if setting.device.type != "cuda":
        return 0.0
    synchronize(setting)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(setting)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        try:
            return read_report(trace, steps=1).slowest.exposed_time / 1e3
        except ValueError:  # no collectives
            return 0.0


# ------------------------------------------------------------------ table

COLUMNS = {
    "tokens": ("tokens/s", "tokens/s"),
    "step": ("step", "ms"),
    "exposed": ("exposed", "ms"),
    "optimizer": ("optimizer", "ms"),
    "peak": ("peak", "GiB"),
    "host": ("host, a unit", "us"),
}
RATIOS = [
    ("step", OURS, FSDP2),
    ("step", "ours, its own AdamW", FSDP2),
    ("host", OURS, FSDP2),
    ("peak", OURS, FSDP2),
    ("optimizer", "ours, Muon", "unsharded, torch's Muon"),
    ("step", "ours, offloaded", "FSDP2, offloaded"),
]


def table(
    args: argparse.Namespace, setting: Setting, where: str, samples: Samples, bare_host: float
) -> Measurement:
    scale = setting.model.scale
    what = torch.cuda.get_device_name() if setting.device.type == "cuda" else "CPU"
    about = (
        f"{what}, torch {torch.__version__}, {where}; {scale.blocks} Llama-like blocks of width "
        f"{scale.width}, {scale.tokens} tokens a rank"
    )
    shown = {quantity: dict(values) for quantity, values in samples.items()}
    shown["host"] = {k: [each - bare_host for each in v] for k, v in samples["host"].items()}
    results = Results()
    for quantity, (label, unit) in COLUMNS.items():
        values = shown.get(quantity, {})
        compared = [
            (of, to) for each, of, to in RATIOS if each == quantity and all(values.get(to, ()))
        ]
        results.add(label, unit, values, *compared)
    settings = vars(args) | {"where": where}
    return Measurement(about, settings, output.repeated_argv(), results.figures, results.ratios)


# ------------------------------------------------------------------- main


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME")
    parser.add_argument("--ranks", type=int, default=8, help="simulated ones")
    parser.add_argument("--ratio", type=float, default=0.75, help="of sending to compute")
    parser.add_argument("--waiting-blocks", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    output.add_output(parser)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        output.fail("no CUDA device; --device cpu --model tiny tries out this script")
    measurement = measured(args)
    if dist.get_rank() == 0:
        output.publish(measurement, args.json)
    dist.destroy_process_group()


def measured(
    args: argparse.Namespace, tell: Callable[[Measurement], object] = lambda _: None
) -> Measurement:
    """Measure all systems. Calls `tell` with what is known after each round."""
    link: Link | None = None
    device = torch.device(args.device)
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        where = f"{dist.get_world_size()} ranks"
    else:
        link = simulated_ranks.start(args.device, args.ranks)
        link.waiting_blocks = args.waiting_blocks
        where = f"rank 0 of {args.ranks}, simulated"
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    setting = Setting(MODELS[args.model], device, mesh)
    chosen = args.systems or [n for n in SYSTEMS if device.type == "cuda" or n not in ON_CUDA]
    base, _ = sample(UNSHARDED, setting, args.steps, link)
    if link is not None:
        _, sent = sample(FSDP2, setting, 1, link)
        link.gigabytes_per_s = sent / 1e9 / (args.ratio * base["compute"] / 1e3)
        where += f" on {link.gigabytes_per_s:.3g} GB/s, {args.waiting_blocks} waiting blocks"
    samples: Samples = {}
    for turn in range(args.rounds):
        for name in chosen if turn % 2 == 0 else chosen[::-1]:
            found, _ = sample(name, setting, args.steps, link)
            for quantity, value in found.items():
                samples.setdefault(quantity, {}).setdefault(name, []).append(value)
        tell(table(args, setting, where, samples, base["host"]))
    return table(args, setting, where, samples, base["host"])


if __name__ == "__main__":
    main()
