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
    exposed        milliseconds of a step in which a collective runs and no kernel computes, of
                   three that are profiled
    optimizer      milliseconds of its step alone
    peak           GiB that tensors take at most, of all that a system has
    host           microseconds of the host for each unit's forward and backward, above an unsharded
                   model's, on 16 tokens; where parameters are offloaded it waits for copies too

Systems are built one after the other, `--rounds` times, in alternating order. Python's collector
does not run while one is measured. Of a captured step nothing is measured in part; its host time is
that of a replay. `--model matrices` is 32 matrices of 4,096 x 16,384 and little else.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fsdp_overlap
import fsdp_overlap.optim
from fsdp_overlap.layout import Flat, Layout, TensorAtomic
from fsdp_overlap.optim import newton_schulz
from harness import options, output, simulated_ranks, traces, turns
from harness.measurement import Measurement
from harness.runner import Results
from harness.simulated_link import Link
from harness.simulated_training import MIXED, SCALES, Block, Scale

FEW_TOKENS = 16
PROFILED = 3
LR = 1e-4
UNSHARDED, DDP, FSDP2, OURS = "unsharded", "DDP", "FSDP2", "ours"


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


class Matrices(nn.Module):
    """Tokens to a mean square. Each block has two matrices, [hidden, width] and [width, hidden]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width, hidden = model.scale.width, model.scale.hidden
        self.embedding = nn.Embedding(model.vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, hidden, bias=False),
                nn.GELU(),
                nn.Linear(hidden, width, bias=False),
            )
            for _ in range(model.scale.blocks)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


@dataclass(frozen=True)
class Model:
    scale: Scale
    vocabulary: int
    build: Callable[[Model], nn.Module] = Llama


MODELS = {
    "1b": Model(replace(SCALES["cuda"], blocks=16, width=2048, hidden=8192), 32768),
    "3b": Model(replace(SCALES["cuda"], blocks=28, width=3072, heads=24, hidden=8192), 32768),
    "matrices": Model(replace(SCALES["cuda"], blocks=16, hidden=16384), 128, Matrices),
    "tiny": Model(SCALES["cpu"], 128),
    "tiny matrices": Model(SCALES["cpu"], 128, Matrices),
}


class Setting(NamedTuple):
    """What all systems have in common."""

    model: Model
    device: torch.device
    mesh: DeviceMesh


class Trained(NamedTuple):
    """is_captured: whether steps are replays of a CUDA graph."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizers: list[torch.optim.Optimizer]
    is_captured: bool = False

    def compute(self, tokens: torch.Tensor) -> None:
        self.forward(tokens).backward()

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def drop(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, tokens: torch.Tensor) -> None:
        self.compute(tokens)
        self.optimize()
        self.drop()


Build = Callable[[nn.Module, Setting], Trained]
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]
Value = float | traces.Exposed
Samples = dict[str, dict[str, list[Value]]]
"""By quantity and system."""


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, fused=True)]


def torchs_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's, of the blocks' matrices, and AdamW of the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "blocks" in name
        (matrices if is_matrix else others).append(parameter)
    return [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR, fused=True)]


def own_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [fsdp_overlap.optim.Muon(model, lr=LR)]


def muon_by_torch(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Its symmetric products are torch's, which compute all of them."""
    muon = fsdp_overlap.optim.Muon(model, lr=LR)
    products = newton_schulz._whole_product
    by_torch = patch.object(newton_schulz, "_symmetric_product_for", lambda x: products)
    muon.step = by_torch(muon.step)
    return [muon]


def own_adamw(model: nn.Module, **settings: Any) -> list[torch.optim.Optimizer]:
    return [fsdp_overlap.optim.AdamW(model.parameters(), lr=LR, **settings)]


def autocast(model: Callable[..., Any], setting: Setting) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(setting.device.type, torch.bfloat16):
            return model(tokens)

    return forward


def unsharded(model: nn.Module, setting: Setting, optimizers: Optimizers = adamw) -> Trained:
    return Trained(autocast(model, setting), optimizers(model))


def ddp(model: nn.Module, setting: Setting) -> Trained:
    wrapped = DistributedDataParallel(model, device_mesh=setting.mesh)
    return Trained(autocast(wrapped, setting), adamw(model))


def torchs(
    model: Any, setting: Setting, optimizers: Optimizers = adamw, **policies: Any
) -> Trained:
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module, mesh=setting.mesh, mp_policy=MIXED, **policies)
    return Trained(model, optimizers(model))


def ours(
    model: Any,
    setting: Setting,
    optimizers: Optimizers = adamw,
    layout: Layout = Flat(),  # noqa: B008, frozen
    is_captured: bool = False,
    **policies: Any,
) -> Trained:
    ctx = fsdp_overlap.FsdpContext(setting.mesh, layout=layout)
    for module in (*model.blocks, model):
        fsdp_overlap.fully_shard(module, ctx, mp_policy=MIXED, **policies)
    return Trained(model, optimizers(model), is_captured)


