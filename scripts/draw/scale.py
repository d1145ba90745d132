"""Draws the pictures of docs/scale.md, each from predictions that it makes: a few minutes each.

gpus: docs/scale_gpus.svg, what each of more and more GPUs gets done.
prefetch: docs/scale_prefetch.svg, prefetch and blocks a unit against memory and time.
ragged: docs/scale_ragged.svg, layouts whose shards differ in size, and the time of a step.

`ahead` draws nothing, and takes 20 minutes: it prints how far ahead to gather, for models of
equal units, and for mixtures whose experts are units of their own, so that heavy and light ones
take turns.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from fsdp_overlap import BlockAtomic, Flat, TensorAtomic
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Training, simulate
from pictures import new_picture, save

DEVICE, FABRIC = "h100_sxm", "nvlink4_400g"
LARGE = "h200_sxm"  # for what does not fit the other
SLOW = "nvlink3_roce_200g"
GIB = 2**30
COLORS = ["#4477aa", "#228833", "#aa3377", "#ccbb44", "#66ccee"]


@dataclass(frozen=True)
class Found:
    """Seconds of a step, those in which it waits for gathers, bytes that the allocator takes, and
    tokens."""

    seconds: float
    waits: float
    reserved: int
    tokens: int


@cache
def predict(training: Training, device: str = DEVICE, fabric: str = FABRIC) -> Found:
    costs = Costs(Device.read(device), Fabric.read(fabric))
    found = simulate(training.program, training.gpus, costs)
    waits: Counter[str] = Counter()
    for each in found.report.collectives:
        waits[each.kind] += each.exposed / 1e6
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"{training.model} on {training.gpus} {device} in {training.replicas} copies, "
        f"{training.blocks_per_unit} blocks a unit, prefetch {training.prefetch}, "
        f"{training.layout}: "
        f"{found.seconds:.3f} s, of which it waits for gathers {waits['all_gather']:.3f} s and for "
        f"reductions {waits['reduce_scatter']:.3f} s, {found.reserved / GIB:.1f} GiB"
    )
    return Found(found.seconds, waits["all_gather"], found.reserved, training.tokens)


def draw_gpus(figure: Figure) -> None:
    """Each model over all GPUs, and the smallest in copies that are spread over 256 each."""
    counts = (8, 64, 256, 1024, 2048, 4096)
    axes = figure.subplots()
    for (model, device, fewest), color in zip(
        (("8b", DEVICE, 8), ("70b", DEVICE, 64), ("405b", LARGE, 256)), COLORS, strict=False
    ):
        base = Training(f"llama3-{model}", gpus=1, micro_batch_size=1, checkpointing="full")
        whole = [replace(base, gpus=count) for count in counts if count >= fewest]
        rates = [_rate(predict(training, device)) for training in whole]
        shown = [100 * rate / rates[0] for rate in rates]
        name = f"{model.upper()}, {device[:4].upper()}"
        axes.plot([each.gpus for each in whole], shown, "o-", color=color, label=name)
        if model == "8b":
            copies = [replace(each, replicas=each.gpus // 256) for each in whole[3:]]
            shown = [100 * _rate(predict(training, device)) / rates[0] for training in copies]
            numbers, name = [each.gpus for each in copies], "8B, a copy on every 256"
            axes.plot(numbers, shown, "s--", color=color, markersize=4, label=name)
    axes.set_ylim(70, 101)
    _finish(
        axes, "Predicted tokens a second and GPU; 100% on the fewest GPUs of each model", counts
    )


def _rate(found: Found) -> float:
    return found.tokens / found.seconds


def draw_prefetch(figure: Figure) -> None:
    """A line for each number of blocks a unit, a point for each prefetch."""
    base = Training("llama3-70b", gpus=256, micro_batch_size=1, checkpointing="full")
    axes = figure.subplots()
    for blocks, color in zip((1, 2, 4), COLORS, strict=False):
        points = {
            prefetch: predict(replace(base, blocks_per_unit=blocks, prefetch=prefetch))
            for prefetch in (0, 1, 2, 3)
        }
        sizes = [found.reserved / GIB for found in points.values()]
        seconds = [found.seconds for found in points.values()]
        label = f"{blocks} block{'s' if blocks > 1 else ''} a unit"
        axes.plot(sizes, seconds, "o-", color=color, label=label)
        for prefetch, size, second in zip(points, sizes, seconds, strict=True):
            axes.annotate(str(prefetch), (size, second), (4, 4), textcoords="offset points")
    limit = Device.read(DEVICE).memory_size / GIB
    axes.axvline(limit, color="#888888", linewidth=1, linestyle=":")
    axes.set(xlabel="GiB a GPU (dotted: what it has)", ylabel="seconds a step")
    _finish(axes, "Llama-3 70B on 256 H100, predicted; the numbers are prefetch")


LAYOUTS: dict[str, tuple[LayoutRule, int]] = {
    "BlockAtomic(rows=128), ragged": (BlockAtomic(rows=128), 2048),
    "TensorAtomic(), ragged": (TensorAtomic(), 2048),
    # On more GPUs it does not fit.
    "TensorAtomic(max_padding=inf), equal": (TensorAtomic(max_padding=math.inf), 8),
}


def draw_ragged(figure: Figure) -> None:
    """What a step takes more than with Flat(), whose shards are equal without padding."""
    base = Training("llama3-8b", gpus=1, micro_batch_size=1, checkpointing="full")
    counts = (8, 32, 128, 512, 2048)
    axes = figure.subplots()
    for (label, (layout, most)), color in zip(LAYOUTS.items(), COLORS, strict=False):
        more = []
        used = [count for count in counts if count <= most]
        for count in used:
            flat, other = (
                predict(replace(base, gpus=count, layout=each)) for each in (Flat(), layout)
            )
            more.append(100 * (other.seconds / flat.seconds - 1))
        axes.plot(used, more, "o-", color=color, label=label)
    _finish(axes, "Llama-3 8B on H100, predicted: time of a step above that of Flat()", counts)


def _finish(axes: Axes, title: str, counts: Sequence[int] = ()) -> None:
    """Title and legend; ``counts``: of GPUs, where percents are drawn by them."""
    if counts:
        axes.set_xscale("log", base=2)
        axes.set(xlabel="GPUs", ylabel="percent", xticks=counts)
        axes.set_xticklabels([f"{count:,}" for count in counts])
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


PICTURES: dict[str, Callable[[Figure], None]] = {
    "gpus": draw_gpus,
    "prefetch": draw_prefetch,
    "ragged": draw_ragged,
}


_FULL = Training("llama3-8b", gpus=64, checkpointing="full")
AHEAD: dict[str, tuple[Training, str, str]] = {
    "8B, 64 GPUs": (_FULL, DEVICE, FABRIC),
    "8B, 64 GPUs, 4,096 tokens, 200 Gb/s": (replace(_FULL, sequence=4096), DEVICE, SLOW),
    "8B, 64 GPUs, 1,024 tokens, 200 Gb/s": (replace(_FULL, sequence=1024), DEVICE, SLOW),
    "405B, 1,024 GPUs": (replace(_FULL, model="llama3-405b", gpus=1024), LARGE, FABRIC),
    "Moonlight, 64 GPUs": (
        replace(_FULL, model="moonlight-16b", expert_parallel=8, sequence=4096),
        DEVICE,
        FABRIC,
    ),
    "DeepSeek-V3, 1,024 GPUs": (
        replace(_FULL, model="deepseek-v3", gpus=1024, expert_parallel=32, sequence=4096, blocks=9),
        LARGE,
        FABRIC,
    ),
}
"""Each with its device and fabric. Of DeepSeek-V3 nine of 58 equal blocks: all take minutes."""


def print_ahead() -> None:
    """Print a row of a table for each case: by prefetch the step and what of its all-gathers is
    exposed, in ms, and GiB reserved."""
    for name, (training, device, fabric) in AHEAD.items():
        found = [predict(replace(training, prefetch=k), device, fabric) for k in range(4)]
        cells = (
            f"{1e3 * f.seconds:.0f}, {1e3 * f.waits:.0f}, {f.reserved / GIB:.1f}" for f in found
        )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Draw the pictures that are named, or all of them."""
    if sys.argv[1:] == ["ahead"]:
        return print_ahead()
    for name in sys.argv[1:] or PICTURES:
        figure = new_picture(7.5, 3.8)
        PICTURES[name](figure)
        save(figure, f"scale_{name}.svg")


if __name__ == "__main__":
    main()