FP8 = fsdp_overlap.QuantizedCommPolicy(torch.float8_e4m3fn, torch.float8_e4m3fn)
HOST = fsdp_overlap.CPUOffloadPolicy()
WHOLE, FLAT = "ours, Muon, whole matrices", "ours, Muon, flat shards"
BY_TORCH = "ours, Muon, whole matrices, torch's products"
SYSTEMS: dict[str, Build] = {
    UNSHARDED: unsharded,
    DDP: ddp,
    FSDP2: torchs,
    OURS: ours,
    "ours, its own AdamW": partial(ours, optimizers=own_adamw),
    "ours, its own AdamW, captured": partial(ours, optimizers=own_adamw, is_captured=True),
    "ours, 8 bits": partial(ours, comm_policy=FP8),
    "unsharded, torch's Muon": partial(unsharded, optimizers=torchs_muon),
    "FSDP2, torch's Muon": partial(torchs, optimizers=torchs_muon),
    WHOLE: partial(ours, optimizers=own_muon, layout=TensorAtomic()),
    BY_TORCH: partial(ours, optimizers=muon_by_torch, layout=TensorAtomic()),
    FLAT: partial(ours, optimizers=own_muon),
    "FSDP2, offloaded": partial(torchs, offload_policy=fsdp2.CPUOffloadPolicy()),
    "ours, offloaded": partial(ours, offload_policy=HOST),
    "ours, offloaded, overlapped": partial(
        ours,
        optimizers=partial(own_adamw, overlap=fsdp_overlap.optim.OverlapPolicy()),
        offload_policy=HOST,
    ),
}
ON_CUDA = tuple(
    name for name in SYSTEMS if "offloaded" in name or "captured" in name or name == BY_TORCH
)
"""A CPU's parameters are there already, it has no graphs, and its products are torch's."""


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
    gc.collect()  # the system before, which its user has let go of by now
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with setting.device:
        model = setting.model.build(setting.model)
    yield build(model, setting), before


def sample(name: str, setting: Setting, steps: int, link: Link | None) -> dict[str, Value]:
    """What was measured of a system."""
    scale = setting.model.scale
    with built(SYSTEMS[name], setting) as (trained, before):
        many, few = (
            torch.randint(setting.model.vocabulary, (1, count), device=setting.device)
            for count in (scale.tokens, FEW_TOKENS)
        )
        step: Callable[[], object] = partial(trained.step, many)
        for _ in range(scale.warmup + 1):
            step()
        if trained.is_captured:
            step = captured(step)
        found: dict[str, Value] = {}
        with turns.quiet_gc():
            if setting.device.type == "cuda":
                found["peak"] = (torch.cuda.max_memory_allocated() - before) / 2**30
            seconds = statistics.median(timed(setting, step) for _ in range(steps))
            found["step"] = seconds * 1e3
            found["tokens"] = scale.tokens / seconds
            found["exposed"] = exposed(setting, step)
            if trained.is_captured:  # its transfers stay as long as they were in the capture
                host = timed(setting, step, waits=False)
                found["host"] = host * 1e6 / (scale.blocks + 1)
            else:
                found.update(in_parts(trained, setting, many, few, steps, link))
    return found


def in_parts(
    trained: Trained,
    setting: Setting,
    many: torch.Tensor,
    few: torch.Tensor,
    steps: int,
    link: Link | None,
) -> dict[str, float]:
    """What forward and backward take, the optimizer, and the host."""

    def alone(tokens: torch.Tensor, waits: bool = True) -> float:
        """Seconds of a pass. An overlapped optimizer has to step what it began to."""
        seconds = timed(setting, partial(trained.compute, tokens), waits)
        if is_overlapped:
            trained.optimize()
        trained.drop()
        return seconds

    is_overlapped = any(getattr(each, "overlapped", None) for each in trained.optimizers)
    computing = [alone(many) for _ in range(steps)]
    optimizing = []
    for _ in range(3):
        trained.compute(few)
        optimizing.append(timed(setting, trained.optimize))
        trained.drop()
    with patch.object(link, "gigabytes_per_s", None) if link else nullcontext():
        host = [alone(few, waits=False) for _ in range(7)]
    return {
        "compute": statistics.median(computing) * 1e3,
        "optimizer": statistics.median(optimizing) * 1e3,
        "host": statistics.median(host) * 1e6 / (setting.model.scale.blocks + 1),
    }


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """A replay of the step's CUDA graph. The step has run, so that optimizer states are there."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def exposed(setting: Setting, step: Callable[[], object]) -> Value:
    """Milliseconds, as the overlap report of three steps says."""
    if setting.device.type != "cuda":
        return 0.0

    def run() -> None:
        for _ in range(PROFILED):
            step()
        synchronize(setting)

    synchronize(setting)
    return traces.Exposed(run, PROFILED)


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
    ("step", "ours, its own AdamW, captured", "ours, its own AdamW"),
    ("step", "ours, 8 bits", OURS),
    ("step", WHOLE, "FSDP2, torch's Muon"),
    ("step", FLAT, "FSDP2, torch's Muon"),
    ("optimizer", WHOLE, "unsharded, torch's Muon"),
    ("optimizer", WHOLE, BY_TORCH),
    ("optimizer", FLAT, "unsharded, torch's Muon"),
    ("step", "ours, offloaded", "FSDP2, offloaded"),
    ("step", "ours, offloaded, overlapped", "FSDP2, offloaded"),
]


def known(values: Sequence[Value], waits: bool) -> list[float]:
    return [
        each if isinstance(each, float) else each.value()
        for each in values
        if isinstance(each, float) or waits or each.is_known()
    ]


def table(
    args: argparse.Namespace,
    setting: Setting,
    where: str,
    samples: Samples,
    bare_host: float,
    waits: bool = True,
) -> Measurement:
    """`waits`: for all traces to be read."""
    scale = setting.model.scale
    what = torch.cuda.get_device_name() if setting.device.type == "cuda" else "CPU"
    model = (
        f"{scale.blocks} Llama-like blocks of width {scale.width}"
        if setting.model.build is Llama
        else f"{2 * scale.blocks} matrices of {scale.width} x {scale.hidden}"
    )
    about = f"{what}, {where}; {model}, {scale.tokens} tokens a rank"
    shown = {
        quantity: {name: v for name, found in values.items() if (v := known(found, waits))}
        for quantity, values in samples.items()
    }
    shown["host"] = {k: [each - bare_host for each in v] for k, v in shown["host"].items()}
    results = Results(about, where=where)
    for quantity, (label, unit) in COLUMNS.items():
        values = shown.get(quantity, {})
        compared = [
            (of, to)
            for each, of, to in RATIOS
            if each == quantity
            and all(values.get(to, ()))
            and len(values.get(of, ())) == len(values.get(to, ()))  # else a round is under way
        ]
        results.add(label, unit, values, *compared)
    return results.measurement(args)


# ------------------------------------------------------------------- main


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = options.parser(__doc__, rounds=2, steps=8)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME")
    parser.add_argument("--ranks", type=int, default=8, dest="simulated", help="simulated ones")
    parser.add_argument("--ratio", type=float, default=0.75, help="of sending to compute")
    parser.add_argument("--waiting-blocks", type=int, default=32, metavar="N")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        output.fail("no CUDA device; --device cpu --model tiny tries out this script")
    measurement = measured(args)
    if dist.get_rank() == 0:
        output.publish(measurement, args.json)
    dist.destroy_process_group()


Tell = Callable[[Measurement, str], object]


def measured(args: argparse.Namespace, tell: Tell = lambda *_: None) -> Measurement:
    """Measure all systems. Calls `tell` after each with what is known, and a line about it. On
    simulated ranks a system that raises is left out from then on."""
    link: Link | None = None
    device = torch.device(args.device)
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        where = f"{dist.get_world_size()} ranks"
    else:
        link = simulated_ranks.start(args.device, args.simulated)
        link.waiting_blocks = args.waiting_blocks
        where = f"rank 0 of {args.simulated}, simulated"
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    setting = Setting(MODELS[args.model], device, mesh)
    chosen = args.systems or [n for n in SYSTEMS if device.type == "cuda" or n not in ON_CUDA]
    base = sample(UNSHARDED, setting, args.steps, link)
    if link is not None:
        sent = sent_by(FSDP2, setting, link)
        [compute] = known([base["compute"]], True)
        link.gigabytes_per_s = sent / 1e9 / (args.ratio * compute / 1e3)
        where += f" on {link.gigabytes_per_s:.3g} GB/s, {args.waiting_blocks} waiting blocks"
    samples: Samples = {"host": {}}

    def result(waits: bool = True) -> Measurement:
        [bare_host] = known([base["host"]], True)
        about = "; ".join([where, *(f"{name} raised" for name in chosen if name in raised)])
        return table(args, setting, about, samples, bare_host, waits)

    raised: set[str] = set()
    for turn in range(args.rounds):
        for name in chosen if turn % 2 == 0 else chosen[::-1]:
            if name in raised:
                continue
            try:
                is_base = turn == 0 and name == UNSHARDED
                found = base if is_base else sample(name, setting, args.steps, link)
            except Exception:
                if link is None:  # the other ranks would wait
                    raise
                traceback.print_exc()
                raised.add(name)
                tell(result(False), f"{name} raised")
                continue
            for quantity, value in found.items():
                samples.setdefault(quantity, {}).setdefault(name, []).append(value)
            said = (f"{key} {known([found[key]], True)[0]:.4g}" for key in ("tokens", "step"))
            tell(result(False), f"{name}: {' tokens/s, '.join(said)} ms")
    return result()


def sent_by(name: str, setting: Setting, link: Link) -> float:
    """Bytes of a step."""
    with built(SYSTEMS[name], setting) as (trained, _):
        batch = torch.zeros(1, FEW_TOKENS, dtype=torch.int64, device=setting.device)
        for _ in range(2):
            link.sent.clear()
            trained.step(batch)
        return float(sum(transfer.nbytes for transfer in link.sent))


if __name__ == "__main__":
    main()
